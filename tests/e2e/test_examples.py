"""What the files in ``examples`` say when they are run."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "grpo_one_file.py"


@pytest.mark.long
@pytest.mark.parametrize(("words", "code"), [(["--weak"], 5), ([], 0)], ids=["weak", "honest"])
def test_one_file_learns_and_its_guard_stops_what_only_looks_right(words: list[str], code: int) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), *words], capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == code, done.stderr
    rewards, truths = (
        [float(value) for value in re.findall(rf"{name} ([\d.]+)", done.stdout)]
        for name in ("reward", "truth")
    )
    assert rewards[-1] > rewards[0] + 0.5
    assert ("stopped: the Hacking Gap" in done.stdout) == (code == 5)
    assert truths[-1] < 0.2 if code else truths[-1] > 0.8
