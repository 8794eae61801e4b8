"""Outer steps through an object store: for replicas that share no network, or are never there at the same time.

    round/T/offer-I-N-TOKENS-SHA-STATE   what replica I (its N-th process) learned; the name holds all but the numbers
    round/T/merge                        which offers count in round T; whoever creates it first decides for all
    state/T-SHA                          the outer state before round T, for those who come later

A replica that has offered waits for everybody who took part in the last round or asked to be waited for. Once
``quorum`` offers are there it waits ``grace_seconds`` more, by its own clock, and then writes down who counts. One
that comes too late takes what was decided, drops its own work of that round and asks to be waited for. Every
``state_every`` rounds the writer of the merge keeps the outer state and deletes what nobody needs any longer.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from composer_replication.config import ReplicasSection
from composer_replication.replicas.object_store import ObjectStore
from composer_replication.replicas.replica_errors import damaged, too_few
from composer_replication.replicas.rounds import Contribution, Merge, State
from composer_replication.replicas.run_records import RunEnd, RunRecords


class _Offer(NamedTuple):
    replica: int
    lease: int
    tokens: int
    sha: str
    state: str
    name: str


class StoreRounds:
    """``Rounds`` over a store that was probed; ``state_every`` rounds lie between two kept states."""

    def __init__(
        self,
        store: ObjectStore,
        options: ReplicasSection,
        *,
        replica: int,
        state_every: int = 8,
        poll_seconds: float = 0.5,
    ) -> None:
        self._store, self._options = store, options
        self.records = RunRecords(store, replica=replica)
        self._state_every, self._poll_seconds = state_every, poll_seconds
        self._own: tuple[int, str, bytes] | None = None  # round, name, payload of the newest offer
        self._fingerprint = ""
        self._has_decided = False

    def join(self, identity: Mapping[str, str], dump: Callable[[], bytes]) -> State | None:
        self._dump, state = dump, dump()
        if self._store.read("run") is None:  # the state first, so that a run which is there has one
            self._keep(0, state)
        first = self.records.agree(identity, {"first_state": hashlib.sha256(state).hexdigest()})
        newest = self._newest_state(first["first_state"])
        merged = [int(name[:8]) for name in self._store.names("round") if name.endswith("/merge")]
        self.records.take_lease(max(merged, default=-1) + 1)
        return None if newest.round_idx == 0 and newest.data == state else newest

    def offer(self, round_idx: int, payload: bytes, *, tokens: int, fingerprint: str) -> None:
        sha = hashlib.sha256(payload).hexdigest()
        lease = f"{self.records.replica}-{self.records.lease}"
        name = f"offer-{lease}-{tokens}-{sha}-{fingerprint[:16]}"
        self._fingerprint, self._own = fingerprint[:16], (round_idx, name, payload)
        if self._read_merge(round_idx) is None:
            self._store.create(f"{_folder(round_idx)}/{name}", payload, kind="outer")

    def decided(self, round_idx: int) -> Merge | State | None:
        record = self._read_merge(round_idx)
        return None if record is None else self._merged(round_idx, record)

    def collect(self, round_idx: int) -> Merge | State | RunEnd:
        start, quorum_since, options = time.monotonic(), None, self._options
        before, patience = set(range(options.num_replicas)), options.deadline_seconds
        if (last := self._read_merge(round_idx - 1) if round_idx else None) is not None:
            before, patience = {_parsed(name).replica for name in last["offers"]}, options.grace_seconds
        while True:
            found = self.decided(round_idx) or self.records.end()
            if found is not None:
                return found
            offers = self._offers(round_idx)
            recent, left = self.records.roll_call(round_idx)
            present, now = {offer.replica for offer in offers}, time.monotonic()
            if len(present) >= options.min_replicas:
                quorum_since = quorum_since or now
                if (before | recent) - left <= present or now - quorum_since >= patience:
                    self._decide(round_idx, offers)
                    continue
            elif now - start >= options.deadline_seconds:
                raise too_few(len(present), options, where=self._store.address)
            time.sleep(self._poll_seconds)

    def after_merge(self, round_idx: int) -> None:
        if self._has_decided and round_idx % self._state_every == 0:
            self._keep(round_idx, self._dump())
            self._collect_garbage(round_idx)

    def finish(self, end: RunEnd) -> RunEnd:
        kept = {int(name[:8]) for name in self._store.names("state")}
        if end.kind == "finished" and end.round_idx not in kept:
            self._keep(end.round_idx, self._dump())
        return self.records.finish(end)

    def close(self) -> None:
        self.records.leave()
        self.records.lease = -1

    def _decide(self, round_idx: int, offers: list[_Offer]) -> None:
        names = sorted(offer.name for offer in offers)
        record = {"offers": names, "state": self._fingerprint, "by": self.records.replica}
        self._store.create(f"{_folder(round_idx)}/merge", json.dumps(record, sort_keys=True).encode())

    def _read_merge(self, round_idx: int) -> dict[str, Any] | None:
        data = self._store.read(f"{_folder(round_idx)}/merge")
        return None if data is None else json.loads(data)

    def _offers(self, round_idx: int) -> list[_Offer]:
        """Of the newest process of each replica; only those upon this very outer state, so that one astray is alone."""
        names = [name for name in self._store.names(_folder(round_idx)) if name.startswith("offer-")]
        offers = sorted(map(_parsed, names))  # of one replica the newest process is the last, and stays
        return list({offer.replica: offer for offer in offers if offer.state == self._fingerprint}.values())

    def _merged(self, round_idx: int, record: Mapping[str, Any]) -> Merge | State:
        own_name = self._own[1] if self._own and self._own[0] == round_idx else ""
        if own_name and record["state"] != self._fingerprint:
            raise damaged("this replica's outer state is not the others'")
        contributions, names = [], record["offers"]
        for offer in map(_parsed, names):
            payload = self._payload(round_idx, offer)
            if payload is None:  # deleted long ago
                return self._newest_state("", later_than=round_idx)
            contributions.append(Contribution(offer.replica, offer.tokens, payload))
        self._has_decided = record["by"] == self.records.replica
        if own_name not in names:
            self.records.ask_to_wait(round_idx + 1)
        return Merge(round_idx, tuple(contributions), own_name in names)

    def _payload(self, round_idx: int, offer: _Offer) -> bytes | None:
        if self._own is not None and self._own[:2] == (round_idx, offer.name):
            return self._own[2]
        data = self._store.read(f"{_folder(round_idx)}/{offer.name}", kind="outer")
        if data is not None and hashlib.sha256(data).hexdigest() != offer.sha:
            raise damaged("an outer gradient is not what its name says")
        return data

    def _keep(self, round_idx: int, state: bytes) -> None:
        self._store.create(f"state/{round_idx:08d}-{hashlib.sha256(state).hexdigest()}", state, kind="states")

    def _newest_state(self, first_sha: str, *, later_than: int = -1) -> State:
        """The newest kept one; of the first states only that of the run's founder counts."""
        for name in reversed(self._store.names("state")):
            round_idx, sha = int(name[:8]), name[9:]
            if round_idx <= later_than or (round_idx == 0 and sha != first_sha):
                continue
            data = self._store.read(f"state/{name}", kind="states")
            if data is not None and hashlib.sha256(data).hexdigest() == sha:
                return State(round_idx, data)
        raise damaged("the store holds no whole outer state")

    def _collect_garbage(self, round_idx: int) -> None:
        """Offers of rounds before the last kept state but one, and states before it; merges are small and stay."""
        oldest = round_idx - self._state_every
        offers = [name for name in self._store.names("round") if "/offer-" in name and int(name[:8]) < oldest]
        states = [name for name in self._store.names("state") if int(name[:8]) < oldest]
        self._store.delete([f"round/{name}" for name in offers] + [f"state/{name}" for name in states])


def _folder(round_idx: int) -> str:
    return f"round/{round_idx:08d}"


def _parsed(name: str) -> _Offer:
    _, replica, lease, tokens, sha, state = name.split("-")
    return _Offer(int(replica), int(lease), int(tokens), sha, state, name)
