"""A lighthouse for replicas on one network: torchft's, and beside it the records of the run."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from torchft.coordination import LighthouseServer

from composer_replication.config import ReplicasSection
from composer_replication.replicas.object_store import open_store
from composer_replication.replicas.record_server import RecordServer, records_address
from composer_replication.replicas.replica_errors import unreachable


class Lighthouse:
    """Serves at ``options.lighthouse``, the records at the next port, until it is closed; a port in use is refused (CR1101).

    A quorum waits ``options.grace_seconds`` for replicas that are alive; one that gives no sign for ``heartbeat_seconds`` is gone.
    In ``folder`` the records outlive this process.
    """

    def __init__(
        self, token: str, options: ReplicasSection, folder: Path | None = None, heartbeat_seconds: float = 5.0
    ) -> None:
        host, port = records_address(options.lighthouse)
        place = "memory:///" if folder is None else f"file://{folder.resolve()}"
        with ExitStack() as stack:
            try:
                store = open_store(place, patience_seconds=0.0)
                records = RecordServer(token, store, host=host, port=port, takes_records=True)
                stack.callback(records.close)
                server = LighthouseServer(
                    bind=options.lighthouse,
                    min_replicas=options.min_replicas,
                    join_timeout_ms=int(options.grace_seconds * 1000),
                    heartbeat_timeout_ms=int(heartbeat_seconds * 1000),
                )
            except Exception as error:
                raise unreachable("the lighthouse's ports", error, where=options.lighthouse) from error
            stack.callback(server.shutdown)
            self.close = stack.pop_all().close
