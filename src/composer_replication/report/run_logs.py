"""Any training log as columns: ours, JSON lines, CSV, ``trainer_state.json``, TensorBoard.

A folder stands for the one log in it: ``metrics.jsonl`` of a run of ours, ``trainer_state.json``
of the newest ``checkpoint-N``, or the event files of one TensorBoard run.
"""

from __future__ import annotations

import csv
import json
import logging
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from composer_replication.errors import InputError

_STEP_NAMES = (
    *("step", "global_step", "train/global_step", "trainer/global_step", "training/global_step"),
    *("global_steps", "_step", "iteration"),
)
"""Columns that are taken for the step, in this order; the first row that has one decides for the log."""

_SEPARATORS = (",", "\t", ";")
_DECIMAL_COMMA = re.compile(r"[+-]?(0,\d+|\d+,(\d{1,2}|\d{4,}))")
_MAX_DEPTH = 4
_MAX_NAMED = 5
_CHECKPOINT = re.compile(r"checkpoint-(\d+)")
_EVENT_FILES = "*.tfevents.*"
_FRAME_BYTES = 16
"""Around each record of an event file: its length (8) and two checksums (4 each)."""

Row = tuple[int, dict[str, Any]]


@dataclass(slots=True)
class Column:
    """The numbers of one name, in the order of the log.

    ``lines`` are places in the log (a line, an entry, a record), for messages. ``num_bad`` counts what is no
    finite number.
    """

    steps: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    lines: list[int] = field(default_factory=list)
    num_bad: int = 0

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
        step_column: where the steps come from.
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
        return _where(self.path, self.place, line)


def read_log(path: Path, *, step: str = "", resumed: bool = False) -> RunLog:
    """Read a log, or the one log of a folder.

    Args:
        path: a file or a folder.
        step: the column of the step; empty: found by its usual names.
        resumed: steps that fall back mean that the run was resumed there; the newer values count.

    Raises:
        InputError: no log, an empty one, a broken row, or a folder with no log or with several (CR0630); no such step
            column, or a step that is no whole number (CR0633).
        ImportError: event files, without the package that reads them.
    """
    source = _log_in(path) if path.is_dir() else path
    try:
        if source.is_dir() or ".tfevents." in source.name:
            return _read_events(source, ColumnBuilder("step", resumed=resumed))
        notes: list[str] = []
        builder = ColumnBuilder(step, resumed=resumed)
        kind, place, rows = _rows_of(source, notes)
        for number, row in rows:
            builder.add_row(row, number, _where(source, place, number))
    except OSError as error:
        raise _unusable(source, str(error.strerror or error)) from error
    return builder.finish(source, kind, place, notes)


def _where(path: Path, place: str, line: int) -> str:
    return f"{path}:{line}" if place == "line" else f"{path}, {place} {line}"


def _log_in(folder: Path) -> Path:
    """The one log of a folder."""
    for file in (folder / "metrics.jsonl", folder / "trainer_state.json"):
        if file.is_file():
            return file
    checkpoints = {
        int(match[1]): path / "trainer_state.json"
        for path in folder.glob("checkpoint-*")
        if (match := _CHECKPOINT.fullmatch(path.name)) and (path / "trainer_state.json").is_file()
    }
    if checkpoints:
        return checkpoints[max(checkpoints)]
    runs = sorted({path.parent for path in folder.rglob(_EVENT_FILES) if path.is_file()})
    if len(runs) == 1:
        return runs[0]
    named = ", ".join(str(run.relative_to(folder)) for run in runs[:_MAX_NAMED])
    holds = f"the event files of {len(runs)} runs, {named}" if runs else "no log that can be read"
    raise _unusable(folder, f"the folder holds {holds}")


def _read_events(source: Path, builder: ColumnBuilder) -> RunLog:
    """The scalars of one TensorBoard run, old and new form, by TensorBoard's own reader.

    A writer that was opened with ``purge_step=s`` says that the run was resumed there: what was written
    at s and later before does not count (``EventAccumulator`` passes over the first one that says so).
    A record that is not whole ends its file, with a note.
    """
    logging.getLogger("tensorboard").setLevel(logging.ERROR)  # it announces that it does without TensorFlow
    from google.protobuf.message import DecodeError  # after tensorboard, which is then what a message misses
    from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.util.tensor_util import make_ndarray

    notes: list[str] = []
    scalar_tags: set[str] = set()
    number = 0
    for file in sorted(source.glob(_EVENT_FILES)) if source.is_dir() else [source]:
        num_bytes = 0
        for record in RawEventFileLoader(str(file)).Load():
            number += 1
            num_bytes += len(record) + _FRAME_BYTES
            try:
                event = Event.FromString(record)
            except DecodeError as error:
                raise _unusable(file, f"record {number} is no event") from error
            if event.session_log.status == event.session_log.START:
                builder.cut(event.step)
            for value in event.summary.value:
                if value.metadata.plugin_data.plugin_name == "scalars":  # of a tag's first value only
                    scalar_tags.add(value.tag)
                if value.HasField("simple_value"):
                    builder.add(event.step, {value.tag: float(value.simple_value)}, number)
                elif value.HasField("tensor") and value.tag in scalar_tags:
                    builder.add(event.step, {value.tag: float(make_ndarray(value.tensor).item())}, number)
        if num_left := file.stat().st_size - num_bytes:
            notes.append(f"The last {num_left} bytes of {file.name} are no whole event and were left out.")
    if not builder.columns:
        raise _unusable(source, " ".join([f"the event file(s) hold no scalar ({number} event(s)).", *notes]))
    return builder.finish(source, "tensorboard", "record", notes)


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
        self._resumed = resumed
        self._num_replaced = 0
        self._num_without_step = 0
        self._newest_step = -math.inf

    def add_row(self, row: Mapping[str, object], line: int, where: str) -> None:
        """Take over the numbers of one row.

        Raises:
            InputError: its step is no whole number (CR0633).
        """
        cells = dict(_flat(row))
        if not self.step_name:
            lowered = {name.lower(): name for name in reversed(cells)}
            self.step_name = next((lowered[name] for name in _STEP_NAMES if name in lowered), "")
        raw = cells.pop(self.step_name, None) if self.step_name else None
        if raw is None or raw == "":
            self._num_without_step += 1
            return
        number = number_of(raw)
        if number is None or not number.is_integer() or abs(number) >= 2**62:
            raise InputError(
                "CR0633",
                f"the step {str(raw)[:40]!r} in the column {self.step_name!r} is no whole number.",
                where=where,
                fix="name the column that counts the steps with --step COL.",
            )
        self.add(int(number), cells, line)

    def add(self, step: int, cells: Mapping[str, object], line: int) -> None:
        """Take over values of one step."""
        if self._resumed:
            if step < self._newest_step:
                self.cut(step)
            self._newest_step = step
        for name, value in cells.items():
            if value is None or value == "":
                continue
            column = self.columns.setdefault(name, Column())
            number = number_of(value)
            if number is None or not math.isfinite(number):
                column.num_bad += 1
                continue
            if self._resumed:
                self._num_replaced += column.cut(step)
            if (column.steps[-1:], column.values[-1:]) != ([step], [number]):  # of a last evaluation, twice
                column.steps.append(step)
                column.values.append(number)
                column.lines.append(line)

    def cut(self, step: int) -> None:
        """A run was resumed at ``step``: what the earlier one wrote from there on does not count."""
        self._num_replaced += sum(column.cut(step) for column in self.columns.values())

    def finish(self, path: Path, kind: str, place: str, notes: list[str]) -> RunLog:
        """The log; rows without a step are left out.

        Raises:
            InputError: no row with a number has a step (CR0633).
        """
        if not any(column.steps for column in self.columns.values()):
            what = (
                f"the step column {self.step_name!r}" if self.step_name else "a step column of a usual name"
            )
            fix = "name the column that counts the steps with --step COL."
            raise InputError("CR0633", f"no row with a number has {what}.", where=str(path), fix=fix)
        counts = {
            "row(s) without a step were left out": self._num_without_step,
            "value(s) of a broken-off run were replaced or dropped": self._num_replaced,
        }
        notes = [*notes, *(f"{number} {what}." for what, number in counts.items() if number)]
        return RunLog(path, kind, place, self.step_name, self.columns, tuple(notes))


def _flat(row: Mapping[str, object], prefix: str = "", depth: int = 1) -> Iterator[tuple[str, object]]:
    for key, value in row.items():
        if isinstance(value, dict):
            if depth < _MAX_DEPTH:
                yield from _flat(value, f"{prefix}{key}/", depth + 1)
        else:
            yield f"{prefix}{key}", value


def _rows_of(path: Path, notes: list[str]) -> tuple[str, str, Iterator[Row]]:
    """Kind, what a place is called, and the rows with their places; ``notes`` takes what was tolerated."""
    number, first = next(((number, line.strip()) for number, line in _lines(path) if line.strip()), (0, ""))
    if not first:
        raise _unusable(path, "it is empty")
    if "\ufffd" in first or "\0" in first:
        raise _unusable(path, "it is no UTF-8 text")
    parsed = _parsed(first)
    if isinstance(parsed, dict) and not isinstance(parsed.get("log_history"), list):
        return "jsonl", "line", _json_lines(path, notes)
    if first.startswith("{'"):
        raise _unusable(path, "it holds dictionaries as Python prints them, which are no JSON")
    if first.startswith(("{", "[")):
        return _document(path)
    return "csv", "line", _table(path, first, number, notes)


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Bytes that are no text become marks, which no number can hold."""
    with path.open(encoding=_encoding(path), errors="replace", newline="\n") as handle:
        yield from enumerate(handle, start=1)


def _encoding(path: Path) -> str:
    with path.open("rb") as handle:
        return "utf-16" if handle.read(2) in {b"\xff\xfe", b"\xfe\xff"} else "utf-8-sig"


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _json_lines(path: Path, notes: list[str]) -> Iterator[Row]:
    """Each line's object; a last line that is no JSON was torn by a crash and is left out."""
    torn = 0
    for number, line in _lines(path):
        if not line.strip():
            continue
        row = _parsed(line)
        if torn or (row is not None and not isinstance(row, dict)):
            raise _unusable(path, "it is not a JSON object", line=torn or number)
        if row is None:
            torn = number
        else:
            yield number, row
    if torn:
        notes.append(f"The last line ({torn}) is incomplete and was left out.")


def _document(path: Path) -> tuple[str, str, Iterator[Row]]:
    """A list of rows, or an object that holds one as ``log_history``."""
    try:
        value = json.loads(path.read_text(encoding=_encoding(path), errors="replace"))
    except (ValueError, RecursionError) as error:
        raise _unusable(path, f"it is not JSON ({error})") from error
    kind = "json"
    if isinstance(value, dict):
        kind, value = "trainer_state", value.get("log_history")
    if not isinstance(value, list) or not all(isinstance(row, dict) for row in value):
        raise _unusable(path, "it is no list of JSON objects, and has none named log_history")
    if not value:
        raise _unusable(path, "it is empty")
    return kind, "entry", iter(enumerate(value, start=1))


def _table(path: Path, head: str, first: int, notes: list[str]) -> Iterator[Row]:
    """The rows of a table whose first line names the columns.

    A last line without its end may lack the tail of its last number: it is left out.
    """
    separator = max(_SEPARATORS, key=head.count)
    if separator not in head:
        raise _unusable(path, "its first line is neither JSON nor a header with several columns")

    def whole_lines() -> Iterator[str]:
        for number, line in _lines(path):
            if not line.endswith("\n"):
                notes.append(f"The last line ({number}) is incomplete and was left out.")
            elif number >= first:
                yield line

    reader = csv.reader(whole_lines(), delimiter=separator, strict=True)
    try:
        names = [name.strip() for name in next(reader, [])]
        if len(set(names)) < len(names) or any(number_of(name) is not None for name in names):
            raise _unusable(path, "its first line is no header: it holds numbers, or a name twice")
        for cells in reader:
            number = reader.line_num + first - 1
            if any(map(str.strip, cells)):
                if len(cells) != len(names):
                    raise _unusable(path, f"it has {len(cells)} cells, the header {len(names)}", line=number)
                yield number, {name: cell.strip() for name, cell in zip(names, cells, strict=True) if name}
    except csv.Error as error:
        raise _unusable(path, str(error), line=reader.line_num + first - 1) from error


def number_of(value: object) -> float | None:
    """A number, perhaps infinite or NaN; None for anything else. In text ``31,5`` is 31.5 and ``31%`` is 0.31.

    ``1,234`` may be either of two numbers and is none.
    """
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        if not isinstance(value, str):
            return float(value)
        text = value.strip().removesuffix("%")
        if _DECIMAL_COMMA.fullmatch(text):
            text = text.replace(",", ".")
        return float(text) / (100 if value.strip().endswith("%") else 1)
    except ValueError:
        return None
    except OverflowError:
        return math.inf


def _unusable(path: Path, problem: str, line: int = 0) -> InputError:
    return InputError(
        "CR0630",
        f"{f'line {line}' if line else 'the log'} cannot be used: {problem.rstrip('.')}.",
        where=f"{path}:{line}" if line else str(path),
        fix="give JSON lines, CSV, a trainer_state.json or TensorBoard event files, or a folder with one of them.",
    )
