"""A real step under each preset is the step that its paper writes down: loss and gradient, in float64."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import preset_oracle
import pytest
import torch
from datasets import Dataset
from preset_oracle import MAX_LENGTH, METHODS, Row
from tiny_trainer import PROMPTS, tiny_model, tiny_tokenizer
from transformers import Qwen2ForCausalLM, TrainerCallback

from composer_replication.config import parse_config
from composer_replication.run_folder import RunFolder
from composer_replication.trainer.composer_trainer import ComposerReplicationTrainer
from composer_replication.trainer.preset_settings import overlong_punishment
from composer_replication.trainer.run_setup import trl_arguments

ENDS = [1, *range(3, 258, 4)]
"""Many end tokens, so that answers of a random model end."""


def reward_of(answer: Sequence[int]) -> float:
    return (sum(answer) % 7) / 4


@dataclass
class Step:
    weights: dict[str, torch.Tensor]
    inputs: dict[str, torch.Tensor]
    loss: float
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)


class Watched(ComposerReplicationTrainer):
    """Keeps weights, inputs and loss of every step as they were."""

    def _compute_loss(self, model: Any, inputs: Any) -> Any:
        loss = super()._compute_loss(model, inputs)
        weights = {name: value.detach().clone() for name, value in self.model.state_dict().items()}
        kept = {name: part.clone() for name, part in inputs.items() if isinstance(part, torch.Tensor)}
        self.steps.append(Step(weights, kept, loss.item()))
        return loss


class Gradients(TrainerCallback):
    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        named = self.trainer.model.named_parameters()
        self.trainer.steps[-1].gradients = {name: p.grad.clone() for name, p in named if p.grad is not None}


def trained(folder: Path, preset: str) -> Any:
    """Four steps by a recipe that names the preset; two updates a generation where the method allows it."""
    trl = {
        "max_steps": 4,
        # GSPO clips at 3e-4: smaller steps, so that some of its rows are clipped and some are not.
        "learning_rate": 1.2e-5 if preset == "gspo" else 3e-3,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_completion_length": MAX_LENGTH,
        "gradient_checkpointing": False,
    }
    trainer: dict[str, Any] = {"preset": preset}
    if preset == "composer":
        trl["beta"] = METHODS["composer"].kl_weight
        trainer["effort_weight"] = 0.05
    else:
        trl["num_iterations"] = 2
    config = parse_config(
        {"model": {"name": "tiny-random"}, "tasks": {"store": "x"}, "trainer": trainer, "trl": trl},
        where="test",
    )
    tiny_model().save_pretrained(folder / "model")
    model = Qwen2ForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    model.generation_config.eos_token_id = ENDS
    arguments, method = trl_arguments(config, RunFolder(folder / "run"))

    def reward(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
        return [reward_of(ids) for ids in completion_ids]

    watched: Any = Watched(
        model=model,
        reward_funcs=[reward, *overlong_punishment(method, arguments)],
        args=arguments,
        train_dataset=Dataset.from_dict({"prompt": list(PROMPTS)}),
        processing_class=tiny_tokenizer(),
        policy_options=method.options,
        run_folder=RunFolder(folder / "run"),
    )
    watched.steps = []
    watched.add_callback(Gradients(watched))
    watched.train()
    return watched


def rows_of(inputs: dict[str, torch.Tensor]) -> list[Row]:
    rows = []
    for ids, mask, answer in zip(
        inputs["prompt_ids"], inputs["prompt_mask"], inputs["completion_ids"].tolist(), strict=True
    ):
        end = next((t for t, token in enumerate(answer) if token in ENDS), None)
        kept = answer if end is None else answer[: end + 1]
        rows.append(Row(tuple(ids[mask.bool()].tolist()), tuple(kept), is_truncated=end is None))
    return rows


def model64(weights: dict[str, torch.Tensor]) -> Any:
    model = copy.deepcopy(tiny_model())
    model.load_state_dict(weights)
    return model.double()


@pytest.mark.parametrize("preset", sorted(METHODS))
def test_a_step_is_what_the_paper_says(tmp_path: Path, preset: str) -> None:
    method = METHODS[preset]
    steps = trained(tmp_path, preset).steps
    assert len(steps) == 4
    judged = steps[3]
    is_sampled_before = preset != "composer"  # its answers are used once
    old = model64((steps[2] if is_sampled_before else judged).weights)
    if is_sampled_before:
        assert torch.equal(steps[2].inputs["completion_ids"].sum(), judged.inputs["completion_ids"].sum())
    now, reference = model64(judged.weights), model64(steps[0].weights)
    rows = rows_of(judged.inputs)
    assert len({row.prompt for row in rows}) == 2
    expected = preset_oracle.loss(method, rows, reward_of, now=now, old=old, reference=reference)
    assert judged.loss == pytest.approx(expected.item(), abs=3e-6)
    expected.backward()
    wanted = {name: p.grad for name, p in now.named_parameters() if p.grad is not None}
    norm = torch.sqrt(sum((gradient**2).sum() for gradient in wanted.values()))
    assert norm > 1e-3
    for name, gradient in judged.gradients.items():
        assert torch.linalg.vector_norm(gradient.double() - wanted[name]) < 2e-4 * norm, name

    # The oracle tells the methods apart: the next one does not give this step.
    names = sorted(METHODS)
    other = names[(names.index(preset) + 1) % len(names)]
    model = model64(judged.weights)
    loss = preset_oracle.loss(METHODS[other], rows, reward_of, now=model, old=old, reference=reference)
    loss.backward()
    pairs = [(p.grad, wanted[name]) for name, p in model.named_parameters()]
    distance = torch.sqrt(sum(((mine - theirs) ** 2).sum() for mine, theirs in pairs))
    assert distance > 1e-2 * norm, other
