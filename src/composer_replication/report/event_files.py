"""TensorBoard event files, read with TensorBoard's own reader (the extra ``tensorboard``).

Scalars of both writers are read: plain values (torch, tensorboardX), and tensors that are marked
as scalars (TensorFlow 2). TensorFlow itself is not needed.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from composer_replication.errors import InputError
from composer_replication.report.log_columns import ColumnBuilder, RunLog

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_FRAME_BYTES = 16
"""Around each record: its length (8) and two checksums (4 each)."""

_SCALARS = "scalars"


def read_event_files(source: Path, files: list[Path], *, resumed: bool = False) -> RunLog:
    """The scalars of one TensorBoard run.

    Values stand in the order of the files' names, which begin with their time, and within a file in
    the order of writing. A writer that was opened with ``purge_step=s`` says that the run was resumed
    there: what was written at s and later before does not count.

    Args:
        source: the file or folder, for messages.
        files: the event files.
        resumed: as ``ColumnBuilder``.

    Raises:
        ImportError: the package ``tensorboard`` is missing.
        InputError: damaged (CR0630), or no scalar in it (CR0631).
    """
    logging.getLogger("tensorboard").setLevel(logging.ERROR)  # it announces that it does without TensorFlow
    notes: list[str] = []
    builder = ColumnBuilder(resumed=resumed)
    scalar_tags: set[str] = set()
    number = 0
    for file in files:
        for event in _events(file, notes):
            number += 1
            if event.session_log.status == event.session_log.START:
                builder.cut(event.step)
            for value in event.summary.value:
                scalar = _scalar(value, scalar_tags)
                if scalar is not None:
                    builder.add(event.step, {value.tag: scalar}, number)
    if not builder.columns:
        raise InputError(
            "CR0631",
            f"the event file(s) hold no scalar ({number} event(s) in {len(files)} file(s)).",
            where=str(source),
            fix="give the folder in which the run logged its scalars.",
        )
    builder.step_name = "step"
    return builder.finish(source, "tensorboard", "record", notes)


def _events(file: Path, notes: list[str]) -> Iterator[Any]:
    """The whole events of a file; what follows them is noted."""
    from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
    from tensorboard.compat.proto import event_pb2

    records = RawEventFileLoader(str(file)).Load()
    from google.protobuf.message import (
        DecodeError,
    )  # after tensorboard, which a message then names as missing

    num_bytes = 0
    for record in records:
        try:
            event = event_pb2.Event.FromString(record)
        except DecodeError as error:
            raise _damaged(file, f"its record at byte {num_bytes} is no event") from error
        num_bytes += len(record) + _FRAME_BYTES
        yield event
    num_left = file.stat().st_size - num_bytes
    if num_left > 0 and num_bytes == 0:
        raise _damaged(file, "it holds no whole event")
    if num_left > 0:
        notes.append(f"The last {num_left} bytes of {file.name} are no whole event and were left out.")


def _scalar(value: Any, scalar_tags: set[str]) -> float | None:
    """The number of a summary value; None for pictures, histograms and text."""
    if value.HasField("simple_value"):
        return float(value.simple_value)
    if value.metadata.plugin_data.plugin_name == _SCALARS:  # written with the first value of a tag only
        scalar_tags.add(value.tag)
    if value.HasField("tensor") and value.tag in scalar_tags:
        from tensorboard.util.tensor_util import make_ndarray

        return float(make_ndarray(value.tensor).item())
    return None


def _damaged(file: Path, problem: str) -> InputError:
    return InputError(
        "CR0630",
        f"the event file is damaged: {problem}.",
        where=str(file),
        fix="give another file of the run, or the folder of a copy.",
    )
