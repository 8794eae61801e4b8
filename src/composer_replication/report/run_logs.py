"""Any training log as columns: ours, JSON lines, CSV, ``trainer_state.json``, TensorBoard.

    read_log(path) -> RunLog          which form it is, decided by what is inside
    log_rows.rows_of(path)            the raw rows of a text log
    log_columns.RunLog                numbers by name, with their steps
    event_files                       TensorBoard, with the extra ``tensorboard``

A folder stands for the one log in it: ``metrics.jsonl`` of a run of ours, ``trainer_state.json``
of the newest ``checkpoint-N``, or the event files of one TensorBoard run.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from composer_replication.errors import InputError
from composer_replication.report.log_columns import ColumnBuilder, RunLog
from composer_replication.report.log_rows import rows_of

if TYPE_CHECKING:
    from composer_replication.report.log_rows import Report

_CHECKPOINT = re.compile(r"checkpoint-(\d+)")
_EVENT_FILES = "*.tfevents.*"
_EVENT_HEAD_BYTES = 13
_LARGEST_FIRST_EVENT = 2**20
_FIELD_WALL_TIME = 0x09
_MAX_NAMED = 5


def read_log(path: Path, *, step: str = "", resumed: bool = False, report: Report | None = None) -> RunLog:
    """Read a log, or the one log of a folder.

    Args:
        path: a file or a folder.
        step: the column of the step; empty: found by its usual names.
        resumed: steps that fall back mean that the run was resumed there; the newer values count.
        report: takes (done, total, what) while a large file is read.

    Raises:
        InputError: nothing there or no log (CR0630), empty (CR0631), a folder with no log or with
            several (CR0632), no such step column (CR0633), a broken row (CR0634), or a step that
            is no whole number (CR0635).
        ImportError: event files, without the package that reads them.
    """
    source = _log_in(path) if path.is_dir() else path
    try:
        if source.is_dir() or _is_event_file(source):
            return _read_events(source, resumed=resumed)
        notes: list[str] = []
        builder = ColumnBuilder(step, resumed=resumed)
        kind, place, rows = rows_of(source, notes, report)
        for number, row in rows:
            where = f"{source}:{number}" if place == "line" else f"{source}, {place} {number}"
            builder.add_row(row, number, where)
    except OSError as error:
        raise InputError(
            "CR0630",
            f"the log cannot be read: {error.strerror or error}.",
            where=str(source),
            fix="give the path of a log file, or of the folder that holds it.",
        ) from error
    return builder.finish(source, kind, place, notes)


def _read_events(source: Path, *, resumed: bool) -> RunLog:
    from composer_replication.report.event_files import read_event_files

    files = sorted(source.glob(_EVENT_FILES)) if source.is_dir() else [source]
    return read_event_files(source, files, resumed=resumed)


def _log_in(folder: Path) -> Path:
    """The one log of a folder."""
    metrics, state = folder / "metrics.jsonl", folder / "trainer_state.json"
    for file in (metrics, state):
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
    if not runs:
        raise InputError(
            "CR0632",
            "the folder holds no metrics.jsonl, no trainer_state.json and no TensorBoard event file.",
            where=str(folder),
            fix="give the path of the log file itself.",
        )
    named = ", ".join(str(run.relative_to(folder)) for run in runs[:_MAX_NAMED])
    more = f" and {len(runs) - _MAX_NAMED} more" if len(runs) > _MAX_NAMED else ""
    raise InputError(
        "CR0632",
        f"the folder holds the event files of {len(runs)} runs: {named}{more}.",
        where=str(folder),
        fix=f"give one of them, for example {runs[-1]}.",
    )


def _is_event_file(path: Path) -> bool:
    """By its name, or by its head: a record's length, its checksum, then an event's wall time."""
    if ".tfevents." in path.name:
        return True
    with path.open("rb") as handle:
        head = handle.read(_EVENT_HEAD_BYTES)
    return (
        len(head) == _EVENT_HEAD_BYTES
        and 0 < int.from_bytes(head[:8], "little") < _LARGEST_FIRST_EVENT
        and head[-1] == _FIELD_WALL_TIME
    )
