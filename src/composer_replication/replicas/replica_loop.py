"""One replica's side of the run: train ``interval`` steps, offer, merge, go on.

    interval = sync_every / fragments       steps between two outer steps, which take the fragments in turn
    delay                                   steps that are trained while an offer is under way
    rounds = max_steps / interval           and one for each further fragment; after the whole ones a plain mean

It knows nothing of a trainer: ``after_step`` is called once a step, and says when the run is over.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, Literal

from composer_replication.config import ReplicasSection
from composer_replication.replicas.outer_step import OuterState
from composer_replication.replicas.replica_errors import damaged, over
from composer_replication.replicas.rounds import Merge, Rounds, State
from composer_replication.replicas.run_records import RunEnd


class ReplicaLoop:
    """Ties the outer state to a transport; ``on_merge`` gets a row of figures after every outer step."""

    def __init__(
        self,
        rounds: Rounds,
        state: OuterState,
        options: ReplicasSection,
        on_merge: Callable[[dict[str, Any]], None] = lambda _: None,
    ) -> None:
        self._rounds, self._state, self._options, self._on_merge = rounds, state, options, on_merge
        self._tokens_sent: dict[int, int] = {}  # by fragment: how many had been seen when it was offered last
        self._offered_at: int | None = None
        self._num_rounds = self._num_whole = 0
        self.round_idx = self._step = self._tokens = self._first_tokens = 0

    def begin(self, identity: Mapping[str, str], *, max_steps: int, step: int, tokens: int) -> RunEnd | None:
        """Join, and take over the outer state of the run (CR1107: it is lost); the end of a run that is over already."""
        self._num_whole = max_steps // self._options.interval
        self._num_rounds = -(-max_steps // self._options.interval)
        self._step, self._tokens, self._first_tokens = step, tokens, tokens
        found = self._rounds.join(identity, self._state.dump)
        if found is not None:
            self._take(found)
        self._catch_up()
        self._state.take_outer()
        end = self._rounds.records.end()
        if end is None and self.round_idx == 0 and step > self._options.interval + self._options.delay:
            raise damaged("no replica that lives holds the outer state of this run")
        return end

    def after_step(self, step: int, tokens: int) -> RunEnd | None:
        """Call after every step of the inner optimiser, with the tokens seen so far; the end once there is one."""
        self._step, self._tokens = step, tokens
        end = self._merge_if_due()
        if end is None and step % self._options.interval == 0:
            self._offer()
            end = self._merge_if_due()
        if end is not None:
            return end
        if self.round_idx >= self._num_rounds:
            return self._end("finished")
        return self._rounds.records.ended()

    def finish(self) -> RunEnd:
        """The last rounds, without training; the live weights become the outer ones (CR1105: all ended without us)."""
        end = self._merge() if self._offered_at is not None else None
        self._catch_up()
        last = self._num_rounds + len(self._state.fragments) - 1
        while end is None and self.round_idx < last:
            self._offer()
            end = self._merge()
        if end is not None and end.kind == "halted":
            return end
        if self.round_idx < last:
            raise over(self.round_idx, last)
        self._state.take_outer()
        return self._rounds.finish(self._end("finished"))

    def halt(self, reason: str) -> RunEnd:
        """This replica's guard has fired: all stop for its reason, or for that of one which fired before."""
        return self._rounds.finish(self._end("halted", reason))

    def close(self) -> None:
        """Leave, whatever happened."""
        self._rounds.close()

    def _end(self, kind: Literal["finished", "halted"], reason: str = "") -> RunEnd:
        return RunEnd(kind, self.round_idx, self._rounds.records.replica, reason)

    def _offer(self) -> None:
        turn = self.round_idx % len(self._state.fragments)
        tokens = self._tokens - self._tokens_sent.get(turn, self._first_tokens)
        self._tokens_sent[turn] = self._tokens
        payload, fingerprint = self._state.fragments[turn].offer(), self._state.fingerprint()
        self._rounds.offer(self.round_idx, payload, tokens=tokens, fingerprint=fingerprint)
        self._offered_at = self._step

    def _merge_if_due(self) -> RunEnd | None:
        is_due = self._offered_at is not None and self._step >= self._offered_at + self._options.delay
        return self._merge() if is_due else None

    def _merge(self) -> RunEnd | None:
        began = time.monotonic()
        found = self._rounds.collect(self.round_idx)
        self._offered_at = None
        if isinstance(found, RunEnd):
            return found
        self._take(found, stall_seconds=time.monotonic() - began)
        self._catch_up()
        return None

    def _catch_up(self) -> None:
        """What the others decided while this replica was away."""
        while (found := self._rounds.decided(self.round_idx)) is not None:
            self._take(found)

    def _take(self, found: Merge | State, *, stall_seconds: float = 0.0) -> None:
        if isinstance(found, State):
            self._state.load(found.data)
            self.round_idx = found.round_idx
            return
        fragment = self._state.fragments[found.round_idx % len(self._state.fragments)]
        is_last = found.round_idx >= self._num_whole
        divergence, norm = fragment.merge(found.contributions, is_included=found.is_included, is_last=is_last)
        self.round_idx = found.round_idx + 1
        self._rounds.after_merge(self.round_idx)
        self._on_merge(
            {
                "outer_step": self.round_idx,
                "step": self._step,
                "present": sorted(c.replica for c in found.contributions),
                "tokens": sum(c.tokens for c in found.contributions),
                "is_included": found.is_included,
                "divergence": divergence,
                "update_norm": norm,
                "stall_seconds": round(stall_seconds, 3),
                "outer_sha256": self._state.fingerprint(),
                "bytes": dict(self._rounds.records.num_bytes),
            }
        )
