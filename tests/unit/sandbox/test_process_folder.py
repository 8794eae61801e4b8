"""What a killed process leaves is removed by the next; what a living one holds is not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
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
        return process, Path(process.stdout.readline().strip())

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
    os.utime(held, (0, 0))  # however old it looks
    assert module.sweep() == [left]
    assert (held / "left").is_file()


def test_a_folder_has_its_name_only_once_it_is_held(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever a sweep of another process sees in between, it takes nothing."""
    seen: list[list[str]] = []
    hold = module.hold

    def sweep_first(folder: Path) -> int:
        seen.append([path.name for path in module.sweep()])
        descriptor = hold(folder)
        seen.append([path.name for path in module.sweep()])
        return descriptor

    monkeypatch.setattr(module, "hold", sweep_first)
    folder, descriptor = module.make_held_folder(module.PREFIX)
    assert seen == [[], []]
    assert module.sweep() == []
    assert folder.is_dir()
    os.close(descriptor)
    assert module.sweep() == [folder]


def test_a_jail_that_nobody_owns_is_ended_and_others_are_not(start: Start) -> None:
    killed, left = start(600)
    _, held = start(600)
    sleeper = ["-c", "import time; print(flush=True); time.sleep(600)"]
    started = [
        subprocess.Popen([name, *sleeper, path], executable=sys.executable, stdout=subprocess.PIPE)
        for name, path in (
            ("bwrap", f"{left}/sandbox-x/home"),
            ("bwrap", f"{held}/sandbox-x/home"),
            ("bwrap", f"{left.parent}/other/home"),
            ("ls", f"{left}/sandbox-x/home"),
            (
                "bwrap",
                f"{left.parent / module.PREFIX}gone/home",
            ),  # its folder was removed before it was known
        )
    ]
    try:
        for process in started:
            assert process.stdout is not None
            process.stdout.readline()
        assert module.sweep() == []
        assert started.pop().wait() == -signal.SIGKILL
        assert [process.poll() for process in started] == [None] * 4
        killed.kill()
        killed.wait()
        assert module.sweep() == [left]
        assert started[0].wait() == -signal.SIGKILL
        assert [process.poll() for process in started[1:]] == [None] * 3
    finally:
        for process in started:
            process.kill()
            process.communicate()


@pytest.mark.skipif(
    os.geteuid() != 0, reason="a folder is closed to an ordinary user only; here we become one"
)
def test_folders_that_a_jail_closed_go() -> None:
    with tempfile.TemporaryDirectory() as text:  # the tests' own is closed to others
        folder = Path(text) / "left"
        (folder / "a" / "b").mkdir(parents=True)
        (folder / "a" / "b" / "file").touch()
        for path in (Path(text), folder, folder / "a", folder / "a" / "b", folder / "a" / "b" / "file"):
            os.chown(path, 64123, 64123)
        (folder / "a" / "b").chmod(0)
        (folder / "a").chmod(0)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                os.setgroups([])
                os.setresgid(64123, 64123, 64123)
                os.setresuid(64123, 64123, 64123)
                code = 0 if module.remove_abandoned(folder) else 2
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
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
