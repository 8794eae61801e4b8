"""Training on rollouts of several turns by a recipe: real trainer, loop, ledger, tools in a jail and grading; scripted words."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from scripted_tools import END, said, sampler_of

from composer_replication.cli.training_run import run_recipe
from composer_replication.config import load_config
from composer_replication.records import StopReason
from composer_replication.rollouts.environment.feature_deletion_env import FeatureDeletionEnv
from composer_replication.rollouts.environment.reward_options import RewardOptions
from composer_replication.rollouts.episodes.episode import Episode, is_refusal
from composer_replication.rollouts.episodes.trajectories import read_trajectories
from composer_replication.rollouts.grading import Grader
from composer_replication.run_folder import RunFolder, read_jsonl
from composer_replication.tasks.build import build_tasks
from composer_replication.tasks.store import TaskStore
from composer_replication.trainer import episode_rollouts
from composer_replication.trainer.composer_trainer import ComposerReplicationTrainer

pytestmark = pytest.mark.timeout(600)

RECIPE = Path(__file__).parents[3] / "recipes" / "tiny-tools" / "run.toml"
PROJECT = RECIPE.parents[1] / "tiny-cpu" / "project"
NUMBERS = "tinymath/numbers.py"
COST = 0.125


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> TaskStore:
    folder = tmp_path_factory.mktemp("agent-store") / "tasks"
    build_tasks([str(PROJECT)], folder, symbols={str(PROJECT): (f"{NUMBERS}::clamp", f"{NUMBERS}::sign")})
    return TaskStore.open(folder)


@pytest.fixture(scope="module")
def scripts() -> list[list[str]]:
    """Solves any task of the file; makes mistakes and gives up; looks for left-over bytecode and solves."""
    golden = (PROJECT / NUMBERS).read_text()
    return [
        [said("write_file", path=NUMBERS, content=golden), said("submit")],
        [
            said("fly_away", height=3),
            said("bash", cmd="ls"),
            said("bash", command="echo hello"),
            f"I give up.{END}",
        ],
        [
            said("bash", command="strings tinymath/__pycache__/numbers.cpython-311.pyc"),
            said("write_file", path=NUMBERS, content=golden),
            said("submit"),
        ],
    ]


class Recorded:
    """What the trainer made of each generation, as it went into the loss."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.batches: list[dict[str, Any]] = []
        self.trainers: list[Any] = []
        inner = ComposerReplicationTrainer._generate_and_score_completions

        def generate(trainer: Any, inputs: Any) -> Any:
            batch = inner(trainer, inputs)
            self.batches.append(
                {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in batch.items()}
            )
            self.trainers.append(trainer)
            return batch

        monkeypatch.setattr(ComposerReplicationTrainer, "_generate_and_score_completions", generate)


def train(folder: Path, store: TaskStore, **settings: Any) -> RunFolder:
    overrides = {
        "tasks": {"store": str(store.root)},
        "agent.reward.invalid_call_cost": COST,
        "agent.max_new_tokens": 2048,
    }
    run_recipe(RECIPE, overrides | settings, folder, resume=False, quiet=True)
    return RunFolder(folder)


@pytest.fixture(scope="module")
def run(
    tmp_path_factory: pytest.TempPathFactory, store: TaskStore, scripts: list[list[str]]
) -> Iterator[tuple[RunFolder, Recorded]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(episode_rollouts, "model_sampler", sampler_of(scripts))
        recorded = Recorded(patch)
        yield train(tmp_path_factory.mktemp("agent-run") / "run", store), recorded


def episodes_of(folder: RunFolder) -> list[list[Episode]]:
    return [read_trajectories(path) for path in sorted(folder.rollouts.glob("episodes-*.jsonl"))]


def test_rows_are_the_sampled_ids_and_only_they_carry_loss(run, scripts) -> None:
    folder, recorded = run
    steps = episodes_of(folder)
    assert len(steps) == len(recorded.batches) == 2
    tokenizer = recorded.trainers[0].processing_class
    for episodes, batch in zip(steps, recorded.batches, strict=True):
        assert len({episode.task_id for episode in episodes}) == 2
        masked_rows = 0
        for row, episode in enumerate(episodes):
            real = batch["completion_mask"][row].bool()
            ids = batch["completion_ids"][row][real].tolist()
            mask = batch["tool_mask"][row][real].bool()
            prompt = batch["prompt_ids"][row][batch["prompt_mask"][row].bool()].tolist()
            words = [turn.observed.turn.completion.text for turn in episode.turns]
            script = next(each for each in scripts if each[0] == words[0] + END)
            said_ids = [i for move in script for i in tokenizer.encode(move, add_special_tokens=False)]
            assert tuple(prompt) == episode.turns[0].observed.turn.prompt_ids
            last = episode.turns[-1].observed.turn
            assert tuple(prompt + ids) == (*last.prompt_ids, *last.completion.token_ids)
            if script is scripts[2]:  # the monitor took it out of the loss
                assert not mask.any() and batch["advantages"][row].abs().sum() == 0
                masked_rows += 1
                continue
            assert torch.tensor(ids)[mask].tolist() == said_ids
            text = tokenizer.decode(torch.tensor(ids)[~mask])
            assert "tool_response" in text and "<tool_call>" not in text
        assert 0 < masked_rows < len(episodes)
        loss_mask = batch["completion_mask"] * batch["tool_mask"]
        assert batch["num_items_in_batch"] == loss_mask.sum()


def test_advantages_are_those_of_rewards_without_what_was_dropped(run) -> None:
    folder, recorded = run
    for number, (episodes, batch) in enumerate(zip(episodes_of(folder), recorded.batches, strict=True), 1):
        lines = read_jsonl(folder.rollouts / f"step-{number:06d}.jsonl")
        rewards = [line["reward"] for line in lines]
        by_first_call = {"write_file": 1.0, "fly_away": 0.0 - 2 * COST, "bash": None}
        assert rewards == [by_first_call[e.turns[0].observed.calls[0].name] for e in episodes]
        advantages = batch["advantages"].reshape(len(rewards), -1)[:, 0]
        for start in range(0, len(rewards), 4):
            group = rewards[start : start + 4]
            known = [reward for reward in group if reward is not None]
            mean = sum(known) / len(known)
            expected = [0.0 if reward is None else reward - mean for reward in group]
            weights = batch["advantages"][start : start + 4]
            if weights.dim() == 2:  # times the truncated importance weight of each token, which is nearly 1
                mask = (batch["completion_mask"] * batch["tool_mask"])[start : start + 4].bool()
                advantages_of = [
                    w[m].mean().item() if m.any() else 0.0 for w, m in zip(weights, mask, strict=True)
                ]
            else:
                advantages_of = advantages[start : start + 4].tolist()
            assert advantages_of == pytest.approx(expected, abs=1e-3)


def test_log_probabilities_are_those_of_an_independent_forward_pass(run) -> None:
    folder, recorded = run
    assert [row["checks/token_drift"] for row in read_jsonl(folder.metrics)] == pytest.approx(
        [0, 0], abs=1e-4
    )
    for batch in recorded.batches:
        sampled = batch["sampling_per_token_logps"]
        mask = (batch["completion_mask"] * batch["tool_mask"]).bool()
        assert (sampled[mask] < 0).all()


def test_what_happened_is_in_the_log(run) -> None:
    folder, _ = run
    for episodes, row in zip(episodes_of(folder), read_jsonl(folder.metrics), strict=True):
        num = len(episodes)
        ended = [episode.stop_reason for episode in episodes]
        names = [episode.turns[0].observed.calls[0].name for episode in episodes]
        assert row["rollouts/stopped_submitted"] == ended.count(StopReason.SUBMITTED) / num
        assert (
            row["rollouts/stopped_finished"]
            == ended.count(StopReason.FINISHED) / num
            == names.count("fly_away") / num
        )
        assert row["rollouts/turns"] == pytest.approx(sum(len(e.turns) for e in episodes) / num)
        assert row["rollouts/invalid_calls"] == 2 * names.count("fly_away")
        assert row["rollouts/monitor_masked"] == row["rollouts/dropped"] == names.count("bash")
        assert row["rollouts/infrastructure_failures"] == 0
    findings = [
        line for path in sorted(folder.rollouts.glob("findings-*.jsonl")) for line in read_jsonl(path)
    ]
    assert findings and all(line["masks_reward"] and "bytecode-read" in line["counts"] for line in findings)
    assert {(f["turn_idx"], f["call_idx"]) for line in findings for f in line["findings"]} == {(0, 0)}


def test_every_stored_episode_is_worth_the_same_when_it_is_graded_again(run, store: TaskStore) -> None:
    folder, _ = run
    episodes = [episode for step in episodes_of(folder) for episode in step]
    grader = Grader(TaskStore.open(store.root))
    try:
        for episode in episodes:
            with FeatureDeletionEnv(
                grader, reward=RewardOptions(breaks="ignore", invalid_call_cost=COST)
            ) as again:
                again.reset(episode.task_id)
                for turn in episode.turns:
                    for call, result in zip(turn.observed.calls, turn.observed.results, strict=True):
                        assert is_refusal(result) or again.call(call).text == result.text
                assert again.reward() == episode.reward
    finally:
        grader.close()
    assert len(episodes) == 16 and len({episode.reward for episode in episodes}) > 1


def test_the_recipe_builds() -> None:
    assert load_config(RECIPE).agent is not None
