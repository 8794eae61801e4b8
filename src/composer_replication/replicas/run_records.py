"""What several replicas of one run write down once: who they are, what the run is, and how it ended.

    run                       what the run is: fingerprints that every replica must share, and the first weights
    lease/I-N                 the N-th process that is replica I; a higher N takes over from a lower one
    lease/I-N-joined-ROUND    from which outer step on it is waited for
    lease/I-N-left            it ended in order and is waited for no longer
    end                       the run is over: finished, or halted by one replica's guard

Nothing here depends on clocks of other machines.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Literal

from composer_replication.replicas.object_store import ObjectStore
from composer_replication.replicas.replica_errors import replaced, unequal

END_EVERY_SECONDS = 5.0  # how often a training replica looks whether the run is over


@dataclass(frozen=True, slots=True)
class RunEnd:
    """Why a run is over; ``reason`` is what its guard said, empty where all steps were taken."""

    kind: Literal["finished", "halted"]
    round_idx: int
    replica: int
    reason: str = ""


class RunRecords:
    """One replica's view of them."""

    def __init__(self, store: ObjectStore, *, replica: int) -> None:
        self._store, self.num_bytes = store, store.num_bytes
        self.replica = replica
        self.lease = -1
        self._looked_at = 0.0

    def agree(self, identity: Mapping[str, str], more: Mapping[str, str] | None = None) -> dict[str, str]:
        """Compare with the run that is there (CR1103); with ``more``, which is not compared, found it where there is none.

        Returns what its founder wrote as ``more``.
        """
        own = json.dumps({"identity": {**identity}, "more": {**(more or {})}}, sort_keys=True).encode()
        known = self._store.read("run")
        if known is None and more is not None and self._store.create("run", own):
            known = own
        known = known or self._store.read("run")
        if known is None:
            return {}
        table = json.loads(known)
        names = {name for name, _ in table["identity"].items() ^ identity.items()}
        if names:
            raise unequal(sorted(names), where=self._store.address)
        founders: dict[str, str] = table["more"]
        return founders

    def take_lease(self, round_idx: int) -> None:
        """From now on this process is the replica, and is waited for from ``round_idx`` on."""
        while True:
            self.lease = _newest(self._store.names("lease")).get(self.replica, -1) + 1
            if self._store.create(f"lease/{self.replica}-{self.lease}", secrets.token_bytes(8)):
                break
        self.ask_to_wait(round_idx)

    def ask_to_wait(self, round_idx: int) -> None:
        """Others wait for this replica at that outer step and the next."""
        self._store.create(f"lease/{self.replica}-{self.lease}-joined-{round_idx:08d}", b"")

    def leave(self) -> None:
        """In order: nobody waits for this process any longer."""
        if self.lease >= 0:
            self._store.create(f"lease/{self.replica}-{self.lease}-left", b"")

    def roll_call(self, round_idx: int) -> tuple[set[int], set[int]]:
        """Replicas that asked to be waited for at ``round_idx``, and those that left; CR1105 where this one was replaced."""
        names = self._store.names("lease")
        newest = _newest(names)
        if newest.get(self.replica, -1) > self.lease >= 0:
            raise replaced(self.replica, where=self._store.address)
        recent, left = set(), set()
        for replica, lease in newest.items():
            own = f"{replica}-{lease}-"
            words = [name.removeprefix(own) for name in names if name.startswith(own)]
            if "left" in words:
                left.add(replica)
            elif any(int(word.removeprefix("joined-")) >= round_idx - 1 for word in words):
                recent.add(replica)
        return recent, left

    def finish(self, end: RunEnd) -> RunEnd:
        """Write how the run ended; the first to say so is right. Returns what counts."""
        self._store.create("end", json.dumps(asdict(end), sort_keys=True).encode())
        return self.end() or end

    def end(self) -> RunEnd | None:
        """How the run ended; None while it goes on."""
        self._looked_at = time.monotonic()
        data = self._store.read("end")
        return None if data is None else RunEnd(**json.loads(data))

    def ended(self) -> RunEnd | None:
        """The same, asked so seldom that it may be called at every step."""
        return self.end() if time.monotonic() - self._looked_at >= END_EVERY_SECONDS else None


def _newest(names: list[str]) -> dict[int, int]:
    parts = [name.split("-") for name in names]
    return dict(sorted((int(replica), int(lease)) for replica, lease, *_ in parts))  # the last one stays
