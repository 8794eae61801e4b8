"""Hint distillation: value and gradient against the whole vocabulary in float64, and where turns come from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from full_vocabulary import assert_same_gradients, expected_hint_loss, gradients, plain_copy
from peft.tuners.tuners_utils import BaseTunerLayer
from tiny_trainer import HintEveryTurn
from trl.trainer.utils import shuffle_sequence_dict, split_tensor_dict

from composer_replication.config import HintsSection
from composer_replication.records import HintedTurn, Rollout, StopReason
from composer_replication.run_folder import RunFolder, read_jsonl
from composer_replication.trainer import loss_channels
from composer_replication.trainer.loss_channels import HINTED_TURNS
from composer_replication.trainer.preset_settings import PolicyOptions

TURNS = (
    HintedTurn((5, 6, 7), (5, 6, 90, 91, 7), (40, 41, 42), sampled_logp=(-5.5, -5.25, -6.0)),
    HintedTurn((8,), (88, 8), (50, 51, 52, 53), weight=0.5),
    HintedTurn((9, 10, 11, 12), (9, 99, 10, 11, 12), (60,), sampled_logp=(-7.0,)),
)


@pytest.fixture
def ready(moved_trainer: Callable[..., Any]) -> Callable[..., Any]:
    return lambda **settings: moved_trainer(alpha_sdpo=1.0, hint_source=HintEveryTurn(), **settings)


def batch_of(turns: Sequence[HintedTurn]) -> dict[str, Any]:
    batch = {"prompt_ids": torch.arange(len(turns)), HINTED_TURNS: [[turn] for turn in turns]}
    return {**batch, "hint_num_tokens": torch.tensor(float(sum(len(t.completion_ids) for t in turns)))}


@pytest.mark.parametrize(
    ("jsd_alpha", "top_k"), [(0.5, 20), (0.0, 1), (1.0, 258)], ids=["jsd", "forward", "reverse-all-words"]
)
def test_value_and_gradient_equal_the_whole_vocabulary_in_float64(
    ready: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, jsd_alpha: float, top_k: int
) -> None:
    monkeypatch.setattr(loss_channels, "TOP_K", top_k)
    settings = HintsSection(teacher="frozen", jsd_alpha=jsd_alpha)
    trainer = ready(hints=settings)
    loss = trainer._compute_sdpo_loss(trainer.model, batch_of(TURNS))
    loss.backward()
    found = gradients(trainer.model)
    trainer.model.zero_grad()
    expected = expected_hint_loss(trainer.model, trainer.of_start, TURNS, settings)
    expected.backward()
    assert expected.item() > 1e-4
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert_same_gradients(found, gradients(trainer.model), tolerance=1e-5)


def test_teacher_and_student_swap_back_and_the_teacher_gets_no_gradient(ready: Callable[..., Any]) -> None:
    trainer = ready(hints=HintsSection(teacher="frozen"))
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    kept = {name: weight.clone() for name, weight in trainer.channels.hints.weights.tensors().items()}
    trainer._compute_sdpo_loss(trainer.model, batch_of(TURNS)).backward()
    assert all(torch.equal(before[name], p) for name, p in trainer.model.named_parameters())
    assert all(
        torch.equal(kept[name], weight) for name, weight in trainer.channels.hints.weights.tensors().items()
    )
    assert trainer.model.training
    assert any(not torch.equal(before[name], kept[name]) for name in kept)


def test_one_batch_of_eight_equals_eight_of_one(ready: Callable[..., Any]) -> None:
    """Shuffled and split as TRL does it."""
    turns = [replace(TURNS[n % 3], prompt_ids=(20 + n, *TURNS[n % 3].prompt_ids)) for n in range(8)]
    settings = HintsSection(teacher="frozen")
    results = []
    for micro_steps in (1, 8):
        trainer = ready(hints=settings, micro_steps=micro_steps)
        torch.manual_seed(5)
        parts = split_tensor_dict(shuffle_sequence_dict(batch_of(turns)), micro_steps)
        losses = [trainer._compute_sdpo_loss(trainer.model, part) for part in parts]
        sum(losses).backward()
        results.append((sum(loss.item() for loss in losses), gradients(trainer.model)))
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-6)
    assert_same_gradients(results[0][1], results[1][1], tolerance=1e-6)


@pytest.mark.parametrize("teacher", ["ema", "lora-off"])
def test_a_teacher_that_is_the_student_under_an_empty_hint_has_nothing_to_say(
    make_trainer: Callable[..., Any], teacher: str
) -> None:
    trainer = make_trainer(
        alpha_sdpo=1.0, hint_source=HintEveryTurn(), hints=HintsSection(teacher=teacher), lora_adapter=True
    )
    trainer.channels.begin()
    trainer.current_gradient_accumulation_steps = 1
    same = [replace(turn, hinted_prompt_ids=turn.prompt_ids) for turn in TURNS]
    assert trainer._compute_sdpo_loss(trainer.model, batch_of(same)).item() == pytest.approx(0.0, abs=1e-6)
    assert trainer._compute_sdpo_loss(trainer.model, batch_of(TURNS)).item() > 0.0


def test_lora_off_is_the_model_without_its_adapter(ready: Callable[..., Any]) -> None:
    settings = HintsSection(teacher="lora-off")
    trainer = ready(hints=settings, lora_adapter=True)
    without = plain_copy(trainer.model.get_base_model())
    for module in without.modules():
        if isinstance(module, BaseTunerLayer):
            module.enable_adapters(enabled=False)
    loss = trainer._compute_sdpo_loss(trainer.model, batch_of(TURNS))
    expected = expected_hint_loss(trainer.model, without, TURNS, settings)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert loss.item() > 1e-5


def test_the_moving_average_follows_once_a_step(make_trainer: Callable[..., Any]) -> None:
    trainer = make_trainer(
        alpha_sdpo=0.5,
        hint_source=HintEveryTurn(),
        max_steps=2,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
    )
    name = "model.layers.0.mlp.up_proj.weight"
    weights = [trainer.model.get_parameter(name).detach().clone()]
    follow = trainer.channels.on_step_end

    def note_and_follow(*rest: Any, **more: Any) -> None:
        weights.append(trainer.model.get_parameter(name).detach().clone())
        follow(*rest, **more)

    trainer.channels.on_step_end = note_and_follow
    trainer.train()
    first, one, two = weights
    average = 0.95 * first + 0.05 * one
    average = 0.95 * average + 0.05 * two
    assert not torch.equal(one, two)
    torch.testing.assert_close(trainer.channels.hints.weights.tensors()[name], average)


def test_a_source_sees_the_rows_as_they_were_sampled_and_its_turns_are_trained_on(
    make_trainer: Callable[..., Any],
) -> None:
    source = HintEveryTurn(until=0.3)
    trainer = make_trainer(alpha_sdpo=0.5, hint_source=source, num_iterations=2)
    trainer.model.train()
    batch = next(iter(trainer.get_train_dataloader()))
    output = trainer._generate_and_score_completions(batch)
    rewards = list(trainer._logs["rewards"]["share_of_low_bytes"])
    assert [rollout.reward for rollout in source.seen] == pytest.approx(rewards)
    for row, rollout in enumerate(source.seen):
        (turn,) = rollout.turns
        assert turn.prompt_ids == tuple(output["prompt_ids"][row][output["prompt_mask"][row].bool()].tolist())
        ids = output["completion_ids"][row][output["completion_mask"][row].bool()].tolist()
        assert turn.completion.token_ids == tuple(ids)
        assert rollout.task_id == batch[row]["prompt"]
        hinted = output[HINTED_TURNS][row]
        assert bool(hinted) is (rollout.reward is not None and rollout.reward < 0.3)
        if hinted:  # num_iterations 2: TRL has the sampling log-probabilities
            kept = torch.tensor(hinted[0].sampled_logp)
            torch.testing.assert_close(kept, output["old_per_token_logps"][row, : len(ids)])


def test_tool_output_between_turns_is_in_no_turn(make_trainer: Callable[..., Any]) -> None:
    from composer_replication.trainer.collator import rollouts_of
    from composer_replication.trainer.generation import ROW_REWARD, Generation

    trainer = make_trainer()
    batch = {
        "prompt_ids": torch.tensor([[0, 5, 6]]),
        "prompt_mask": torch.tensor([[0, 1, 1]]),
        "completion_ids": torch.tensor([[40, 41, 70, 71, 72, 42, 43, 0]]),
        "completion_mask": torch.tensor([[1, 1, 1, 1, 1, 1, 1, 0]]),
        "tool_mask": torch.tensor([[1, 1, 0, 0, 0, 1, 1, 1]]),
    }
    batch[ROW_REWARD] = torch.tensor([0.5])
    generation = Generation([{"task_id": "t"}], batch=batch)
    (rollout,) = rollouts_of(generation, trainer._tokenizer, eos_token_ids=(41, 43), step=3)
    assert [t.completion.stop_reason for t in rollout.turns] == [StopReason.FINISHED] * 2
    assert [(t.prompt_ids, t.completion.token_ids) for t in rollout.turns] == [
        ((5, 6), (40, 41)),
        ((5, 6, 40, 41, 70, 71, 72), (42, 43)),
    ]
    assert (rollout.task_id, rollout.reward, rollout.step) == ("t", 0.5, 3)


class CountingSource(HintEveryTurn):
    """As the source of a recipe: its counts run on."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counter({"rollouts": 100, "without_hint": 7})

    def hinted_turns(self, rollouts: Sequence[Rollout]) -> list[list[HintedTurn]]:
        self.counts.update({"rollouts": len(rollouts), "without_hint": 1, "left_out/CR0430": 2})
        return super().hinted_turns(rollouts)


def test_why_turns_got_no_hint_is_in_the_log(make_trainer: Callable[..., Any], tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    make_trainer(alpha_sdpo=0.5, hint_source=CountingSource(), run_folder=folder, max_steps=2).train()
    rows = read_jsonl(folder.metrics)
    for row in rows:
        assert (row["hint_source/rollouts"], row["hint_source/without_hint"]) == (4.0, 1.0)
        assert row["hint_source/left_out/CR0430"] == 2.0


def test_fresh_prompts_bring_their_own_rewards_and_hints(make_trainer: Callable[..., Any]) -> None:
    """Dynamic sampling replaces a group whose rewards are equal; the source is asked about what is trained on."""
    answers = iter([[0.0] * 4, [1.0, 0.0, 1.0, 0.0]])
    source = HintEveryTurn(until=0.5)
    trainer = make_trainer(
        alpha_sdpo=0.5,
        hint_source=source,
        policy_options=PolicyOptions(dynamic_sampling_rounds=1),
        reward=lambda completions, **columns: next(answers),
    )
    trainer.policy_terms.check_settings()
    trainer.model.train()
    batch = next(iter(trainer.get_train_dataloader()))
    output = trainer._generate_and_score_completions(batch)
    assert trainer._metrics["train"]["dynamic_sampling/replaced_groups"] == [1.0]
    assert [rollout.reward for rollout in source.seen] == [1.0, 0.0, 1.0, 0.0]
    assert {rollout.task_id for rollout in source.seen} == {batch[0]["prompt"]}
    assert [bool(turns) for turns in output[HINTED_TURNS]] == [False, True, False, True]
    for row in (1, 3):
        (turn,) = output[HINTED_TURNS][row]
        kept = output["completion_ids"][row][output["completion_mask"][row].bool()]
        assert turn.completion_ids == tuple(kept.tolist())
