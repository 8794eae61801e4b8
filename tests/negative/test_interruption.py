"""Ctrl-C and an order to end: exit code 130, nothing running, nothing left in the temporary folder, resumable."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from composer_replication.sandbox.process_tree import descendants
from composer_replication.tasks.store import TaskStore
from composer_replication.tasks.store_manifest import is_settled
from composer_replication.trainer.checkpoints import newest_whole_checkpoint

TINY = Path(__file__).parents[2] / "recipes" / "tiny-cpu" / "project"
PINS = ("tinymath/numbers.py::clamp", "tinymath/text.py::initials")
LONGEST_WAIT_SECONDS = 240  # loading torch from a busy disk takes long

pytestmark = pytest.mark.timeout(600)
# A shell that starts the tests in the background lets them ignore Ctrl-C; a person's shell does not.
COMMAND = (
    "import signal, sys\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
    "from composer_replication.cli.main import main\nsys.exit(main())"
)


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


class Started:
    """A command of its own with a temporary folder of its own."""

    def __init__(self, folder: Path, *words: object) -> None:
        self.temporary = folder / "temporary"
        self.temporary.mkdir()
        self.process = subprocess.Popen(
            [sys.executable, "-c", COMMAND, *map(str, words), "--quiet", "--json"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "TMPDIR": str(self.temporary)},
        )

    def wait_for(self, happened: Callable[[], bool]) -> None:
        deadline = time.monotonic() + LONGEST_WAIT_SECONDS
        while not happened():
            assert self.process.poll() is None, self.process.communicate()[1]
            assert time.monotonic() < deadline
            time.sleep(0.05)

    def has_jail(self) -> bool:
        return any(self.temporary.glob("composer-rl-*/*/trees/*/tree")) and bool(
            descendants(self.process.pid)
        )

    def end(self, number: signal.Signals) -> str:
        """Send the signal; check what must hold after any interruption. Gives standard error."""
        below = descendants(self.process.pid)
        self.process.send_signal(number)
        out, err = self.process.communicate(timeout=LONGEST_WAIT_SECONDS)
        assert self.process.returncode == 130, err
        assert json.loads(out)["error"]["code"] == "CR0103"
        assert "Traceback" not in err
        assert list(self.temporary.glob("composer-rl-*")) == []
        deadline = time.monotonic() + LONGEST_WAIT_SECONDS
        while any(map(is_alive, below)):  # killed, and process 1 may take a moment to collect them
            assert time.monotonic() < deadline
            time.sleep(0.05)
        return err


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Started]]:
    running: list[Started] = []

    def begin(*words: object) -> Started:
        running.append(Started(tmp_path, *words))
        return running[-1]

    yield begin
    for started in running:
        started.process.kill()
        started.process.communicate()


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_build_ends_at_once_in_the_middle_of_a_long_test(
    start: Callable[..., Started], tmp_path: Path, number: signal.Signals
) -> None:
    root = tmp_path / "project"
    (root / "tests").mkdir(parents=True)
    (root / "pyproject.toml").write_text('[project]\nname = "slow"\nversion = "1"\n')
    (root / "slow.py").write_text("def double(x):\n    y = x + x\n    return y\n")
    (root / "tests" / "test_slow.py").write_text("def test_slow():\n    while True:\n        pass\n")
    build = start("tasks", "build", root, "--out", tmp_path / "out")
    build.wait_for(build.has_jail)
    assert "the same command goes on" in build.end(number)
    assert not (tmp_path / "out" / "repositories").exists()


@pytest.mark.long
@pytest.mark.promise
def test_a_killed_build_goes_on_to_the_same_tasks(
    start: Callable[..., Started], tmp_path: Path, store: Path
) -> None:
    """SIGKILL asks nobody: what is there is whole, nothing runs on, and the same command finishes it."""
    out = tmp_path / "out"
    pins = [f"--symbol={pin}" for pin in PINS]
    words = ("tasks", "build", TINY, "--visible-only", "--jobs", 1, "--out", out, *pins)
    build = start(*words)
    build.wait_for(lambda: any((out / "tasks").glob("*.zst")) and bool(descendants(build.process.pid)))
    below = descendants(build.process.pid)
    build.process.kill()
    build.process.wait(LONGEST_WAIT_SECONDS)
    deadline = time.monotonic() + LONGEST_WAIT_SECONDS
    while any(map(is_alive, below)):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    torn = TaskStore.open(out)
    torn.verify()
    assert len(torn.tasks()) == 1
    assert not is_settled(torn.root)
    shutil.rmtree(build.temporary)
    again = start(*words)
    assert again.process.wait(LONGEST_WAIT_SECONDS) == 0
    assert TaskStore.open(out).fingerprint == TaskStore.open(store).fingerprint


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_training_run_ends_with_a_whole_checkpoint(
    start: Callable[..., Started], recipe: Path, number: signal.Signals
) -> None:
    run = recipe.parent / "run"
    training = start("train", recipe, "--out", run, "--set", "trl.max_steps=100000")
    training.wait_for(lambda: len(list((run / "checkpoints").glob("checkpoint-*/MANIFEST.json"))) > 0)
    err = training.end(number)
    assert "--resume goes on at the last whole checkpoint" in err
    assert newest_whole_checkpoint(run / "checkpoints") is not None
    assert not (run / "summary.json").exists()
