"""Stock ``verl.trainer.main_ppo`` on the processor: our tasks, our numbers, our guard."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from composer_replication.run_folder import read_jsonl

HERE = Path(__file__).parent
RECIPE = HERE.parents[2] / "recipes" / "tiny-tools" / "run.toml"
SETTINGS = (
    "trl.max_steps=2",
    "agent.max_new_tokens=12",
    "agent.max_turns=2",
    "agent.max_context_tokens=2048",
)
pytestmark = pytest.mark.timeout(3600)


def run_verl(folder: Path, *more: str, **environment: str) -> subprocess.CompletedProcess[str]:
    arguments = (HERE / "processor_arguments.txt").read_text().split()
    for_processor = {
        "PYTHON": sys.executable,
        "PYTHONPATH": str(HERE),
        "RAY_ADDRESS": "local",
        "RAY_raylet_start_wait_time_s": "900",  # a loaded machine starts Ray slowly
        "RAY_agent_register_timeout_ms": "600000",
        "RAY_USAGE_STATS_ENABLED": "0",
        "VERL_USE_EXTERNAL_MODULES": "processor_platform",
        "VERL_PLATFORM": "cpu",
        "VERL_ENGINE_DEVICE": "cuda",
    }
    return subprocess.run(
        ["/bin/sh", str(folder / "run.sh"), *arguments, f"hydra.run.dir={folder / 'hydra'}", *more],
        env=os.environ | for_processor | environment,
        capture_output=True,
        text=True,
        timeout=2400,
        check=False,
    )


def test_verl_trains_and_the_guard_looks_on(exported: Path) -> None:
    done = run_verl(exported)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    said = re.sub(r"\x1b\[[0-9;]*m", "", done.stdout)
    steps = [line for line in said.splitlines() if re.search(r"step:[12] - ", line)]
    assert len(steps) == 2
    assert all("actor/composer_ratio_distance:" in line for line in steps)
    verdicts = read_jsonl(exported / "verdicts.jsonl")
    assert [row["step"] for row in verdicts] == [1, 2]
    for row, line in zip(verdicts, steps, strict=True):
        logged = float(re.search(r"critic/score/mean:(?:np\.float64\()?([-\d.e]+)", line)[1])  # type: ignore[index]
        assert row["in_loop_reward"] == pytest.approx(logged)


def test_a_planted_hack_ends_the_job_with_our_code(exported: Path) -> None:
    """The reward is made to say 1 whatever the tests say; the hidden tests do not follow."""
    recipe = (exported / "run.toml").read_text()
    assert "[guard]" in recipe
    changed = re.sub(r"min_steps = \d+", "min_steps = 1", recipe)
    changed = re.sub(r"max_proxy_real_gap = [\d.]+", "max_proxy_real_gap = 0.1", changed)
    changed = re.sub(r"ema_alpha = [\d.]+", "ema_alpha = 0.0", changed)
    (exported / "run.toml").write_text(changed)
    done = run_verl(exported, PLANTED_HACK="1")
    assert done.returncode == 5, done.stdout[-3000:] + done.stderr[-3000:]
    assert "CR0601: the guard halted training" in done.stderr
    halted = json.loads((exported / "halted.json").read_text())
    assert halted["in_loop_reward"] - halted["heldout_score"] > 0.1


def test_without_our_plugin_the_job_ends_by_name(exported: Path) -> None:
    done = run_verl(
        exported,
        *("algorithm.adv_estimator=grpo", "actor_rollout_ref.actor.policy_loss.loss_mode=vanilla"),
        "trainer.v1.trainer_mode=sync",
        VERL_USE_EXTERNAL_PLUGINS="none",
    )
    assert done.returncode != 0
    assert "CR0951" in done.stdout + done.stderr


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    """A folder of ``composer-rl export-verl``; it needs our own training packages, which verl's bounds do not allow here."""
    folder = tmp_path / "verl"
    program = [str(HERE.parents[2] / ".venv" / "bin" / "composer-rl"), "export-verl", str(RECIPE)]
    words = [word for setting in SETTINGS for word in ("--set", setting)]
    subprocess.run([*program, "--out", str(folder), *words], check=True, timeout=900)
    return folder
