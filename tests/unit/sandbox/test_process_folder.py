"""What a killed process leaves is removed by the next; what a living one holds is not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from composer_replication.sandbox import process_folder as module

HOLD = """
import sys, time
from composer_replication.sandbox.process_folder import process_folder
(process_folder() / "left").write_text("x")
print(process_folder(), flush=True)
time.sleep(float(sys.argv[1]))
"""
OLD = 1000.0

Start = Callable[[float], tuple["subprocess.Popen[str]", Path]]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    monkeypatch.setattr(module.tempfile, "tempdir", str(tmp_path))
    running: list[subprocess.Popen[str]] = []

    def begin(seconds: float) -> tuple[subprocess.Popen[str], Path]:
        process = subprocess.Popen(
            [sys.executable, "-c", HOLD, str(seconds)],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "TMPDIR": str(tmp_path)},
        )
        running.append(process)
        assert process.stdout is not None
        folder = Path(process.stdout.readline().strip())
        old = time.time() - OLD
        with suppress(FileNotFoundError):  # one that holds it for no time has ended by now
            os.utime(folder, (old, old))
        return process, folder

    yield begin
    for process in running:
        process.kill()
        process.communicate()


def test_a_killed_process_is_swept_and_a_living_one_is_not(start: Start) -> None:
    killed, left = start(600)
    _, held = start(600)
    assert module.sweep() == []
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    assert (left / "left").is_file()
    assert module.sweep() == [left]
    assert (held / "left").is_file()


def test_a_process_that_ends_leaves_nothing(start: Start) -> None:
    process, folder = start(0)
    process.wait()
    assert process.returncode == 0
    assert not folder.exists()


def test_a_folder_that_is_just_made_stays(start: Start, tmp_path: Path) -> None:
    young = tmp_path / f"{module.NEW_PREFIX}young"
    young.mkdir()
    assert module.sweep() == []
    os.utime(young, (0, 0))
    assert module.sweep() == [young]


def test_what_is_not_ours_stays(start: Start, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    link = tmp_path / f"{module.BAIT_PREFIX}link"
    link.symlink_to(elsewhere)
    os.utime(link, (0, 0), follow_symlinks=False)
    foreign = tmp_path / "composer-rl-crash-1.txt"
    foreign.write_text("x")
    os.utime(foreign, (0, 0))
    assert module.sweep() == []
    assert elsewhere.is_dir()
    assert foreign.is_file()
