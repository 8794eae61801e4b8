"""The border between the outer step and whatever carries it: two transports keep this one contract."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from composer_replication.replicas.run_records import RunEnd, RunRecords


@dataclass(frozen=True, slots=True)
class Contribution:
    """What one replica sent for one outer step; ``tokens`` is its weight in the mean."""

    replica: int
    tokens: int
    payload: bytes


@dataclass(frozen=True, slots=True)
class Merge:
    """What all replicas merge in one outer step. ``is_included``: this replica's newest offer is among it."""

    round_idx: int
    contributions: tuple[Contribution, ...]
    is_included: bool


@dataclass(frozen=True, slots=True)
class State:
    """A whole outer state to take over, as it was before the outer step ``round_idx``."""

    round_idx: int
    data: bytes


class Rounds(Protocol):
    """One replica's way to the others. A round is one outer step of one fragment, counted from 0."""

    records: RunRecords

    def join(self, identity: Mapping[str, str], dump: Callable[[], bytes]) -> State | None:
        """Take part from now on; ``dump`` gives this replica's outer state, at any time. None where that counts."""

    def offer(self, round_idx: int, payload: bytes, *, tokens: int, fingerprint: str) -> None:
        """Send what this replica learned; ``fingerprint`` is that of its outer state."""

    def decided(self, round_idx: int) -> Merge | State | None:
        """What was decided already, without waiting."""

    def collect(self, round_idx: int) -> Merge | State | RunEnd:
        """Wait until the round is decided. A state where this replica has fallen too far behind."""

    def after_merge(self, round_idx: int) -> None:
        """``round_idx`` rounds are merged now."""

    def finish(self, end: RunEnd) -> RunEnd:
        """The run is over; returns what the first one said."""

    def close(self) -> None:
        """Leave, whatever happened; does nothing the second time."""
