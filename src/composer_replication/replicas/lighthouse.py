"""A lighthouse for replicas on one network: torchft's, and beside it the records of the run."""

from __future__ import annotations

from pathlib import Path

from torchft.coordination import LighthouseServer

from composer_replication.replicas.record_server import RecordServer
from composer_replication.replicas.replica_errors import unreachable


class Lighthouse:
    """Serves until it is closed.

    Args:
        token: what replicas must know.
        host: the interface to listen on.
        port: torchft's; the records are at the next one.
        min_replicas: without which there is no quorum.
        grace_seconds: how long a quorum waits for replicas that are alive and have not come yet.
        heartbeat_seconds: without a sign of life a replica counts as gone.
        folder: where the records of the run outlive this process; None for memory alone.

    Raises:
        MissingError: a port is in use, or the interface is not there (CR1101).
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
