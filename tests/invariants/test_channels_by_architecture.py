"""A real step of each further channel, family by family: its gradient is that of the plain formula in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from full_vocabulary import (
    assert_same_gradients,
    expected_hint_loss,
    expected_pair_loss,
    gradients,
    plain_copy,
)
from tiny_architectures import HEADS, MODELS, tiny_model
from tiny_trainer import build_trainer
from transformers import TrainerCallback

from composer_replication.config import HintsSection, ReplaySection
from composer_replication.records import HintedTurn, PreferencePair, Rollout

PAIRS = (
    PreferencePair((5, 6, 7, 8, 9, 10, 11), (40, 41, 42), (43,)),
    PreferencePair((8,), (50,), (51, 52, 53, 54), weight=0.5),
)
HINTS = HintsSection(teacher="frozen")
REPLAY = ReplaySection(pairs_per_step=2)
WEIGHTS = {"alpha_sdpo": 2.0, "beta_replay": 0.5}

QUICK = ["gemma2-softcap", "gpt-oss-sinks", "deepseek-v3-latent"]
"""A soft cap and tied embeddings; attention sinks and experts; latent attention and experts."""
NAMES = [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.long]) for name in MODELS | HEADS]


class HintEveryTurn:
    """Hints of growing length inside each prompt, of unequal weight; every second turn with a log-probability of its own."""

    def __init__(self) -> None:
        self.turns: list[HintedTurn] = []

    def hinted_turns(self, rollouts: Sequence[Rollout]) -> list[list[HintedTurn]]:
        for row, rollout in enumerate(rollouts):
            (turn,) = rollout.turns
            ids, prompt = turn.completion.token_ids, turn.prompt_ids
            hinted = (*prompt[:2], *range(90, 91 + row), *prompt[2:])
            logps = (-5.5,) * len(ids) if row % 2 else ()
            self.turns.append(HintedTurn(prompt, hinted, ids, sampled_logp=logps, weight=1.0 / (1 + row)))
        return [[turn] for turn in self.turns]


class Gradients(TrainerCallback):
    """What the optimizer is about to take."""

    def __init__(self) -> None:
        self.seen: dict[str, torch.Tensor] = {}

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seen = gradients(kwargs["model"])


def real_step(model: Any, folder: Path, **settings: Any) -> dict[str, torch.Tensor]:
    """Gradients of one step of ``train``: generation, TRL's loss and the channels that are on, two micro-batches."""
    callback = Gradients()
    trainer = build_trainer(
        output_dir=folder,
        model=model,
        max_steps=1,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_completion_length=3,
        num_prompts=1,
        max_grad_norm=0.0,
        callbacks=[callback],
        **settings,
    )
    trainer.train()
    return callback.seen


def oracle_gradients(
    model: Any, loss_of: Callable[[Any, Any], torch.Tensor], weight: float
) -> dict[str, torch.Tensor]:
    """Of ``weight`` times a loss of (policy, reference), both as the run begins, over the whole vocabulary in float64."""
    policy = plain_copy(model).double()
    if policy._can_set_experts_implementation():
        policy.set_experts_implementation("eager")  # the grouped product has no float64
    (weight * loss_of(policy, plain_copy(policy))).backward()
    return gradients(policy)


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_each_channel_adds_its_own_gradient_and_nothing_when_off(tmp_path: Path, name: str) -> None:
    def step(label: str, **settings: Any) -> dict[str, torch.Tensor]:
        return real_step(tiny_model(name, 258), tmp_path / label, **settings)

    off = step("off")
    source = HintEveryTurn()
    records = {"hints": HINTS, "hint_source": source, "replay": REPLAY, "replay_pairs": PAIRS}
    given = step("given", **records)
    assert off.keys() == given.keys()
    assert all(torch.equal(off[key], given[key]) for key in off)
    losses: dict[str, Callable[[Any, Any], torch.Tensor]] = {
        "alpha_sdpo": lambda policy, teacher: expected_hint_loss(policy, teacher, source.turns, HINTS),
        "beta_replay": lambda policy, reference: expected_pair_loss(policy, reference, PAIRS, REPLAY, 5.0),
    }
    for channel, loss_of in losses.items():
        on = step(channel, **records, **{channel: WEIGHTS[channel]})
        expected = oracle_gradients(tiny_model(name, 258), loss_of, WEIGHTS[channel])
        added = {
            key: (on[key].double() - off[key].double() if key in off else on[key].double()) for key in on
        }
        expected |= {
            key: torch.zeros_like(added[key]) for key in added.keys() - expected.keys()
        }  # experts not asked
        assert_same_gradients(added, expected, tolerance=1e-4)
