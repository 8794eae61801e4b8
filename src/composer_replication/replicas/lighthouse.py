"""A lighthouse for replicas on one network: torchft's, and beside it the records of the run."""

from __future__ import annotations

from pathlib import Path

from torchft.coordination import LighthouseServer

from composer_replication.replicas.record_server import RecordServer
from composer_replication.replicas.replica_errors import unreachable


class Lighthouse:
    """Serves at ``port``, the records at the next one, until it is closed; a port in use is refused (CR1101).

    A quorum waits ``grace_seconds`` for replicas that are alive; one that gives no sign for ``heartbeat_seconds`` is gone.
    """

    def __init__(
        self,
        token: str,
        *,
        host: str = "127.0.0.1",
        port: int = 29510,
        min_replicas: int = 1,
        grace_seconds: float = 60.0,
        heartbeat_seconds: float = 5.0,
        folder: Path | None = None,
    ) -> None:
        self.address = f"{host}:{port}"
        try:
            self._records = RecordServer(token, host=host, port=port + 1, takes_records=True, folder=folder)
        except (OSError, ValueError) as error:
            raise unreachable("the lighthouse's port", error, where=f"{host}:{port + 1}") from error
        try:
            self._server = LighthouseServer(
                bind=self.address,
                min_replicas=min_replicas,
                join_timeout_ms=int(grace_seconds * 1000),
                heartbeat_timeout_ms=int(heartbeat_seconds * 1000),
            )
        except Exception as error:
            self._records.close()
            raise unreachable("the lighthouse's port", error, where=self.address) from error

    def close(self) -> None:
        self._server.shutdown()
        self._records.close()
