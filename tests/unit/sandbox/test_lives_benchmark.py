"""The benchmark that counts what sandboxes leave sees a leak, and ends with 1 for it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from composer_replication.sandbox.bubblewrap import Bubblewrap

PROGRAM = Path(__file__).parents[3] / "benchmarks" / "sandbox_lives.py"


def lives(folder: Path, *words: str) -> tuple[int, str, dict[str, Any]]:
    """Exit code, everything printed and the figures of bubblewrap."""
    if not Bubblewrap().is_available().ok:
        pytest.skip("not available here")
    done = subprocess.run(
        [sys.executable, str(PROGRAM), "--backends", "bubblewrap", "--at-once", "1", *words],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout, done.stderr
    return done.returncode, done.stdout, json.loads(done.stdout.splitlines()[-1])["bubblewrap"]


def test_nothing_is_left_when_every_parent_is_killed(tmp_path: Path) -> None:
    code, text, found = lives(tmp_path, "--lives", "12", "--lives-of-a-parent", "2", "--killed-share", "1")
    assert (code, found["failed"], sum(found["left"].values())) == (0, 0, 0), text
    assert found["lives"] == 12 + 1  # and that of the next start
    assert found["killed"] >= 1
    assert "planted and seen: processes" in text
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
@pytest.mark.parametrize("kind", ["processes", "folders", "sockets"])
def test_a_leak_is_counted_and_named(tmp_path: Path, kind: str) -> None:
    # What was planted never goes, however long one waits for it.
    code, text, found = lives(tmp_path, "--lives", "1", "--patience", "2", "--plant", kind)
    assert code == 1
    assert found["left"][kind] >= 1, text
    assert f"  {kind}: " in text
    assert {other for other, count in found["left"].items() if count} == {kind}
