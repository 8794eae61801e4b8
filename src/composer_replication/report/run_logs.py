"""Any training log as columns: ours, JSON lines, CSV, ``trainer_state.json``, TensorBoard.

A folder stands for the one log in it: ``metrics.jsonl`` of a run of ours, ``trainer_state.json``
of the newest ``checkpoint-N``, or the event files of one TensorBoard run.
"""

from __future__ import annotations

import csv
import io
import json
import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from composer_replication.errors import InputError
from composer_replication.report.run_data import number

_STEP_NAMES = (
    *("step", "global_step", "train/global_step", "trainer/global_step", "training/global_step"),
    *("global_steps", "_step", "iteration"),
)
"""Columns that are taken for the step, in this order; the first row that has one decides for the log."""

_DECIMAL_COMMA = re.compile(r"[+-]?(0,\d+|\d+,(\d{1,2}|\d{4,}))")
_MAX_DEPTH, _MAX_NAMED = 4, 5
_EVENT_FILES = "*.tfevents.*"
_FRAME_BYTES = 16
"""Around each record of an event file: its length (8) and two checksums (4 each)."""

Row = tuple[str, dict[str, Any]]
"""Where it stands, for a message, and its cells."""


@dataclass(slots=True)
class Column:
    """The numbers of one name, in the order of the log: each with its step, and where it stands, for messages.

    ``num_bad`` counts what is no finite number.
    """

    numbers: list[tuple[int, float, str]] = field(default_factory=list)
    num_bad: int = 0


@dataclass(frozen=True, slots=True)
class RunLog:
    """A log, read: ``path`` is the file (or the folder of event files), ``notes`` say what was tolerated.

    Nested names of columns are joined by a slash.
    """

    path: Path
    step_column: str
    columns: Mapping[str, Column]
    notes: tuple[str, ...]


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
    is_events = source.is_dir() or ".tfevents." in source.name
    notes: list[str] = []
    try:
        rows = _event_rows(source, notes) if is_events else _text_rows(source, notes)
        step_column, with_steps = _with_steps(rows, "step" if is_events else step, notes, resumed=resumed)
    except OSError as error:
        raise _unusable(source, str(error.strerror or error)) from error
    columns = _columns_of(with_steps, resumed=resumed)
    if not any(column.numbers for column in columns.values()):
        what = f"the step column {step_column!r}" if step_column else "a step column of a usual name"
        raise _bad_step(f"no row with a number has {what}.", str(source))
    return RunLog(source, step_column, columns, tuple(notes))


def _log_in(folder: Path) -> Path:
    """The one log of a folder."""
    for file in (folder / "metrics.jsonl", folder / "trainer_state.json"):
        if file.is_file():
            return file
    states = {
        path.parent.name[len("checkpoint-") :]: path
        for path in folder.glob("checkpoint-*/trainer_state.json")
    }
    if numbers := list(filter(str.isdecimal, states)):
        return states[max(numbers, key=int)]
    runs = sorted({path.parent for path in folder.rglob(_EVENT_FILES) if path.is_file()})
    if len(runs) == 1:
        return runs[0]
    named = ", ".join(str(run.relative_to(folder)) for run in runs[:_MAX_NAMED])
    holds = f"the event files of {len(runs)} runs, {named}" if runs else "no log that can be read"
    raise _unusable(folder, f"the folder holds {holds}")


# ------------------------------------------------------------------------------ from rows to columns


def _with_steps(
    rows: Iterable[Row], step_column: str, notes: list[str], *, resumed: bool
) -> tuple[str, list[tuple[int, str, dict[str, Any]]]]:
    """The step column, and of each row that has a step: the step, the place and the other cells.

    Where the steps of a resumed run fall back to s, everything at s and later is dropped.
    """
    kept: list[tuple[int, str, dict[str, Any]]] = []
    num_without, num_dropped = 0, 0
    for place, row in rows:
        cells = dict(_flat(row))
        if not step_column:
            lowered = {name.lower(): name for name in reversed(cells)}
            step_column = next((lowered[name] for name in _STEP_NAMES if name in lowered), "")
        raw = cells.pop(step_column, None)
        if raw is None or raw == "":
            num_without += 1
            continue
        found = _number_of(raw)
        if found is None or not found.is_integer() or abs(found) >= 2**62:
            problem = f"the step {str(raw)[:40]!r} in the column {step_column!r} is no whole number."
            raise _bad_step(problem, place)
        step = int(found)
        if resumed and kept and step < kept[-1][0]:
            while kept and kept[-1][0] >= step:
                kept.pop()
                num_dropped += 1
        kept.append((step, place, cells))
    if num_without:
        notes.append(f"{num_without} row(s) without a step were left out.")
    if num_dropped:
        notes.append(f"{num_dropped} row(s) of a broken-off run were left out.")
    return step_column, kept


def _columns_of(rows: Iterable[tuple[int, str, dict[str, Any]]], *, resumed: bool) -> dict[str, Column]:
    columns: dict[str, Column] = {}
    for step, place, cells in rows:
        for name, value in cells.items():
            if value is None or value == "":
                continue
            column = columns.setdefault(name, Column())
            found = _number_of(value)
            newest = column.numbers[-1][:2] if column.numbers else (None, None)
            if found is None:
                column.num_bad += 1
            elif newest == (step, found):  # a last evaluation is often logged twice
                continue
            elif resumed and newest[0] == step:
                column.numbers[-1] = (step, found, place)
            else:
                column.numbers.append((step, found, place))
    return columns


def _flat(row: Mapping[str, object], prefix: str = "", depth: int = 1) -> Iterator[tuple[str, object]]:
    for key, value in row.items():
        if isinstance(value, dict):
            if depth < _MAX_DEPTH:
                yield from _flat(value, f"{prefix}{key}/", depth + 1)
        else:
            yield f"{prefix}{key}", value


def _number_of(value: object) -> float | None:
    """A finite number; None for anything else. In text ``31,5`` is 31.5 and ``31%`` is 0.31.

    ``1,234`` may be either of two numbers and is none.
    """
    if not isinstance(value, str):
        return number(value)
    text = value.strip().removesuffix("%")
    if _DECIMAL_COMMA.fullmatch(text):
        text = text.replace(",", ".")
    try:
        return number(float(text) / (100 if value.strip().endswith("%") else 1))
    except ValueError:
        return None


# ------------------------------------------------------------------------------------ the forms


def _text_rows(path: Path, notes: list[str]) -> Iterable[Row]:
    """The rows of a text file of any form; ``notes`` takes what was tolerated."""
    data = path.read_bytes()
    encoding = "utf-16" if data[:2] in {b"\xff\xfe", b"\xfe\xff"} else "utf-8-sig"
    text = data.decode(encoding, errors="replace")  # no number can hold the mark of a replacement
    first = text.lstrip().partition("\n")[0].strip()
    if not first:
        raise _unusable(path, "it is empty")
    if "\ufffd" in first or "\0" in first:
        raise _unusable(path, "it is no UTF-8 text")
    parsed = _parsed(first)
    if isinstance(parsed, dict) and not isinstance(parsed.get("log_history"), list):
        return _json_lines(path, text, notes)
    if first.startswith("{'"):
        raise _unusable(path, "it holds dictionaries as Python prints them, which are no JSON")
    if first.startswith(("{", "[")):
        return _document(path, text)
    return _table(path, text, max(",\t;", key=first.count), notes)


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _json_lines(path: Path, text: str, notes: list[str]) -> Iterator[Row]:
    """Each line's object; a last line that is no JSON was torn by a crash and is left out."""
    torn = 0
    for line, content in enumerate(text.split("\n"), start=1):
        if not content.strip():
            continue
        row = _parsed(content)
        if torn or (row is not None and not isinstance(row, dict)):
            raise _unusable(path, "it is not a JSON object", line=torn or line)
        if row is None:
            torn = line
        else:
            yield f"{path}:{line}", row
    if torn:
        notes.append(f"The last line ({torn}) is incomplete and was left out.")


def _document(path: Path, text: str) -> Iterable[Row]:
    """A list of rows, or an object that holds one as ``log_history``."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _unusable(path, f"it is not JSON ({error})") from error
    value = value.get("log_history") if isinstance(value, dict) else value
    if not isinstance(value, list) or not all(isinstance(row, dict) for row in value):
        raise _unusable(path, "it is no list of JSON objects, and has none named log_history")
    if not value:
        raise _unusable(path, "it is empty")
    return ((f"{path}, entry {entry}", row) for entry, row in enumerate(value, start=1))


def _table(path: Path, text: str, separator: str, notes: list[str]) -> Iterator[Row]:
    """The rows of a table whose first line names the columns; blank ones are passed over.

    A last line without its end may lack the tail of its last number: it is left out.
    """
    whole, _, torn = text.rpartition("\n")
    if torn:
        notes.append(f"The last line ({text.count(chr(10)) + 1}) is incomplete and was left out.")
    lines = io.StringIO(whole, newline="")
    reader = csv.reader(lines, delimiter=separator, skipinitialspace=True, strict=True)
    rows = (row for row in reader if any(cell.strip() for cell in row))
    try:
        names = [name.strip() for name in next(rows, [])]
        if len(names) < 2:
            raise _unusable(path, "its first line is neither JSON nor a header with several columns")
        if len(set(names)) < len(names) or any(_number_of(name) is not None for name in names):
            raise _unusable(path, "its first line is no header: it holds numbers, or a name twice")
        for row in rows:
            if len(row) != len(names):
                problem = "its cells are not as many as those of the header"
                raise _unusable(path, problem, line=reader.line_num)
            yield (
                f"{path}:{reader.line_num}",
                {name: cell for name, cell in zip(names, row, strict=True) if name},
            )
    except csv.Error as error:
        raise _unusable(path, str(error), line=reader.line_num) from error


def _event_rows(source: Path, notes: list[str]) -> list[Row]:
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

    rows: list[Row] = []
    scalar_tags: set[str] = set()
    num_records = 0
    for file in sorted(source.glob(_EVENT_FILES)) if source.is_dir() else [source]:
        num_bytes = 0
        for record in RawEventFileLoader(str(file)).Load():
            num_records += 1
            num_bytes += len(record) + _FRAME_BYTES
            try:
                event = Event.FromString(record)
            except DecodeError as error:
                raise _unusable(file, f"record {num_records} is no event") from error
            if event.session_log.status == event.session_log.START:
                kept = [row for row in rows if row[1]["step"] < event.step]
                if len(kept) < len(rows):
                    notes.append(f"{len(rows) - len(kept)} value(s) of a broken-off run were left out.")
                rows = kept
            for value in event.summary.value:
                if value.metadata.plugin_data.plugin_name == "scalars":  # of a tag's first value only
                    scalar_tags.add(value.tag)
                is_tensor = value.HasField("tensor") and value.tag in scalar_tags
                if is_tensor or value.HasField("simple_value"):
                    scalar = make_ndarray(value.tensor).item() if is_tensor else value.simple_value
                    place = f"{file}, record {num_records}"
                    rows.append((place, {value.tag: float(scalar), "step": event.step}))
        if num_left := file.stat().st_size - num_bytes:
            notes.append(f"The last {num_left} bytes of {file.name} are no whole event and were left out.")
    if not rows:
        raise _unusable(
            source, " ".join([f"the event file(s) hold no scalar ({num_records} event(s)).", *notes])
        )
    return rows


def _unusable(path: Path, problem: str, line: int = 0) -> InputError:
    return InputError(
        "CR0630",
        f"{f'line {line}' if line else 'the log'} cannot be used: {problem.rstrip('.')}.",
        where=f"{path}:{line}" if line else str(path),
        fix="give JSON lines, CSV, a trainer_state.json or TensorBoard event files, or a folder with one of them.",
    )


def _bad_step(problem: str, where: str) -> InputError:
    fix = "name the column that counts the steps with --step COL."
    return InputError("CR0633", problem, where=where, fix=fix)
