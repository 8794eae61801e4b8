"""The curriculum joined to a recipe: off without its table, and begun with what was measured beside the tasks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from composer_replication.cli import assembly
from composer_replication.cli.assembly import open_curriculum
from composer_replication.config import RunConfig, parse_config
from composer_replication.rollouts.curriculum import Evidence
from composer_replication.tasks.difficulty import Difficulty, MeasuredPolicy, record_difficulty
from composer_replication.tasks.store import TaskStore
from composer_replication.trainer.model_modes import parameter_sha256

ROWS = [{"prompt": "p", "task_id": name} for name in ("t-function-body", "t-class-body")]


def recipe(**tables: Any) -> RunConfig:
    return parse_config(
        {"model": {"name": "tiny-random"}, "tasks": {"store": "tasks"}, **tables}, where="run.toml"
    )


@pytest.fixture
def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Linear(3, 2)


def test_without_its_table_there_is_none(sized_store: TaskStore, model: torch.nn.Module) -> None:
    assert open_curriculum(recipe(), sized_store, ROWS, model) is None


def test_it_belongs_to_the_store_and_the_seed(sized_store: TaskStore, model: torch.nn.Module) -> None:
    found = open_curriculum(recipe(seed=4, curriculum={}), sized_store, ROWS, model)
    same = open_curriculum(recipe(seed=4, curriculum={}), sized_store, ROWS, model)
    assert found is not None and same is not None
    assert found.state_dict()["tasks_fingerprint"] == sized_store.fingerprint
    assert [found.chosen_rows(1) for _ in range(30)] == [same.chosen_rows(1) for _ in range(30)]


def test_a_model_is_not_hashed_for_nothing(
    sized_store: TaskStore, model: torch.nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(assembly, "recorded_evidence", lambda *a, **k: pytest.fail("nothing to read"))
    assert open_curriculum(recipe(curriculum={}), sized_store, ROWS, model) is not None


def test_pass_rates_of_the_very_weights_come_first(sized_store: TaskStore, model: torch.nn.Module) -> None:
    def policy(sha256: str) -> MeasuredPolicy:
        return MeasuredPolicy(sha256[:8], sha256, 1.0, "completion", 12, 64)

    own, other = policy(parameter_sha256(model)), policy("0" * 64)
    record_difficulty(sized_store.root, 0, [Difficulty("t-function-body", own, 4, 1, None)])
    strange = [Difficulty(row["task_id"], other, 4, 4, None) for row in ROWS]
    record_difficulty(sized_store.root, 0, strange)

    def evidence(**options: Any) -> list[Evidence]:
        found = open_curriculum(recipe(curriculum=options), sized_store, ROWS, model)
        assert found is not None
        return [found.standings[row["task_id"]].evidence for row in ROWS]

    assert evidence() == [Evidence(1.0, 3.0), Evidence(4.0, 0.0)]
    assert evidence(recorded="same-weights") == [Evidence(1.0, 3.0), Evidence()]
