"""Truncated importance sampling by token: hand numbers, and a real step with another sampler's probabilities."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from composer_replication.errors import InputError
from composer_replication.losses.policy_terms import effective_share
from composer_replication.run_folder import RunFolder, read_jsonl
from composer_replication.trainer.preset_settings import PolicyOptions
from composer_replication.trainer.rollout_columns import CheckedRollouts


@given(st.lists(st.floats(0.01, 100.0), min_size=1, max_size=30), st.floats(0.1, 10.0))
def test_the_effective_share_lies_between_one_weight_and_all(weights: list[float], scale: float) -> None:
    share = effective_share(torch.tensor(weights)).item()
    assert 1 / len(weights) - 1e-6 <= share <= 1 + 1e-6
    assert effective_share(torch.tensor(weights) * scale).item() == pytest.approx(share, rel=1e-4)


def other_sampler(shift: float) -> Callable[[Any, Any], dict[str, Any]]:
    """A rollout function whose engine thought each token ``shift`` nats less likely than the trainer does."""

    def roll_out(prompts: list[str], trainer: Any) -> dict[str, Any]:
        prompt_ids = [list(trainer.processing_class(text=prompt)["input_ids"]) for prompt in prompts]
        answers = [
            [(3 + 7 * row + 5 * t) % 250 + 3 for t in range(3 + row % 3)] for row in range(len(prompts))
        ]
        logprobs = []
        with torch.no_grad():
            for prompt, answer in zip(prompt_ids, answers, strict=True):
                logits = trainer.model(torch.tensor([[*prompt, *answer]])).logits[0].double()
                table = logits.log_softmax(-1)
                places = range(len(prompt) - 1, len(prompt) + len(answer) - 1)
                logprobs.append([table[p, i].item() - shift for p, i in zip(places, answer, strict=True)])
        return {"prompt_ids": prompt_ids, "completion_ids": answers, "logprobs": logprobs}

    return roll_out


@pytest.mark.parametrize(
    ("shift", "weight"), [(math.log(1.5), 1.5), (math.log(5), 2.0), (-math.log(4), 0.25)]
)
def test_each_token_is_weighed_by_its_cut_ratio(
    make_trainer: Callable[..., Any], tmp_path: Path, shift: float, weight: float
) -> None:
    """All ratios are equal here, so the gradient is that of plain training times the weight."""
    norms = {}
    for name, clip in (("corrected", 2.0), ("plain", 0.0)):
        trainer = make_trainer(
            max_steps=1,
            loss_type="dr_grpo",
            scale_rewards="none",
            reward=lambda completions, **kwargs: [float(number % 4) for number in range(len(completions))],
            rollout_func=other_sampler(shift),
            policy_options=PolicyOptions(importance_clip=clip),
            run_folder=RunFolder(tmp_path / name),
            output_dir=tmp_path / name / "checkpoints",
        )
        trainer.train()
        (line,) = read_jsonl(trainer.run_folder.metrics)
        norms[name] = line["grad_norm"]
        if name == "corrected":
            assert line["sampling/truncated_share"] == (1.0 if weight == 2.0 else 0.0)
            assert line["sampling/effective_sample_size"] == pytest.approx(1.0)
        else:
            assert "sampling/truncated_share" not in line
    assert norms["plain"] > 1e-3
    assert norms["corrected"] / norms["plain"] == pytest.approx(weight, rel=1e-4)


def test_an_empty_completion_is_one_sentence(make_trainer: Callable[..., Any]) -> None:
    honest = other_sampler(0.0)

    def empty(prompts: list[str], trainer: Any) -> dict[str, Any]:
        output = honest(prompts, trainer)
        output["completion_ids"][2], output["logprobs"][2] = [], []
        return output

    with pytest.raises(InputError, match=r"CR0777.*1 of 4 completions are empty, the first is number 2"):
        make_trainer(max_steps=1, rollout_func=empty).train()
    output = CheckedRollouts(lambda prompts, trainer: {"completion_ids": [[1], [2]]})([], None)
    assert output == {"completion_ids": [[1], [2]]}
