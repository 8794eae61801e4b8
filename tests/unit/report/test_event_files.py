"""TensorBoard event files, written by the real writer of torch."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from composer_replication.errors import InputError
from composer_replication.report.run_logs import RunLog, read_log

pytest.importorskip("tensorboard", reason="needs the extra: pip install 'composer-replication[tensorboard]'")

from torch.utils.tensorboard import SummaryWriter


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[Any]:
    with SummaryWriter(tmp_path / "run") as open_writer:
        for step in (1, 2, 3):
            open_writer.add_scalar("train/reward", step / 8, step)
        open_writer.add_scalar("eval/reward", 0.25, 2)
        yield open_writer


def column(log: RunLog, name: str) -> tuple[list[int], list[float]]:
    numbers = log.columns[name].numbers
    return [step for step, *_ in numbers], [value for _, value, _ in numbers]


def only_file(folder: Path) -> Path:
    (found,) = folder.rglob("*.tfevents.*")
    return found


def test_scalars_of_a_file_and_of_its_folders(tmp_path: Path, writer: Any) -> None:
    writer.close()
    for path in (only_file(tmp_path), tmp_path / "run", tmp_path):
        log = read_log(path)
        assert (log.step_column, log.notes) == ("step", ())
        assert column(log, "train/reward") == ([1, 2, 3], [0.125, 0.25, 0.375])
        assert column(log, "eval/reward") == ([2], [0.25])


def test_what_is_no_scalar_is_left_out(tmp_path: Path, writer: Any) -> None:
    import torch

    writer.add_histogram("weights", torch.arange(4.0), 1)
    writer.add_text("note", "hello", 1)
    writer.close()
    assert set(read_log(tmp_path).columns) == {"train/reward", "eval/reward"}


def test_a_resumed_run_that_says_so(tmp_path: Path, writer: Any) -> None:
    """purge_step: the second writer tells that all from step 3 on is written again."""
    writer.close()
    first = only_file(tmp_path)
    first.rename(first.with_name("events.out.tfevents.0000000001.a"))
    with SummaryWriter(tmp_path / "run", purge_step=3) as second:
        second.add_scalar("train/reward", 1.0, 3)
    log = read_log(tmp_path)
    assert column(log, "train/reward") == ([1, 2, 3], [0.125, 0.25, 1.0])


def test_a_resumed_run_that_does_not_say_so(tmp_path: Path, writer: Any) -> None:
    writer.close()
    first = only_file(tmp_path)
    first.rename(first.with_name("events.out.tfevents.0000000001.a"))
    with SummaryWriter(tmp_path / "run") as second:
        second.add_scalar("train/reward", 1.0, 2)
    assert column(read_log(tmp_path), "train/reward")[0] == [1, 2, 3, 2]  # refused later, where it is chosen
    assert column(read_log(tmp_path, resumed=True), "train/reward") == ([1, 2], [0.125, 1.0])


@pytest.mark.parametrize("num_cut", [1, 5, 20])
def test_a_torn_last_event_is_noted(tmp_path: Path, writer: Any, num_cut: int) -> None:
    writer.add_scalar("train/reward", 0.5, 4)
    writer.close()
    file = only_file(tmp_path)
    file.write_bytes(file.read_bytes()[:-num_cut])
    log = read_log(tmp_path)
    assert column(log, "train/reward")[0] == [1, 2, 3]
    assert len(log.notes) == 1
    assert f"of {file.name} are no whole event and were left out." in log.notes[0]


def test_damage_in_the_middle_is_noted(tmp_path: Path, writer: Any) -> None:
    """Each record carries a checksum; what follows a broken one cannot be trusted."""
    writer.close()
    file = only_file(tmp_path)
    content = bytearray(file.read_bytes())
    position = 0
    for _ in range(2):  # the version, then the first scalar
        position += struct.unpack_from("<Q", content, position)[0] + 16
    content[position + 20] ^= 0xFF
    file.write_bytes(content)
    log = read_log(file)
    assert column(log, "train/reward") == ([1], [0.125])
    assert log.notes == (
        f"The last {len(content) - position} bytes of {file.name} are no whole event and were left out.",
    )


def refused(path: Path) -> InputError:
    with pytest.raises(InputError) as caught:
        read_log(path)
    return caught.value


def test_a_record_that_is_no_event(tmp_path: Path) -> None:
    from tensorboard.summary.writer.record_writer import RecordWriter

    with (tmp_path / "events.out.tfevents.1.x").open("wb") as handle:
        RecordWriter(handle).write(b"\xff\xff\xff")
    assert (refused(tmp_path).code, refused(tmp_path).message) == (
        "CR0630",
        "the log cannot be used: record 1 is no event.",
    )


@pytest.mark.parametrize("has_text", [False, True])
def test_no_scalar(tmp_path: Path, has_text: bool) -> None:
    with SummaryWriter(tmp_path) as open_writer:
        if has_text:
            open_writer.add_text("note", "hello", 1)
        open_writer.flush()
    assert refused(tmp_path).code == "CR0630"
