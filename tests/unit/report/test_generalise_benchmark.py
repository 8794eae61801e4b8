"""The table of trained repositories against others counts what runs left behind, and calls a target met only where it is."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest

from composer_replication.cli.training_run import rates_of
from composer_replication.rollouts.pass_rates import TaskResult

BENCHMARK: dict[str, Any] = runpy.run_path(str(Path(__file__).parents[3] / "benchmarks" / "generalise.py"))
NUM_SAMPLES = 40
HELD = ("one-1.0--a.f--1234", "one-1.0--a.g--1235", "two-2.0--b.f--1236", "two-2.0--b.g--1237")


def results(passed: int) -> list[TaskResult]:
    """Each task passes so many of its samples by hidden tests, one more by visible ones."""
    return [
        TaskResult(
            name,
            tuple(n <= passed for n in range(NUM_SAMPLES)),
            tuple(n < passed for n in range(NUM_SAMPLES)),
        )
        for name in HELD
    ]


def write_run(root: Path, name: str, before: int, after: int) -> None:
    rates = {
        when: {"heldout": rates_of(results(n), dropped=0), "train": rates_of(results(n), dropped=0)}
        for when, n in (("before", before), ("after", after))
    }
    (root / name).mkdir(parents=True)
    summary = {"steps": 26, "verdict": "clean", "seconds": 120.0, **rates}
    (root / name / "summary.json").write_text(json.dumps(summary))


def test_a_table_of_runs_says_what_they_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path, "seed-0", 4, 20)
    write_run(tmp_path, "seed-1", 4, 5)
    write_run(tmp_path, "control-0", 4, 4)
    assert BENCHMARK["main"](["--out", str(tmp_path), "--table", "--seeds", "0", "1", "7"]) == 0
    said = capsys.readouterr().out
    seed = next(line for line in said.splitlines() if line.startswith("| seed-0"))
    assert seed.startswith(
        "| seed-0 | 26 | clean | 0.100 (0.062 to 0.156) | 0.500 (0.423 to 0.577) | 5.00 | yes |"
    )
    assert seed.endswith("| 0.125 (0.082 to 0.185) | 0.525 (0.448 to 0.601) | 2 |")
    assert "| control-0 | 26 | clean | 0.100 (0.062 to 0.156) | 0.100 (0.062 to 0.156) | 1.00 | no |" in said
    assert "met together, met by 1 of 2 alone" in said
    assert "All seeds: 0.100" in said
    assert (
        "Control: 0.100 (0.062 to 0.156) before, 0.100 (0.062 to 0.156) after. Difference over tasks: +0.000"
        in said
    )
    assert "| one-1.0 | 2 | 0.100 | 0.312 |" in said


@pytest.mark.parametrize(
    ("before", "after", "is_met"),
    [(4, 20, True), (20, 29, False), (4, 5, False), (20, 20, False), (20, 4, False)],
    ids=["far-above", "under-half-again", "within-the-intervals", "same", "worse"],
)
def test_the_target_needs_half_again_and_intervals_apart(
    tmp_path: Path, before: int, after: int, is_met: bool
) -> None:
    write_run(tmp_path, "seed-0", before, after)
    assert BENCHMARK["read_run"](tmp_path / "seed-0").heldout.meets_goal() is is_met


def test_the_bootstrap_is_over_tasks_not_samples() -> None:
    """One task that gets all the gain says little of others, however often it was sampled."""
    before = dict.fromkeys(HELD, (0, 1000))
    after = {**before, HELD[0]: (1000, 1000)}
    change = BENCHMARK["Change"](before, after)
    assert change.is_apart()
    low, high = change.over_tasks()
    assert low == 0.0
    assert high >= 0.5


def test_samples_of_seeds_are_put_together_by_task() -> None:
    change = BENCHMARK["Change"]
    together = BENCHMARK["pooled"](
        [change({"a": (1, 8), "b": (2, 8)}, {"a": (3, 8), "b": (4, 8)}), change({"a": (1, 8)}, {"a": (8, 8)})]
    )
    assert together == change({"a": (2, 16)}, {"a": (11, 16)})


def test_a_run_that_fails_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--out", str(tmp_path), "--seeds", "0", "--control", "--set", "no.such_key=1"]
    assert BENCHMARK["main"](words) == 1
    assert "failed: seed-0" in capsys.readouterr().err
