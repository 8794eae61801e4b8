"""What is logged of routers: by hand, in real steps of real architectures, and nothing where there are no experts."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "invariants"))

from tiny_architectures import tiny_model

from composer_replication.trainer.rollout_columns import counting_load, routers_of

MakeTrainer = Callable[..., Any]


def test_the_load_by_hand() -> None:
    def chose(num_experts: int, experts: list[int]) -> torch.nn.Module:
        index_NK = torch.tensor(experts)[:, None]
        router: Any = torch.nn.Module()
        router.is_used = bool(experts)
        router.forward = lambda: (torch.zeros(len(experts), num_experts), None, index_NK)
        return router

    trainer: Any = SimpleNamespace(_metrics={"train": {"router/max_load": []}})
    for routers in ([chose(4, [0] * 6 + [1] * 2), chose(2, [0, 1])], [chose(1, [0])], [chose(1, [])]):
        model: Any = torch.nn.ModuleList(routers)
        model._can_record_outputs = {"router_logits": SimpleNamespace(target_class=torch.nn.Module, index=0)}
        model.modules = lambda model=model: iter(model)
        with counting_load(trainer, model):
            for router in model if routers[0].is_used else ():
                router()
                router()
    assert trainer._metrics["train"]["router/max_load"] == [3.0, 1.0]


@pytest.mark.parametrize(("name", "checkpointing"), [("mixtral", True), ("deepseek-v3-latent", False)])
def test_a_step_logs_its_routers(make_trainer: MakeTrainer, name: str, checkpointing: bool) -> None:
    model = tiny_model(name, 258)
    assert routers_of(model)
    trainer = make_trainer(
        model=model, max_steps=2, gradient_accumulation_steps=2, gradient_checkpointing=checkpointing
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
