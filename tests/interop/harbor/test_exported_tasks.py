"""Exported tasks in Harbor's hands: its models read them, and its trials pay the oracle and nobody who does nothing."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from harbor.models.task.task import Task
from harbor.models.trial.config import AgentConfig, EnvironmentConfig, TaskConfig, TrialConfig
from harbor.trial.trial import Trial
from tiny_store import task_of

from composer_replication.cli.main import main
from composer_replication.tasks.store import TaskStore

if TYPE_CHECKING:
    from harbor.models.trial.result import TrialResult


SYMBOL = "clamp"


@pytest.fixture(scope="session")
def folder(store: TaskStore, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("harbor") / "tasks"
    assert main(["tasks", "export", str(store.root), "--format", "harbor", "--out", str(out)]) == 0
    return out


def test_its_models_read_every_task(store: TaskStore, folder: Path) -> None:
    assert sorted(path.name for path in folder.iterdir()) == store.task_ids()
    for task in store.tasks():
        assert Task.is_valid_dir(folder / task.task_id)
        read = Task(folder / task.task_id)
        assert task.symbol in read.instruction
        assert read.config.metadata["symbol"] == task.symbol
        assert read.config.environment.network_mode == "no-network"


def _run(task: Path, agent: str, trials: Path) -> TrialResult:
    config = TrialConfig(
        task=TaskConfig(path=task),
        trial_name=f"composer-rl-{agent}",
        trials_dir=trials,
        agent=AgentConfig(name=agent),
        environment=EnvironmentConfig(import_path="built_environment:BuiltEnvironment"),
    )

    async def trial() -> TrialResult:
        return await (await Trial.create(config)).run()

    return asyncio.run(trial())


@pytest.mark.parametrize(("agent", "reward"), [("oracle", 1.0), ("nop", 0.0)])
def test_a_trial_pays_the_oracle_alone(
    store: TaskStore, folder: Path, tmp_path: Path, agent: str, reward: float
) -> None:
    task = task_of(store, SYMBOL)
    result = _run(folder / task.task_id, agent, tmp_path)
    assert result.exception_info is None
    assert result.verifier_result is not None
    assert result.verifier_result.rewards == {"reward": reward}
    outcomes = json.loads((tmp_path / f"composer-rl-{agent}" / "verifier" / "outcomes.json").read_text())
    assert {*task.fail_to_pass, *task.tests.pass_to_pass} <= outcomes.keys()
    failed = {test for test, outcome in outcomes.items() if outcome != "passed"}
    assert failed == (set() if agent == "oracle" else {*task.fail_to_pass})
