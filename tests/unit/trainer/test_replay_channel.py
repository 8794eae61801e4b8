"""Replayed preferences: value and gradient against plain formulas over single rows, the reference, and siblings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from full_vocabulary import assert_same_gradients, expected_pair_loss, gradients
from hypothesis import given
from hypothesis import strategies as st
from trl.trainer.utils import shuffle_sequence_dict, split_tensor_dict

from composer_replication.config import ReplaySection
from composer_replication.records import PreferencePair
from composer_replication.trainer.collator import collate_pairs, sibling_pairs
from composer_replication.trainer.generation import ROW_REWARD, Generation
from composer_replication.trainer.loss_channels import records_of_step

PAIRS = (
    PreferencePair((5, 6, 7), (40, 41, 42), (43,)),
    PreferencePair((8,), (50,), (51, 52, 53, 54), weight=0.5),
    PreferencePair((9, 10), (60, 61), (62, 63), weight=2.0),
    PreferencePair((9, 10), (64,), (62, 63), weight=0.0),
)


@pytest.fixture
def ready(moved_trainer: Callable[..., Any]) -> Callable[..., Any]:
    return lambda **settings: moved_trainer(**{"beta_replay": 1.0, "replay_pairs": PAIRS, **settings})


@pytest.mark.parametrize(
    ("settings", "beta"),
    [(ReplaySection(), 5.0), (ReplaySection(kind="ipo"), 0.1), (ReplaySection(kind="simpo"), 2.0)],
    ids=["dpo", "ipo", "simpo"],
)
def test_value_and_gradient_equal_plain_formulas_in_float64(
    ready: Callable[..., Any], settings: ReplaySection, beta: float
) -> None:
    trainer = ready(replay=settings)
    loss = trainer._compute_trace_replay_loss(trainer.model, {})
    loss.backward()
    found = gradients(trainer.model)
    trainer.model.zero_grad()
    expected = expected_pair_loss(trainer.model, trainer.of_start, PAIRS, settings, beta)
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert_same_gradients(found, gradients(trainer.model), tolerance=1e-5)
    if settings.kind != "simpo":  # the reference matters to it
        other = expected_pair_loss(trainer.model, trainer.model, PAIRS, settings, beta)
        assert loss.item() != pytest.approx(other.item(), rel=1e-3)
    assert trainer._metrics["train"]["replay/pairs"] == [3.0]


def with_siblings(trainer: Any) -> dict[str, Any]:
    """Two groups of four rows; in each, rows 0 and 2 pass."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(20, 90, (8, 5), generator=generator)
    mask = (torch.arange(5) < torch.tensor([5, 3, 4, 1, 2, 5, 5, 3])[:, None]).long()
    batch = {
        "prompt_ids": torch.tensor([[5, 6, 7]] * 4 + [[0, 8, 9]] * 4),
        "prompt_mask": torch.tensor([[1, 1, 1]] * 4 + [[0, 1, 1]] * 4),
        "completion_ids": ids * mask,
        "completion_mask": mask,
        "tool_mask": torch.tensor([[1, 1, 0, 1, 1]] * 8),
    }
    batch[ROW_REWARD] = torch.tensor([1.0, 0.0, 1.0, 0.0] * 2)
    trainer.channels.replay.after_generation(Generation(batch=batch))
    return batch


def test_one_batch_of_eight_equals_eight_of_one(ready: Callable[..., Any]) -> None:
    """Over given pairs and siblings of the step's own groups, shuffled and split as TRL does it."""
    pairs = [replace(PAIRS[n % 3], prompt_ids=(20 + n, *PAIRS[n % 3].prompt_ids)) for n in range(9)]
    settings = ReplaySection(sibling_pairs=True, pairs_per_step=8)
    results = []
    for micro_steps in (1, 8):
        trainer = ready(replay=settings, replay_pairs=pairs, micro_steps=micro_steps)
        torch.manual_seed(5)
        parts = split_tensor_dict(shuffle_sequence_dict(with_siblings(trainer)), micro_steps)
        losses = [trainer._compute_trace_replay_loss(trainer.model, part) for part in parts]
        sum(losses).backward()
        results.append((sum(loss.item() for loss in losses), gradients(trainer.model)))
        assert sum(trainer._metrics["train"]["replay/pairs"]) == 8 + 4
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-6)
    assert_same_gradients(results[0][1], results[1][1], tolerance=1e-6)


def test_siblings_equal_the_same_pairs_given_by_hand(ready: Callable[..., Any]) -> None:
    """Without tool output in them, a group's pairs are ordinary pairs, and the reference is the run's start."""
    settings = ReplaySection(sibling_pairs=True)
    trainer = ready(replay=settings, replay_pairs=None)
    batch = with_siblings(trainer)
    batch["tool_mask"] = torch.ones_like(batch["tool_mask"])
    batch[ROW_REWARD] = torch.tensor([1.0, 0.0, 1.0, 0.0] * 2)
    trainer.channels.replay.after_generation(Generation(batch=batch))
    loss = trainer._compute_trace_replay_loss(trainer.model, batch)
    rows = [
        row[kept.bool()].tolist()
        for row, kept in zip(batch["completion_ids"], batch["completion_mask"], strict=True)
    ]
    prompts = [(5, 6, 7)] * 4 + [(8, 9)] * 4
    pairs = [PreferencePair(prompts[c], tuple(rows[c]), tuple(rows[c + 1])) for c in (0, 2, 4, 6)]
    expected = expected_pair_loss(trainer.model, trainer.of_start, pairs, settings, 5.0)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)


def test_siblings_are_paired_inside_their_group_and_tool_output_carries_no_loss() -> None:
    batch = {
        "prompt_ids": torch.tensor([[5], [5], [6], [5], [6]]),
        "prompt_mask": torch.ones(5, 1, dtype=torch.long),
        "completion_ids": torch.tensor([[40, 41], [42, 43], [44, 45], [46, 47], [48, 49]]),
        "completion_mask": torch.ones(5, 2, dtype=torch.long),
        "tool_mask": torch.tensor([[1, 0], [1, 1], [1, 1], [1, 1], [0, 1]]),
    }
    found = sibling_pairs(batch, [1.0, 0.0, 0.5, 0.0, None])
    assert list(map(len, found)) == [1, 0, 0, 0, 0]  # row 3 has no passing sibling left
    assert (found[0][0].chosen_ids, found[0][0].rejected_ids) == ((40, 41), (42, 43))
    rows = collate_pairs(found[0], pad_id=0)
    assert rows.ids_NS.tolist() == [[5, 40, 41], [5, 42, 43]]
    assert rows.loss_mask_NS.tolist() == [[0, 1, 0], [0, 1, 1]]
    same = {**batch, "completion_ids": torch.tensor([[40, 41]] * 5)}
    none = sibling_pairs(same, [1.0, 0.0, 0.5, 0.0, None])
    assert not any(none)  # chosen equal to rejected


@given(num_records=st.integers(1, 9), per_step=st.integers(1, 12), seed=st.integers(0, 3))
def test_every_epoch_draws_each_record_once(num_records: int, per_step: int, seed: int) -> None:
    def drawn(step: int) -> list[int]:
        return records_of_step(step, num_records, per_step=per_step, seed=seed)

    whole = [idx for step in range(2 * num_records) for idx in drawn(step)]
    for epoch in range(len(whole) // num_records):
        assert sorted(whole[epoch * num_records : (epoch + 1) * num_records]) == list(range(num_records))
    for step in reversed(range(2 * num_records)):  # in any order of asking
        assert drawn(step) == whole[step * per_step : (step + 1) * per_step]
