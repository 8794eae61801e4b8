"""What a guard would have said during a run that is over, from its log."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from composer_replication.errors import InputError

if TYPE_CHECKING:
    from composer_replication.interfaces import Guard, GuardStatus
    from composer_replication.report.column_choice import Chosen, ChosenColumns
    from composer_replication.report.log_columns import Column, RunLog

MOST_NOT_FINITE = 0.1
"""Share of a column's values that may be NaN or infinite (two always may): what is left of a column
with more of them would be a selection, and an honest verdict over it impossible."""

_ALWAYS_TOLERATED = 2


@dataclass(frozen=True, slots=True)
class Reading:
    """One update of the guard: a truth, and the newest proxy and KL at or before its step."""

    step: int
    proxy: float
    truth: float
    kl: float | None


@dataclass(frozen=True, slots=True)
class Replay:
    """The guard's answers, one a reading."""

    readings: tuple[Reading, ...]
    statuses: tuple[GuardStatus, ...]

    @property
    def fired_index(self) -> int | None:
        """Index of the first update that fired."""
        return next((index for index, status in enumerate(self.statuses) if status.fire), None)


def readings_of(log: RunLog, chosen: ChosenColumns) -> tuple[tuple[Reading, ...], tuple[str, ...]]:
    """Pair each truth with what training showed then; and notes on what was left out.

    A log often has the truth in other rows than the proxy (a reward every logging step, an
    evaluation now and then). Each truth at step s makes one reading, with the newest proxy and
    the newest KL whose step is at most s. A truth before the first proxy is left out. A proxy
    may serve several truths; that is noted, as are gaps in the steps.

    Raises:
        InputError: a column holds text (CR0636) or too many NaN (CR0637), or its steps fall or
            repeat (CR0635).
    """
    notes: list[str] = []
    for role, one in (("proxy", chosen.proxy), ("truth", chosen.truth), ("kl", chosen.kl)):
        if one is not None:
            _check(log, one, role, notes)
    proxy = _Newest(log.columns[chosen.proxy.name], chosen.proxy.sign)
    kl = None if chosen.kl is None else _Newest(log.columns[chosen.kl.name], chosen.kl.sign)
    truth = log.columns[chosen.truth.name]
    readings, num_early, num_stale = [], 0, 0
    for step, value in zip(truth.steps, truth.values, strict=True):
        is_new = proxy.advance(step)
        newest_kl = None
        if kl is not None:
            kl.advance(step)
            newest_kl = kl.value
        if proxy.value is None:
            num_early += 1
            continue
        num_stale += not is_new
        readings.append(Reading(step, proxy.value, chosen.truth.sign * value, newest_kl))
    if num_early:
        notes.append(f"{num_early} value(s) of the truth before the first proxy were left out.")
    if num_stale:
        notes.append(f"{num_stale} value(s) of the truth had no new proxy and were paired with an older one.")
    return tuple(readings), tuple(notes)


def replay(guard: Guard, readings: tuple[Reading, ...]) -> Replay:
    """Feed the readings to a fresh guard, to the end: a guard that has fired stays fired."""
    return Replay(
        readings,
        tuple(
            guard.update(one.step, in_loop_reward=one.proxy, heldout_score=one.truth, kl_to_init=one.kl)
            for one in readings
        ),
    )


class _Newest:
    """The newest value of a column up to a step that only rises."""

    def __init__(self, column: Column, sign: int) -> None:
        self._column, self._sign, self._next = column, sign, 0
        self.value: float | None = None

    def advance(self, step: int) -> bool:
        """Go on to ``step``; whether a value was met on the way."""
        before = self._next
        while self._next < len(self._column) and self._column.steps[self._next] <= step:
            self._next += 1
        if self._next > before:
            self.value = self._sign * self._column.values[self._next - 1]
        return self._next > before


def _check(log: RunLog, one: Chosen, role: str, notes: list[str]) -> None:
    column = log.columns[one.name]
    if column.first_text is not None:
        line, text = column.first_text
        raise InputError(
            "CR0636",
            f"the column {one.name!r} holds something that is no number: {text!r}.",
            where=log.where(line),
            fix=f"take it out, or name another column with --{role} COL.",
        )
    _check_finite(log, column, one.name, notes)
    _check_order(log, column, one.name)
    steps = [later - earlier for earlier, later in pairwise(column.steps)]
    usual = Counter(steps).most_common(1)[0][0] if steps else 0
    gaps = [index for index, distance in enumerate(steps) if distance > usual]
    if gaps:
        first, last = column.steps[gaps[0]], column.steps[gaps[0] + 1]
        notes.append(
            f"{len(gaps)} gap(s) in the steps of {one.name}, which usually are {usual} apart: "
            f"the first from {first} to {last}."
        )


def _check_finite(log: RunLog, column: Column, name: str, notes: list[str]) -> None:
    num_bad, num_all = column.num_not_finite, column.num_not_finite + len(column)
    if num_bad > max(_ALWAYS_TOLERATED, MOST_NOT_FINITE * num_all) or not len(column):
        raise InputError(
            "CR0637",
            f"{num_bad} of {num_all} values of the column {name!r} are NaN or infinite.",
            where=str(log.path),
            fix="find out why the run logged them: what is left is too little to judge it by.",
        )
    if num_bad:
        notes.append(f"{num_bad} value(s) of {name} were NaN or infinite and were left out.")


def _check_order(log: RunLog, column: Column, name: str) -> None:
    for index, (earlier, later) in enumerate(pairwise(column.steps), start=1):
        if later <= earlier:
            what = "has a second value" if later == earlier else f"stands after step {earlier}"
            raise InputError(
                "CR0635",
                f"the steps of the column {name!r} are not in order: step {later} {what}.",
                where=log.where(column.lines[index]),
                fix="sort the log by step, or, where a run was resumed, add --resumed: the newer values count.",
            )
