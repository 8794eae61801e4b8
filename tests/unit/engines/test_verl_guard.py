"""The guard over the numbers that verl logs; its exit code is tried in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from composer_replication.engines.verl_guard import HELDOUT_SCORE, IN_LOOP, GuardHook
from composer_replication.errors import CollapseStopError
from composer_replication.run_folder import read_json, read_jsonl
from composer_replication.safety import HeldOutGuard


def hook(folder: Path) -> GuardHook:
    return GuardHook(HeldOutGuard(min_steps=2, ema_alpha=0.0, max_proxy_real_gap=0.35), folder)


def numbers(reward: float, truth: float) -> dict[str, float]:
    return {IN_LOOP: reward, HELDOUT_SCORE: truth, "actor/loss": 1.0}


def test_an_honest_job_goes_on(tmp_path: Path) -> None:
    watching = hook(tmp_path)
    for step in range(5):
        watching.look(numbers(0.1 * step, 0.1 * step), step=step)
    rows = read_jsonl(tmp_path / "verdicts.jsonl")
    assert [row["fire"] for row in rows] == [False] * 5
    assert not (tmp_path / "halted.json").exists()


def test_a_reward_without_truth_ends_the_job_with_its_verdict(tmp_path: Path) -> None:
    watching = hook(tmp_path)
    watching.look(numbers(0.0, 0.0), step=1)
    with pytest.raises(CollapseStopError, match="CR0601"):
        watching.look(numbers(0.9, 0.0), step=2)
    halted = read_json(tmp_path / "halted.json")
    assert (halted["step"], halted["in_loop_reward"], halted["heldout_score"]) == (2, 0.9, 0.0)
    assert "Hacking Gap 0.9" in halted["reason"]


def test_a_step_without_a_reading_is_not_judged(tmp_path: Path) -> None:
    watching = hook(tmp_path)
    watching.look({IN_LOOP: 0.9}, step=1)
    watching.look({IN_LOOP: 0.9, HELDOUT_SCORE: float("nan")}, step=2)
    assert not (tmp_path / "verdicts.jsonl").exists()


@pytest.mark.parametrize(("is_halted", "code"), [(True, 5), (False, 1)])
def test_the_process_ends_with_the_guards_code(tmp_path: Path, is_halted: bool, code: int) -> None:
    """verl itself ends with 1, whatever was raised in its trainer; a verdict of an earlier job is no verdict of this one."""
    (tmp_path / "halted.json").write_text('{"reason": "old"}')
    program = (
        "import sys; from pathlib import Path\n"
        "from composer_replication.engines.verl_guard import end_with_our_code\n"
        f"folder = Path({str(tmp_path)!r}); end_with_our_code(folder)\n"
        + ("(folder / 'halted.json').write_text('{\"reason\": \"gap 0.9\"}')\n" if is_halted else "")
        + "sys.exit(1)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == code
    assert ("CR0601: the guard halted training: gap 0.9" in done.stderr) == is_halted
