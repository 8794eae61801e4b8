"""Terms in the reward and weights of tokens in real steps: effort by hand, KL to the reference, and what stays TRL's."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_trainer import shifted_rollouts
from trl.rewards import get_soft_overlong_punishment

from composer_replication.config import ReplaySection
from composer_replication.errors import InputError, UsageError
from composer_replication.run_folder import RunFolder, read_jsonl
from composer_replication.safety import HeldOutGuard
from composer_replication.trainer.guard import KlPath
from composer_replication.trainer.policy_terms import PUNISHMENT, without_lone_punishments
from composer_replication.trainer.preset_settings import EFFORT_COLUMN, PolicyOptions, effort_units
from composer_replication.trainer.rollout_columns import CheckedRollouts

MakeTrainer = Callable[..., Any]
UNSCALED = {"loss_type": "dr_grpo", "scale_rewards": "none"}
ANSWERS = [[70, 80, 90], [71, 81], [72, 82, 92, 102, 112], [73]]


def roll_out_with(column: list[dict[str, float]] | None, env_mask: list[list[int]] | None = None) -> Any:
    def roll_out(prompts: list[str], trainer: Any) -> dict[str, Any]:
        ids = [list(trainer.processing_class(text=prompt)["input_ids"]) for prompt in prompts]
        output: dict[str, Any] = {
            "prompt_ids": ids,
            "completion_ids": [list(a) for a in ANSWERS],
            "logprobs": None,
        }
        if column is not None:
            output[EFFORT_COLUMN] = column
        if env_mask is not None:
            output["env_mask"] = [list(row) for row in env_mask]
        return output

    return roll_out


def advantages_of(trainer: Any) -> list[float]:
    """Of the only step, in the order of the answers; TRL shuffles rows."""
    seen: list[Any] = []
    compute = trainer._compute_loss
    trainer._compute_loss = lambda model, inputs: seen.append(inputs) or compute(model, inputs)
    trainer.train()
    (inputs,) = seen
    firsts = inputs["completion_ids"][:, 0].tolist()
    return [inputs["advantages"][firsts.index(answer[0])].item() for answer in ANSWERS]


def equal(completions: list[str], **kwargs: Any) -> list[float]:
    return [1.0] * len(completions)


def price(units: float) -> float:
    """C(x) with k = 1 / 1000 and q = 2."""
    return units / (1 + units / 1000)


def test_effort_is_compared_within_the_group_by_hand(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    """One turn of 20 units for each, and the answers' lengths."""
    trainer = make_trainer(
        max_steps=1,
        reward=equal,
        rollout_func=roll_out_with(None),
        policy_options=PolicyOptions(effort_weight=0.1),
        run_folder=RunFolder(tmp_path / "run"),
        **UNSCALED,
    )
    costs = [0.1 * price(20 + length) for length in (3, 2, 5, 1)]
    mean = sum(costs) / 4
    assert advantages_of(trainer) == pytest.approx([mean - cost for cost in costs], abs=1e-6)
    (line,) = read_jsonl(trainer.run_folder.metrics)
    assert line["effort/cost"] == pytest.approx(mean, rel=1e-5)
    assert line["reward"] == 1.0  # what the guard judges is without it


def test_counts_of_a_rollout_function_win_over_lengths(make_trainer: MakeTrainer) -> None:
    """x = 5 tool calls of weight 20 each and 10 thinking tokens, against nothing."""
    column = [{"tool_call": 5, "thinking_token": 10}, {"turn": 0}, {"turn": 0}, {"turn": 0}]
    trainer = make_trainer(
        max_steps=1,
        reward=equal,
        rollout_func=roll_out_with(column),
        policy_options=PolicyOptions(effort_weight=0.01),
        **UNSCALED,
    )
    cost = 0.01 * price(110)
    share = cost / 4
    assert advantages_of(trainer) == pytest.approx([share - cost, share, share, share], abs=1e-5)


@pytest.mark.parametrize("masks_truncated", [False, True])
def test_tool_output_costs_its_own_weight(make_trainer: MakeTrainer, masks_truncated: bool) -> None:
    """No answer here ends with the end token, so with ``mask_truncated_completions`` the mask of each is emptied."""
    mask = [[1, 0, 0], [1, 1], [1, 1, 1, 1, 1], [1]]
    trainer = make_trainer(
        max_steps=1,
        reward=equal,
        rollout_func=roll_out_with(None, mask),
        policy_options=PolicyOptions(effort_weight=1.0),
        mask_truncated_completions=masks_truncated,
        **UNSCALED,
    )
    costs = [price(units) for units in (1 + 0.2 + 20, 2 + 20, 5 + 20, 1 + 20)]
    mean = sum(costs) / 4
    assert advantages_of(trainer) == pytest.approx([mean - cost for cost in costs], abs=1e-4)


@pytest.mark.parametrize(
    ("weight", "column", "reward", "num_dull"),
    [(0.0, None, 1.0, 1.0), (0.1, None, 1.0, 0.0), (0.1, [{"turn": 1}] * 4, 1.0, 1.0), (0.1, None, 0.0, 1.0)],
    ids=["no effort", "effort differs", "equal effort", "nothing was earned"],
)
def test_a_group_that_earned_alike_with_other_efforts_has_a_signal(
    make_trainer: MakeTrainer,
    tmp_path: Path,
    weight: float,
    column: list[dict[str, float]] | None,
    reward: float,
    num_dull: float,
) -> None:
    trainer = make_trainer(
        max_steps=1,
        reward=lambda completions, **kwargs: [reward] * len(completions),
        rollout_func=roll_out_with(column),
        policy_options=PolicyOptions(effort_weight=weight, dynamic_sampling_rounds=1),
        run_folder=RunFolder(tmp_path / "run"),
        **UNSCALED,
    )
    counted: list[float] = []
    trainer.checks.after_generation = lambda generation: counted.append(sum(generation.is_dull_G))
    trainer.train()
    (line,) = read_jsonl(trainer.run_folder.metrics)
    assert line["dynamic_sampling/rounds"] == num_dull
    assert counted == [num_dull]


@pytest.mark.parametrize("counts", [{"thoughts": 3}, {"turn": -1}, {"turn": float("nan")}])
def test_counts_that_are_none(counts: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="CR0777"):
        effort_units(counts)


def test_rows_that_nobody_scored_keep_advantage_zero(make_trainer: MakeTrainer) -> None:
    def reward(completions: list[str], **kwargs: Any) -> list[float | None]:
        return [1.0, None, 1.0, 1.0]

    trainer = make_trainer(
        max_steps=1,
        reward=reward,
        rollout_func=roll_out_with(None),
        policy_options=PolicyOptions(effort_weight=1.0),
        **UNSCALED,
    )
    costs = {row: price(units) for row, units in {0: 23.0, 2: 25.0, 3: 21.0}.items()}
    mean = sum(costs.values()) / 3
    expected = [mean - costs[row] if row in costs else 0.0 for row in range(4)]
    assert advantages_of(trainer) == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("rewards", [[None, 1.0, 1.0, 0.0], [None, 1.0, 1.0, 1.0]], ids=["mixed", "equal"])
def test_the_overlong_punishment_scores_no_row_that_nobody_scored(
    make_trainer: MakeTrainer, rewards: list[float | None]
) -> None:
    """Advantages, logged reward and dull groups are those of the reward alone, and the channels get no reward of the row."""
    found = []
    for punishments in ([], [get_soft_overlong_punishment(20, 4)]):
        trainer = make_trainer(
            reward=[lambda completions, **columns: rewards, *punishments],
            rollout_func=roll_out_with(None),
            beta_replay=1.0,
            replay=ReplaySection(sibling_pairs=True),
            **UNSCALED,
        )
        trainer.model.train()
        terms, dull = trainer.policy_terms, []
        terms._dull_groups = lambda known, judge=terms._dull_groups, dull=dull: (
            dull.append(judge(known)) or dull[-1]
        )
        output = trainer._generate_and_score_completions(next(iter(trainer.get_train_dataloader())))
        assert output["row_reward"].isnan().tolist() == [True, False, False, False]
        assert trainer._metrics["train"]["reward"] == pytest.approx([sum(filter(None, rewards)) / 3])
        found.append((output["advantages"].tolist(), dull))
    assert found[0] == found[1]
    assert found[0][0][0] == 0.0
    assert found[0][1] == [[rewards[3] == 1.0]]


def test_the_punishment_alone_scores_and_has_the_name_that_is_looked_for() -> None:
    assert get_soft_overlong_punishment(20, 4).__name__ == PUNISHMENT
    rewards = torch.tensor([[torch.nan, -0.5], [1.0, -0.5]])
    assert without_lone_punishments(rewards[:, 1:], [PUNISHMENT]).tolist() == [[-0.5], [-0.5]]
    assert without_lone_punishments(rewards, ["tests", PUNISHMENT]).isnan().tolist() == [
        [True] * 2,
        [False] * 2,
    ]
    assert without_lone_punishments(rewards, ["a", "b"]) is rewards


def test_the_guard_reads_the_kl_that_is_in_the_reward(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    trainer = make_trainer(
        max_steps=4,
        lora_adapter=True,
        learning_rate=3e-2,
        beta=0.1,
        policy_options=PolicyOptions(kl_in_reward=True),
        heldout_guard=HeldOutGuard(min_steps=1000, ema_alpha=0.0),
        heldout_eval_fn=lambda: 0.5,
        run_folder=RunFolder(tmp_path / "run"),
        **UNSCALED,
    )
    trainer.train()
    assert trainer.guard_hook.kl_path is KlPath.LOGGED
    assert trainer.guard_hook.kl_path_off_reason is None
    kls = [line["kl"] for line in read_jsonl(trainer.run_folder.metrics)]
    assert kls[0] == pytest.approx(0.0, abs=1e-6)  # the adapter is zero before the first step
    assert abs(kls[3]) > 1e-4
    verdicts = read_jsonl(trainer.run_folder.verdicts)
    assert verdicts[3]["kl_ema"] == pytest.approx(kls[3])


def test_each_token_is_weighed_by_its_cut_ratio(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    """All ratios of a run are equal here, so the gradient is that of plain training times the weight."""

    def line_of(name: str, shift: float, clip: float) -> dict[str, Any]:
        trainer = make_trainer(
            max_steps=1,
            reward=lambda completions, **kwargs: [float(number % 4) for number in range(len(completions))],
            rollout_func=shifted_rollouts(-shift),
            policy_options=PolicyOptions(importance_clip=clip),
            run_folder=RunFolder(tmp_path / name),
            output_dir=tmp_path / name / "checkpoints",
            **UNSCALED,
        )
        trainer.train()
        (line,) = read_jsonl(trainer.run_folder.metrics)
        return line

    plain = line_of("plain", math.log(5), 0.0)
    assert "sampling/truncated_share" not in plain
    assert plain["grad_norm"] > 1e-3
    for shift, weight in ((math.log(1.5), 1.5), (math.log(5), 2.0), (-math.log(4), 0.25)):
        line = line_of(str(weight), shift, 2.0)
        assert line["sampling/truncated_share"] == (1.0 if weight == 2.0 else 0.0)
        assert line["sampling/effective_sample_size"] == pytest.approx(1.0)
        assert line["grad_norm"] / plain["grad_norm"] == pytest.approx(weight, rel=1e-4)


def test_an_empty_completion_is_one_sentence(make_trainer: MakeTrainer) -> None:
    honest = shifted_rollouts(0.0)

    def empty(prompts: list[str], trainer: Any) -> dict[str, Any]:
        output = honest(prompts, trainer)
        output["completion_ids"][2], output["logprobs"][2] = [], []
        return output

    with pytest.raises(InputError, match=r"CR0777.*1 of 4 completions are empty, the first is number 2"):
        make_trainer(max_steps=1, rollout_func=empty).train()
    output = CheckedRollouts(lambda prompts, trainer: {"completion_ids": [[1], [2]]})([], None)
    assert output == {"completion_ids": [[1], [2]]}
