"""A log as columns of numbers, each with the steps at which it was written."""

from __future__ import annotations

import math
import re
from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from composer_replication.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

_STEP_NAMES = (
    "step",
    "global_step",
    "train/global_step",
    "trainer/global_step",
    "training/global_step",
    "global_steps",
    "_step",
    "iteration",
)
"""Columns that are taken for the step, in this order; the first row that has one decides for the log."""

_MAX_DEPTH = 4
_OTHER_SIGNS = str.maketrans({"\u2212": "-", "\u00a0": None, "\u202f": None})
_GROUPED = re.compile(r"[+-]?[1-9]\d{0,2}(,\d{3})+(\.\d*)?")
_WITH_COMMA = re.compile(r"[+-]?(\d+|[1-9]\d{0,2}(\.\d{3})+),\d+([eE][+-]?\d+)?\s*")
_NO_STEP = -(2**63)


@dataclass(slots=True)
class Column:
    """The numbers of one name, in the order of the log.

    ``lines`` are places in the log (a line, an entry, a record), for messages. ``first_text`` is
    the first place with something that is no number, and that something.
    """

    steps: array[int] = field(default_factory=lambda: array("q"))
    values: array[float] = field(default_factory=lambda: array("d"))
    lines: array[int] = field(default_factory=lambda: array("q"))
    num_not_finite: int = 0
    first_text: tuple[int, str] | None = None

    def __len__(self) -> int:
        return len(self.values)

    def append(self, step: int, value: float, line: int) -> None:
        self.steps.append(step)
        self.values.append(value)
        self.lines.append(line)

    def cut(self, step: int) -> int:
        """Drop the newest values as far as they stand at ``step`` or later; how many."""
        num_before = len(self.values)
        while self.steps and self.steps[-1] >= step:
            for part in (self.steps, self.values, self.lines):
                part.pop()
        return num_before - len(self.values)


@dataclass(frozen=True, slots=True)
class RunLog:
    """A log, read.

    Attributes:
        path: the file (or the folder of event files) that was read.
        kind: ``jsonl``, ``csv``, ``json``, ``trainer_state`` or ``tensorboard``.
        place: what the numbers in ``Column.lines`` count: ``line``, ``entry`` or ``record``.
        step_column: where the steps come from; empty: there were none, and rows are counted.
        columns: by name; nested names are joined by a slash.
        notes: what was tolerated, one sentence each.
    """

    path: Path
    kind: str
    place: str
    step_column: str
    columns: Mapping[str, Column]
    notes: tuple[str, ...]

    def where(self, line: int) -> str:
        """A place in the log, for a message."""
        return f"{self.path}:{line}" if self.place == "line" else f"{self.path}, {self.place} {line}"


class ColumnBuilder:
    """Collects rows into columns.

    Args:
        step_name: the column of the step; empty: the first of the usual names that is met.
        resumed: where the steps fall back to s, a run was resumed: everything at s and later is
            dropped, and a value that repeats its step replaces the older one.
    """

    def __init__(self, step_name: str = "", *, resumed: bool = False) -> None:
        self.columns: dict[str, Column] = {}
        self.step_name = step_name
        self.num_replaced = 0
        self._resumed = resumed
        self._num_without_step = 0
        self._newest_step = _NO_STEP

    def add_row(self, row: Mapping[str, object], line: int, where: str) -> None:
        """Take over the numbers of one row.

        Raises:
            InputError: its step is no whole number (CR0635).
        """
        cells = dict(_flat(row))
        if not self.step_name:
            lowered = {name.lower(): name for name in reversed(cells)}
            self.step_name = next((lowered[name] for name in _STEP_NAMES if name in lowered), "")
        raw = cells.pop(self.step_name, None) if self.step_name else None
        if raw is None or raw == "":
            self._num_without_step += 1
            self.add(_NO_STEP, cells, line)
        else:
            self.add(_step(raw, self.step_name, where), cells, line)

    def add(self, step: int, cells: Mapping[str, object], line: int) -> None:
        """Take over values of one step."""
        if self._resumed and step != _NO_STEP:
            if step < self._newest_step:
                self.cut(step)
            self._newest_step = step
        for name, value in cells.items():
            if value is None or value == "":
                continue
            column = self.columns.setdefault(name, Column())
            number = number_of(value)
            if number is None:
                column.first_text = column.first_text or (line, str(value)[:40])
            elif not math.isfinite(number):
                column.num_not_finite += 1
            else:
                is_second = step != _NO_STEP and bool(column.steps) and column.steps[-1] == step
                if is_second and self._resumed:
                    self.num_replaced += column.cut(step)
                elif is_second and column.values[-1] == number:
                    continue  # an evaluation at the end of training is written twice
                column.append(step, number, line)

    def cut(self, step: int) -> None:
        """A run was resumed at ``step``: what the earlier one wrote from there on does not count."""
        self.num_replaced += sum(column.cut(step) for column in self.columns.values())

    def finish(self, path: Path, kind: str, place: str, notes: list[str]) -> RunLog:
        """The log; rows without a step are left out, or counted where no row has one.

        Raises:
            InputError: no row has the step column that was asked for (CR0633).
        """
        has_steps = any(step != _NO_STEP for column in self.columns.values() for step in column.steps)
        if self.step_name and not has_steps and self._num_without_step:
            raise InputError(
                "CR0633",
                f"no row with a number has the step column {self.step_name!r}.",
                where=str(path),
                fix="leave out --step, or name another column.",
            )
        if not has_steps:
            for column in self.columns.values():
                column.steps = array("q", column.lines)
            notes = [*notes, f"There is no step column; every {place} counts as a step."]
        elif self._num_without_step:
            for column in self.columns.values():
                _drop_without_step(column)
            notes = [*notes, f"{self._num_without_step} row(s) without a step were left out."]
        if self.num_replaced:
            notes = [*notes, f"{self.num_replaced} value(s) of a broken-off run were replaced or dropped."]
        step_column = self.step_name if has_steps else ""
        return RunLog(path, kind, place, step_column, self.columns, tuple(notes))


def _flat(row: Mapping[str, object], prefix: str = "", depth: int = 1) -> Iterator[tuple[str, object]]:
    for key, value in row.items():
        if isinstance(value, dict):
            if depth < _MAX_DEPTH:
                yield from _flat(value, f"{prefix}{key}/", depth + 1)
        else:
            yield f"{prefix}{key}", value


def number_of(value: object) -> float | None:
    """A number, perhaps infinite or NaN; None for anything else.

    In text a per cent sign divides by 100. Of ``.`` and ``,`` the last one is the decimal sign, but commas that only group
    thousands (``1,234``) are left out; a table that is not separated by commas writes no such groups (``log_rows``).
    """
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return _written(value) if isinstance(value, str) else float(value)
    except ValueError:
        return None
    except OverflowError:
        return math.inf


def _written(text: str) -> float:
    plain = text.strip().translate(_OTHER_SIGNS)
    share = plain.removesuffix("%")
    if "," in share:
        if _GROUPED.fullmatch(share):
            share = share.replace(",", "")
        elif _WITH_COMMA.fullmatch(share):
            share = share.replace(".", "").replace(",", ".")
    return float(share) / 100 if plain.endswith("%") else float(share)


def _step(raw: object, name: str, where: str) -> int:
    number = number_of(raw)
    if number is None or not number.is_integer() or abs(number) >= 2**62:
        raise InputError(
            "CR0635",
            f"the step {str(raw)[:40]!r} in the column {name!r} is no whole number.",
            where=where,
            fix="name the column that counts the steps with --step COL.",
        )
    return int(number)


def _drop_without_step(column: Column) -> None:
    kept = [index for index, step in enumerate(column.steps) if step != _NO_STEP]
    column.steps = array("q", (column.steps[index] for index in kept))
    column.values = array("d", (column.values[index] for index in kept))
    column.lines = array("q", (column.lines[index] for index in kept))
