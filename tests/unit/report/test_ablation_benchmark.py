"""The table of the ablation counts by hand what the journal holds, and what is in the journal is not run again."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest

from composer_replication.config import load_config, parse_override
from composer_replication.run_folder import read_jsonl

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

import ablation

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
TINY = BENCHMARKS.parent / "recipes" / "tiny-cpu" / "run.toml"
SMALL = (
    *("trl.max_steps=3", "trainer.checkpoint_every=1", "trl.save_total_limit=20", "trl.num_generations=2"),
    *("trl.per_device_train_batch_size=2", "heldout.before_and_after_samples=1", "heldout.every=100"),
)


def line(arm: str, seed: int, after: float, **more: Any) -> dict[str, Any]:
    """A run over two tasks of ten samples each, of which one passes always and the other never before training."""
    passed = round(20 * after)
    counts = {
        "before": {"a": [10, 10], "b": [0, 10]},
        "after": {"a": [passed - passed // 2, 10], "b": [passed // 2, 10]},
    }
    own = {"heldout": counts, "trained": counts, "reward": after / 2, "verdict": "clean", "steps": 16}
    mark = ablation.fingerprint(ablation.FOLDER / "run.toml", ablation.ARMS[arm])
    return {"arm": arm, "seed": seed, "settings": mark, "tasks": "x", "minutes": 6.0, **own, **more}


def journal(path: Path, *lines: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(each) + "\n" for each in lines))
    return path


def said(path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    assert ablation.main(["--table", "--journal", str(path)]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("freedom", "inside", "quantile"),
    [
        *((1, 0.95, 12.7062), (2, 0.95, 4.3027), (3, 0.95, 3.1824), (4, 0.95, 2.7764), (9, 0.95, 2.2622)),
        *((29, 0.95, 2.0452), (120, 0.95, 1.9799), (2, 0.99, 9.9248), (7, 0.99, 3.4995), (1, 0.5, 1.0)),
    ],
)
def test_students_t_is_that_of_the_printed_tables(freedom: int, inside: float, quantile: float) -> None:
    assert ablation.t_quantile(freedom, inside) == pytest.approx(quantile, abs=6e-5)


def test_three_seeds_by_hand(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [line("grpo", seed, after) for seed, after in enumerate((0.6, 0.7, 0.8))]
    lines += [line("right-hints", seed, after) for seed, after in enumerate((0.7, 0.9, 0.8))]
    text = said(journal(tmp_path / "j.jsonl", *lines), capsys)
    # 0.7 +- 4.3027 x 0.1 / sqrt(3), and half of it for the rewards
    row = "| grpo | 3 | 0.500 (0.500 to 0.500) | 0.700 (0.452 to 0.948) | 0.500 (0.500 to 0.500) | 0.700 (0.452 to 0.948)"
    assert f"{row} | 0.350 (0.226 to 0.474) | 6.0 |" in text
    # seed by seed +0.1, +0.2, 0: 0.1 +- 4.3027 x 0.1 / sqrt(3)
    assert (
        "| right-hints less grpo | 3 | +0.100 (-0.148 to +0.348) | +0.100 (-0.148 to +0.348) | +0.050" in text
    )
    assert f"| siblings | 0 | {' | '.join([ablation.DASH] * 6)} |" in text
    assert f"| siblings less grpo | 0 | {' | '.join([ablation.DASH] * 3)} |" in text
    assert "Not clean" not in text
    assert "left out" not in text


def test_differences_pair_seeds_and_figures_are_means(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [line("grpo", 0, 0.6), line("grpo", 1, 0.2)]
    lines += [
        line("siblings", 0, 0.8, **{"replay/pairs": 3.0}),
        line("siblings", 7, 0.1, **{"replay/pairs": 5.0}),
    ]
    text = said(journal(tmp_path / "j.jsonl", *lines), capsys)
    assert "| siblings less grpo | 1 | +0.200 | +0.200 | +0.100 |" in text  # one seed in common: no interval
    # 4 +- 12.7062 x sqrt(2) / sqrt(2)
    assert "| pairs a step | \N{EN DASH} | \N{EN DASH} | 4.000 (-8.706 to 16.706) |" in text


def test_what_cannot_be_compared_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [line("grpo", 0, 0.6), line("grpo", 0, 0.9), line("grpo", 1, 0.6, tasks="y")]
    lines += [line("siblings", 0, 0.1, verdict="halted", steps=9), line("siblings", 1, 0.9, settings="older")]
    path = journal(tmp_path / "j.jsonl", *lines)
    path.write_text(f'{path.read_text()}{{"arm": "grpo", "se')  # a crash tore the last line
    text = said(path, capsys)
    assert (
        "| grpo | 2 | 0.500 (0.500 to 0.500) | 0.600 (0.600 to 0.600) |" in text
    )  # the first of a seed counts
    assert "| siblings | 1 | 0.500 | 0.100 |" in text
    assert "Not clean: siblings 0 (halted, 9 steps)." in text
    assert "of 2 different sets of tasks" in text
    assert "1 lines of other settings are left out." in text


def test_arms_differ_by_their_channel_alone() -> None:
    recipe = ablation.FOLDER / "run.toml"
    plain = load_config(recipe).model_dump()
    for arm, settings in ablation.ARMS.items():
        own = load_config(recipe, dict(parse_override(setting) for setting in settings)).model_dump()
        changed = {key for key in plain if own[key] != plain[key]}
        assert changed <= {"trainer", "hints", "replay"}
        weights = {key for key in plain["trainer"] if own["trainer"][key] != plain["trainer"][key]}
        assert weights == {"grpo": set(), "siblings": {"beta_replay"}}.get(arm, {"alpha_sdpo"})
    marks = {ablation.fingerprint(recipe, settings) for settings in ablation.ARMS.values()}
    assert len(marks) == len(ablation.ARMS)


def test_the_seed_is_no_part_of_the_settings_and_all_else_is(tmp_path: Path) -> None:
    text = (ablation.FOLDER / "run.toml").read_text()
    known = ablation.fingerprint(ablation.FOLDER / "run.toml", ())
    other = tmp_path / "run.toml"
    other.write_text(text.replace("seed = 0", "seed = 5", 1))
    assert ablation.fingerprint(other, ()) == known
    other.write_text(text.replace("max_steps = ", "max_steps = 1"))
    assert tomllib.loads(other.read_text())["trl"]["max_steps"] > 100
    assert ablation.fingerprint(other, ()) != known


def arguments(out: Path, *words: str) -> list[str]:
    flags = [part for setting in SMALL for part in ("--set", setting)]
    return ["--recipe", str(TINY), "--out", str(out), "--journal", str(out / "j.jsonl"), *flags, *words]


@pytest.mark.long
def test_a_killed_arm_goes_on_and_ends_as_one_that_was_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted = ("--only", "right-hints", "--seed", "3")
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert ablation.main(arguments(whole, *wanted)) == 0
    command = [sys.executable, str(BENCHMARKS / "ablation.py"), *arguments(cut, *wanted)]
    child = subprocess.Popen(command, start_new_session=True)
    deadline = time.monotonic() + 900
    while not [*cut.glob("*/checkpoints/checkpoint-1/MANIFEST.json")]:
        assert child.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    subprocess.run(["kill", f"-{signal.SIGKILL.value}", "--", f"-{child.pid}"], check=True)
    child.wait()
    assert not read_jsonl(cut / "j.jsonl")
    assert ablation.main(arguments(cut, *wanted)) == 0
    (first,), (second,) = read_jsonl(whole / "j.jsonl"), read_jsonl(cut / "j.jsonl")
    differing = {key for key in first if first[key] != second[key]}
    assert differing <= {"minutes"}
    assert first["sdpo/turns"] > 0
    assert first["steps"] == 3
    capsys.readouterr()
    assert ablation.main(arguments(cut, *wanted)) == 0  # nothing is left to do
    assert read_jsonl(cut / "j.jsonl") == [second]
    assert "| right-hints | 1 |" in capsys.readouterr().out
