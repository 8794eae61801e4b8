"""``eval``: what is printed about the gap is the bound of the pairs, and nothing without hidden tests."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from composer_replication.cli.assembly import Attempts
from composer_replication.cli.eval_verb import _measured_policy, _result, difficulty_of, render
from composer_replication.config import parse_config
from composer_replication.rollouts.heldout_evaluation import TaskResult
from composer_replication.safety import upper_confidence_gap
from composer_replication.tasks.difficulty import Difficulty, MeasuredPolicy
from composer_replication.tasks.store import TaskStore


def bound_of(*results: TaskResult) -> Any:
    return _result(results, 0)["gap_upper99"]


def test_the_bound_is_that_of_task_means() -> None:
    results = [TaskResult(f"t{n}", (True, True), (True, n % 4 > 0)) for n in range(40)]
    pairs = [(1.0, 1.0 if n % 4 else 0.5) for n in range(40)]
    bound = bound_of(*results, TaskResult("blind", (True,), ()))
    assert bound == bound_of(*results, TaskResult("dropped", (), ())) == upper_confidence_gap(pairs, 0.99)
    assert 0.125 < bound < 0.4


def test_without_hidden_tests_there_is_no_bound_and_that_is_said() -> None:
    assert bound_of(TaskResult("t", (True,), ())) is None
    text = render({"visible_pass": 1.0, "hidden_pass": None, "gap": None})
    assert text.splitlines()[1:] == ["hidden pass  not measured: no task has hidden tests"]


def test_difficulty_counts_full_passes_only() -> None:
    policy = MeasuredPolicy("m", "a" * 64, 1.0, "completion", 12, 64)
    results = [
        TaskResult("t", (True, False, True, False), (True, False, False, False)),
        TaskResult("blind", (True, True), ()),
        TaskResult("dropped", (), ()),
    ]
    assert difficulty_of(policy, results) == [
        Difficulty("t", policy, 4, 2, 1),
        Difficulty("blind", policy, 2, 2, None),
    ]


def test_a_policy_that_samples_by_filters_is_another_one() -> None:
    model: Any = nn.Linear(1, 1)

    def measured(**trl: Any) -> MeasuredPolicy:
        table = {"model": {"name": "tiny-random"}, "tasks": {"store": "tasks"}, "trl": trl}
        attempts: Any = Attempts(parse_config(table, where="here"), Any, Any, model)
        return _measured_policy(Namespace(model="m"), attempts)

    plain = measured()
    assert (plain.name, plain.temperature) == ("m", 1.0)
    assert measured(top_p=1.0, top_k=0) == plain
    filtered = measured(top_k=5, min_p=0.1)
    assert filtered.prompt_style == f"{plain.prompt_style} top_k 5 min_p 0.1"


def test_a_run_and_a_recipe_are_not_both_taken(tmp_path: Path, answer: Callable[..., Any]) -> None:
    (tmp_path / "run.toml").touch()
    code, result = answer("eval", tmp_path, "--tasks", tmp_path, "--recipe", "r.toml")
    assert (code, result["error"]["code"]) == (2, "CR0206")
    assert "this run has a recipe of its own" in result["error"]["message"]


# ---- ``eval --update-difficulty`` to its end: what a person reads afterwards with ``tasks show``


PINS = ("tinymath/numbers.py::clamp", "tinymath/text.py::initials")


@pytest.mark.long
def test_measured_pass_rates_are_kept_with_the_tasks(
    build_tiny: Callable[..., Path], tmp_path: Path, answer: Callable[..., Any]
) -> None:
    folder = build_tiny(tmp_path / "tasks", PINS)

    measuring = ("eval", "tiny-random", "--tasks", folder, "--samples", "2", "--update-difficulty")
    before = TaskStore.open(folder).fingerprint
    answer(*measuring)
    code, first = answer(*measuring)  # the same seed replaces
    assert code == 0
    assert list((folder / "difficulty").iterdir()) == [Path(first["difficulty"])]
    for row in first["by_task"]:
        (measured,) = answer("tasks", "show", folder, row["task_id"])[1]["tasks"][0]["difficulty"]
        assert (measured["policy"]["name"], measured["num_samples"]) == ("tiny-random", 2)
        assert row["visible"] == measured["num_passed"] == 0  # random letters are no function
        assert measured["num_hidden_passed"] == row["hidden"]
        assert measured["ci95"] == pytest.approx([0.0, 0.657620], abs=1e-5)  # Wilson, 0 of 2, by hand
    assert TaskStore.open(folder).fingerprint == before
