"""What is logged of routers: by hand, in real steps of real architectures, and nothing where there are no experts."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "invariants"))

from tiny_architectures import tiny_model

from composer_replication.trainer.rollout_columns import routers_of

MakeTrainer = Callable[..., Any]


def test_a_step_logs_its_routers(make_trainer: MakeTrainer) -> None:
    model = tiny_model("mixtral", 258)
    assert routers_of(model)
    trainer = make_trainer(
        model=model, max_steps=2, gradient_accumulation_steps=2, gradient_checkpointing=True
    )
    trainer.train()
    rows = [row for row in trainer.state.log_history if "router/max_load" in row]
    assert len(rows) == 2  # once a step, whatever the micro-steps
    for row in rows:
        assert 1.0 <= row["router/max_load"] <= 4.0


def test_a_collapsed_router_is_seen(make_trainer: MakeTrainer) -> None:
    model = tiny_model("gpt-oss-sinks", 258)
    for router in routers_of(model):
        bias: Any = router.bias
        bias.data[:] = torch.tensor([50.0, 40.0, -50.0, -50.0])
    trainer = make_trainer(model=model, max_steps=1)
    trainer.train()
    (row,) = [row for row in trainer.state.log_history if "router/max_load" in row]
    assert row["router/max_load"] == 2.0  # two experts a token, always the same


def test_a_model_without_experts_logs_nothing_of_them(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(max_steps=1)
    trainer.train()
    assert routers_of(trainer.model) == []
    assert not [name for row in trainer.state.log_history for name in row if name.startswith("router/")]
