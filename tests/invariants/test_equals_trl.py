"""With everything of ours off, training is TRL's bit for bit; with prefix sharing it is its equal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_trainer import build_trainer
from trl import GRPOTrainer

from composer_replication.run_folder import RunFolder
from composer_replication.trainer import packed_rows
from composer_replication.trainer.model_modes import parameter_sha256


def hash_after(folder: Path, **settings: Any) -> str:
    trainer = build_trainer(output_dir=folder, max_steps=10, **settings)
    trainer.train()
    return parameter_sha256(trainer.model)


def test_ten_steps_equal_trls_bit_for_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = hash_after(tmp_path / "a", trainer_class=GRPOTrainer)
    assert hash_after(tmp_path / "b", run_folder=RunFolder(tmp_path / "run")) == theirs
    monkeypatch.setattr(packed_rows.model_modes, "packing_reason", lambda _: "it may not.")
    cannot_share: dict[str, Any] = {"prefix_sharing": True, "generation_kwargs": {"num_beams": 1}}
    assert hash_after(tmp_path / "e", **cannot_share) == theirs


def test_generations_that_are_used_again_equal_trls_bit_for_bit(tmp_path: Path) -> None:
    reused = {"num_iterations": 2, "steps_per_generation": 2, "gradient_accumulation_steps": 2, "beta": 0.1}
    theirs = hash_after(tmp_path / "a", trainer_class=GRPOTrainer, lora_adapter=True, **reused)
    run = RunFolder(tmp_path / "run")
    assert hash_after(tmp_path / "b", run_folder=run, lora_adapter=True, **reused) == theirs


def one_step(
    folder: Path, *, prefix_sharing: bool, micro_batch: int
) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of one micro-batch on the same rows, sampled by TRL's path in both cases."""
    trainer = build_trainer(
        output_dir=folder,
        per_device_train_batch_size=micro_batch,
        num_generations=4,
        prefix_sharing=False,
        num_prompts=8,
        scale_rewards="none",
        beta=0.0,
    )
    trainer.model.train()
    batch = next(iter(trainer.get_train_dataloader()))
    torch.manual_seed(3)
    inputs = trainer._prepare_inputs(batch)
    trainer.prefix_sharing = prefix_sharing
    trainer.current_gradient_accumulation_steps = 1
    loss = trainer.compute_loss(trainer.model, inputs)
    loss.backward()
    assert trainer.shared_prompts.off_reasons == ()
    return loss.item(), {name: p.grad for name, p in trainer.model.named_parameters() if p.grad is not None}


def test_a_step_with_prefix_sharing_equals_the_plain_one(tmp_path: Path) -> None:
    plain_loss, plain = one_step(tmp_path / "a", prefix_sharing=False, micro_batch=8)
    shared_loss, shared = one_step(tmp_path / "b", prefix_sharing=True, micro_batch=8)
    assert shared_loss == pytest.approx(plain_loss, abs=1e-6)
    assert shared.keys() == plain.keys()
    norm = torch.sqrt(sum((gradient**2).sum() for gradient in plain.values()))
    assert norm > 1e-3
    for name, gradient in plain.items():
        assert torch.linalg.vector_norm(shared[name] - gradient) < 1e-4 * norm, name
