"""Parts of the trainer with plain tensors and a ``Generation``: no model is loaded and no trainer is built."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from composer_replication.config import HintsSection, ReplaySection
from composer_replication.records import HintedTurn, PreferencePair, Rollout
from composer_replication.trainer.checks import ChecksThatSpeak
from composer_replication.trainer.composer_trainer import ComposerReplicationTrainer
from composer_replication.trainer.generation import Generation
from composer_replication.trainer.loss_channels import (
    HINTED_TURNS,
    SIBLING_PAIRS,
    HintChannel,
    LossChannels,
    ReplayChannel,
)
from composer_replication.trainer.metrics_log import StepLines
from composer_replication.trainer.policy_terms import PolicyTerms
from composer_replication.trainer.preset_settings import EFFORT_COLUMN, PolicyOptions
from composer_replication.trainer.processes import InterruptOnce

END, PAD = 1, 0


def host(**more: Any) -> Any:
    """What parts read of TRL's trainer, as values."""
    model = SimpleNamespace(config=SimpleNamespace(get_text_config=lambda: SimpleNamespace(vocab_size=99)))
    accelerator = SimpleNamespace(device="cpu", gather=lambda x: x, process_index=0, unwrap_model=lambda x: x)
    accelerator.reduce = lambda x, reduction: x
    arguments = {"max_completion_length": 3, "num_generations": 2, "mask_truncated_completions": False}
    return SimpleNamespace(
        args=SimpleNamespace(**arguments, steps_per_generation=2, vllm_importance_sampling_clip_max=None),
        state=SimpleNamespace(global_step=4),
        model=model,
        accelerator=accelerator,
        num_generations=2,
        reward_weights=torch.tensor([1.0]),
        eos_token_ids=[END],
        _tokenizer=SimpleNamespace(pad_token_id=PAD, decode=lambda ids, **_: str(ids)),
        _metrics={"train": defaultdict(list)},
        has_sharded_weights=False,
        current_gradient_accumulation_steps=1,
        **more,
    )


def generation() -> Generation:
    """Two groups of two; of the first both rewards are equal and both answers cut off, in the second row 2 passes."""
    batch = {
        "prompt_ids": torch.tensor([[5, 6]] * 2 + [[PAD, 7]] * 2),
        "prompt_mask": torch.tensor([[1, 1]] * 2 + [[0, 1]] * 2),
        "completion_ids": torch.tensor([[8, 8, 8], [9, 9, 9], [8, END, PAD], [9, END, PAD]]),
        "completion_mask": torch.tensor([[1, 1, 1], [1, 1, 1], [1, 1, 0], [1, 1, 0]]),
        "advantages": torch.tensor([0.0, 0.0, 0.5, -0.5]),
    }
    found = Generation(
        [{"task_id": name} for name in "aabb"], rewards_NF=torch.tensor([[0.0], [0.0], [1.0], [0.0]])
    )
    found.take(batch, torch.tensor([1.0]))
    found.is_dull_G = [True, False]
    return found


def test_a_generation_knows_the_weighted_reward_of_each_row() -> None:
    found = Generation([{}] * 2, rewards_NF=torch.tensor([[1.0, 0.5], [torch.nan, torch.nan]]))
    found.take({"completion_ids": torch.zeros(2, 1)}, torch.tensor([1.0, 2.0]))
    assert found.own_rewards() == [2.0, None]


def test_the_checks_count_groups() -> None:
    trainer = host()
    checks = ChecksThatSpeak(trainer, StepLines(trainer, InterruptOnce(), is_halted=lambda: False))
    found = generation()
    found.importance.append({"truncated_share": 0.25, "sampling_effective_share": 0.75})
    checks.after_generation(found)
    assert checks.state_dict()["generations"] == [
        [2.0, 1.0, 1.0]
    ]  # groups, those without signal, those cut off
    assert checks._figures == [{"truncated_share": 0.25, "sampling_effective_share": 0.75}]
    assert checks.extra_loss(None, {}) is None
    other = ChecksThatSpeak(trainer, checks._lines)
    other.load_state_dict(checks.state_dict())
    assert other.state_dict() == checks.state_dict()


def test_replay_pairs_a_passing_row_with_a_failing_one() -> None:
    channel = ReplayChannel(host(), ReplaySection(sibling_pairs=True, kind="simpo"), None)
    found = generation()
    channel.after_generation(found)
    of_row = found.batch[SIBLING_PAIRS]
    assert [len(pairs) for pairs in of_row] == [0, 0, 1, 0]
    (pair,) = of_row[2]
    assert (pair.prompt_ids, pair.chosen_ids, pair.rejected_ids) == ((7,), (8, END), (9, END))
    assert found.batch["sibling_total"] == 1.0
    assert channel.extra_loss(None, {}) == 0.0  # a micro-batch without pairs


class OneHint:
    """A hint, the id 50, before the first turn of each rollout that failed."""

    counts: dict[str, int]

    def hinted_turns(self, rollouts: list[Rollout]) -> list[list[HintedTurn]]:
        failed = [rollout.reward == 0.0 for rollout in rollouts]
        self.counts = {"hints": sum(failed)}
        turns = [rollout.turns[0] for rollout in rollouts]
        ids = [(turn.prompt_ids, (50, *turn.prompt_ids), turn.completion.token_ids) for turn in turns]
        return [[HintedTurn(*each)] if is_failed else [] for each, is_failed in zip(ids, failed, strict=True)]


def test_hints_travel_with_their_rows() -> None:
    trainer = host()
    channel = HintChannel(trainer, HintsSection(), OneHint())
    found = generation()
    channel.after_generation(found)
    turns = found.batch[HINTED_TURNS]
    assert [len(each) for each in turns] == [1, 1, 0, 1]
    assert (turns[3][0].prompt_ids, turns[3][0].hinted_prompt_ids) == ((7,), (50, 7))
    assert turns[3][0].completion_ids == (9, END)
    assert found.batch["hint_num_tokens"] == 3 + 3 + 2
    assert trainer._metrics["train"]["hint_source/hints"] == [3.0]


def test_the_price_of_effort_is_taken_off_the_advantages() -> None:
    """A turn is 20 units, and with k = 1 / 1000 and q = 2 the cost of x is x / (1 + x / 1000)."""
    trainer = host(policy_options=PolicyOptions(effort_weight=1.0), prompt_source=None, beta=0.0)
    trainer.rollout_func, trainer.use_vllm, trainer.loss_type = None, False, "grpo"
    terms, made = PolicyTerms(trainer), generation()
    made.sampled_ids = [[8]] * 4
    made.rows = [{EFFORT_COLUMN: {"turn": turns}} for turns in (1, 3, 1, 1)]
    before = made.batch["advantages"].clone()
    found = terms.apply(lambda inputs: made, made.rows)
    assert found is made
    costs = [20.0 / 1.02, 60.0 / 1.06]
    mean = sum(costs) / 2
    expected = [mean - costs[0], mean - costs[1], *before[2:].tolist()]
    assert made.batch["advantages"].tolist() == pytest.approx(expected)
    assert made.is_dull_G == [True, False]  # nothing was earned in the first, so its price teaches nothing


def test_the_order_of_parts_stands_in_one_place() -> None:
    trainer = ComposerReplicationTrainer.__new__(ComposerReplicationTrainer)
    assert trainer.parts == ()
    hints = HintChannel(host(), HintsSection(), OneHint())
    pairs = [PreferencePair((5,), (8, END), (9, END))]
    replay = ReplayChannel(host(), ReplaySection(), pairs)
    trainer.checks = ChecksThatSpeak(trainer, trainer.step_lines)
    trainer.channels = LossChannels(host(), hints, replay)
    assert trainer.parts == (trainer.checks, hints, replay)
