"""The benchmark of killed runs sees what it must see: another hash, an orphan, a file that stayed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

from kill_resume import Life, judge, phase_of

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
# Its child is killed and leaves a child of its own behind.
ORPHAN = """
import ctypes, subprocess, sys
from kill_resume import PR_SET_CHILD_SUBREAPER, num_orphans
ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
child = subprocess.Popen(["sh", "-c", sys.argv[1]], stdout=subprocess.PIPE)
child.stdout.readline()
child.kill()
child.wait()
print(num_orphans(0.5), num_orphans(0.5))
"""


@pytest.mark.parametrize(
    ("life", "exit_code"),
    [
        (Life("a", ["training"]), 0),
        (Life("b", ["training"]), 1),
        (Life("", ["training"], trouble="exit code 1"), 1),
        (Life("a", ["training"], num_orphans=1), 1),
        (Life("a", ["training"], left_behind=["composer-rl-scratch-x"]), 1),
    ],
    ids=["same", "other-hash", "no-end", "orphan", "folder"],
)
def test_one_life_decides(life: Life, exit_code: int) -> None:
    words, code = judge([Life("a", ["starting", "training"]), life], "a")
    assert code == exit_code
    assert words.startswith(f"{1 + (life.sha256 == 'a')} of 2 lives")
    assert "3 kills: 2 training, 1 starting" in words
    assert all(name in words for name in life.left_behind)


@pytest.mark.parametrize(("script", "counts"), [("sleep 60 & echo; wait", "1 0"), ("echo; read line", "0 0")])
def test_what_outlives_its_parent_is_counted_and_ended(script: str, counts: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", ORPHAN, script],
        cwd=BENCHMARKS,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.split() == counts.split()


def test_phases_are_read_from_what_lies_there(tmp_path: Path) -> None:
    out = tmp_path / "run"
    told = out.with_suffix(".err")
    told.write_text("tasks: 1\n")
    assert phase_of(out, set()) == "starting"
    told.write_text("tasks: 1\ntraining\n")
    assert phase_of(out, set()) == "training"
    half = out / "checkpoints" / "checkpoint-2"
    half.mkdir(parents=True)
    assert phase_of(out, set()) == "writing a checkpoint"
    assert phase_of(out, {half}) == "training"
    (out / "checkpoints" / "checkpoint-3").mkdir()
    (out / "checkpoints" / "checkpoint-3" / "MANIFEST.json").write_text("{}")
    assert phase_of(out, set()) == "deleting an older checkpoint"
    told.write_text("tasks: 1\ntraining\nmodel: saving it\n")
    assert phase_of(out, {half}) == "saving the model"


@pytest.mark.long
def test_a_killed_life_ends_as_one_that_was_not() -> None:
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "kill_resume.py"), "--lives", "1", "--steps", "2"],
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 of 1 lives" in done.stdout
    assert "left behind: 0 processes, 0 files or folders" in done.stdout
