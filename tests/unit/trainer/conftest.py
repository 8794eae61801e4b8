"""A trainer small enough for unit tests: a random two-layer Qwen2 over bytes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from trl import GRPOTrainer

sys.path.insert(0, str(Path(__file__).parent))

from full_vocabulary import moved, plain_copy, sharpened
from tiny_trainer import build_trainer


@pytest.fixture
def make_trainer(tmp_path: Path) -> Callable[..., Any]:
    """``make_trainer(max_steps=3, heldout_guard=…, lora_adapter=True, …)``; checkpoints go to ``tmp_path``."""

    def make(**settings: Any) -> Any:
        settings.setdefault("output_dir", tmp_path / "checkpoints")
        return build_trainer(**settings)

    return make


@pytest.fixture
def moved_trainer(make_trainer: Callable[..., Any]) -> Callable[..., Any]:
    """A float64 trainer whose channels have begun at the weights ``of_start``, and whose policy has moved since."""

    def make(*, micro_steps: int = 1, **settings: Any) -> Any:
        trainer = make_trainer(**settings)
        trainer.model.double()
        sharpened(trainer.model)
        trainer.of_start = plain_copy(trainer.model)
        trainer.channels.begin()
        moved(trainer.model)
        trainer.model.train()
        trainer.current_gradient_accumulation_steps = trainer.args.steps_per_generation = micro_steps
        return trainer

    return make


@pytest.fixture
def flat_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """TRL's loss is 2.0, whatever the model and its inputs."""
    monkeypatch.setattr(GRPOTrainer, "_compute_loss", lambda self, model, inputs: 2.0)
