"""A run with the further channels whose rollouts depend on nothing but the prompt, so that any split of it has the same."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "trainer"))

import torch
from tiny_trainer import build_trainer

from composer_replication.config import ReplaySection
from composer_replication.records import HintedTurn, PreferencePair, Rollout

NUM_ROWS = 8
"""Two groups of four a step."""
PAIRS = tuple(
    PreferencePair((5 + n, 6), tuple(range(40, 41 + n)), (60, 61), weight=1.0 + n) for n in range(3)
)


class HintFailedRows:
    def hinted_turns(self, rollouts: Sequence[Rollout]) -> list[list[HintedTurn]]:
        return [
            [HintedTurn(t.prompt_ids, (90, 91, *t.prompt_ids), t.completion.token_ids) for t in rollout.turns]
            if rollout.reward == 0.0
            else []
            for rollout in rollouts
        ]


CHANNELS: dict[str, dict[str, Any]] = {
    "off": {},
    "hints": {"alpha_sdpo": 40.0, "hint_source": HintFailedRows()},
    "replay": {
        "beta_replay": 1.0,
        "replay_pairs": PAIRS,
        "replay": ReplaySection(sibling_pairs=True, pairs_per_step=3),
    },
}


def roll_out(prompts: Sequence[str], trainer: Any) -> dict[str, Any]:
    """The n-th row of a prompt is the same wherever it is sampled."""
    seen: Counter[str] = Counter()
    prompt_ids, completion_ids = [], []
    for prompt in prompts:
        number, start = seen[prompt], len(prompt)
        seen[prompt] += 1
        prompt_ids.append(trainer._tokenizer(prompt)["input_ids"])
        completion_ids.append([20 + (37 * number + 11 * place + start) % 200 for place in range(2 + number)])
    return {"prompt_ids": prompt_ids, "completion_ids": completion_ids, "logprobs": None}


def every_second_passes(completion_ids: Sequence[Sequence[int]], **kwargs: Any) -> list[float]:
    return [float(len(ids) % 2) for ids in completion_ids]


def trained(folder: Path, channel: str, *, num_processes: int) -> Any:
    """Two steps of two micro-batches, by plain gradient descent: Adam would hide a factor."""
    trainer = build_trainer(
        output_dir=folder,
        max_steps=2,
        num_prompts=8,
        per_device_train_batch_size=NUM_ROWS // 2 // num_processes,
        gradient_accumulation_steps=2,
        optim="sgd",
        learning_rate=0.05,
        max_grad_norm=0.0,
        rollout_func=roll_out,
        reward=every_second_passes,
        **CHANNELS[channel],
    )
    trainer.train()
    return trainer


def weights_of(trainer: Any) -> dict[str, torch.Tensor]:
    return {name: weight.detach().clone() for name, weight in trainer.model.named_parameters()}


def norm(weights: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> float:
    """Of the difference."""
    return float(torch.cat([(weights[name] - others[name]).flatten() for name in weights]).norm())
