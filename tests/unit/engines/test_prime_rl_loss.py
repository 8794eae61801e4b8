"""Against numbers worked out by hand, through a mirror of prime-rl's records; through its own code where PRIME_RL_SRC has it."""

from __future__ import annotations

import math
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from composer_replication.engines import prime_rl_loss
from composer_replication.engines.prime_rl_loss import composer, composer_tis


@dataclass
class Inputs:
    trainer_logprobs: torch.Tensor
    inference_logprobs: torch.Tensor
    ref_logprobs: torch.Tensor | None
    advantages: torch.Tensor
    loss_mask: torch.Tensor
    loss_weights: torch.Tensor | None = None


@dataclass
class Outputs:
    loss: torch.Tensor
    metrics: dict[str, torch.Tensor]


@pytest.fixture
def mirror(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("prime_rl.trainer.rl.loss")
    module.LossOutputs = Outputs  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "prime_rl.trainer.rl.loss", module)


def sample(**more: Any) -> Inputs:
    """Ratios 2, 1/2, 1 and one of a token that does not count; advantages 1, -1, 3."""
    return Inputs(
        trainer_logprobs=torch.tensor([math.log(0.8), math.log(0.2), -1.0, 7.0], requires_grad=True),
        inference_logprobs=torch.tensor([math.log(0.4), math.log(0.4), -1.0, math.nan]),
        ref_logprobs=None,
        advantages=torch.tensor([1.0, -1.0, 3.0, math.nan]),
        loss_mask=torch.tensor([True, True, True, False]),
        **more,
    )


@pytest.mark.usefixtures("mirror")
def test_the_clipped_objective_is_summed_over_the_tokens_that_count() -> None:
    """-(min(2, 1.28) - min of -1/2 and -0.8 - and 3) = -(1.28 - 0.8 + 3)."""
    inputs = sample()
    found = composer(inputs, clip_low=0.2, clip_high=0.28)
    assert found.loss.item() == pytest.approx(-(1.28 - 0.8 + 3.0))
    assert float(found.metrics["composer/ratio_distance"]) == pytest.approx((1.0 + 0.5 + 0.0) / 3)
    found.loss.backward()
    assert inputs.trainer_logprobs.grad is not None
    assert inputs.trainer_logprobs.grad.tolist() == pytest.approx([0.0, 0.0, -3.0, 0.0])


@pytest.mark.usefixtures("mirror")
def test_truncated_weights_leave_no_token_without_a_gradient() -> None:
    """Weights min(2, 1.5), 1/2, 1: the gradient is -w A."""
    inputs = sample()
    found = composer_tis(inputs, clip=1.5)
    assert found.loss.item() == pytest.approx(-(1.5 - 0.5 + 3.0))
    assert float(found.metrics["composer/effective_share"]) == pytest.approx(
        3.0**2 / (3 * (1.5**2 + 0.25 + 1))
    )
    found.loss.backward()
    assert inputs.trainer_logprobs.grad is not None
    assert inputs.trainer_logprobs.grad.tolist() == pytest.approx([-1.5, 0.5, -3.0, 0.0])


@pytest.mark.usefixtures("mirror")
@pytest.mark.parametrize("loss", [composer, composer_tis])
def test_weights_of_tokens_scale_them_and_a_sample_without_tokens_costs_nothing(loss: Any) -> None:
    third = torch.tensor([0.0, 0.0, 2.0, 5.0])
    assert loss(sample(loss_weights=third)).loss.item() == pytest.approx(-6.0)
    nothing = sample()
    nothing.loss_mask = torch.zeros(4, dtype=torch.bool)
    found = loss(nothing)
    assert found.loss.item() == 0.0
    found.loss.backward()  # each process of a step must be able to


@pytest.mark.skipif("PRIME_RL_SRC" not in os.environ, reason="PRIME_RL_SRC names no checkout of prime-rl")
@pytest.mark.parametrize("name", ["composer", "composer_tis"])
def test_prime_rl_itself_takes_it_by_its_import_path(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own ``compute_loss``: two samples, divided by the tokens of the step."""
    source = Path(os.environ["PRIME_RL_SRC"])
    for folder in (source / "src", source / "packages" / "prime-rl-configs" / "src"):
        monkeypatch.syspath_prepend(str(folder))
    from prime_rl.configs.trainer import CustomLossConfig
    from prime_rl.trainer.rl import loss as theirs

    path = f"{prime_rl_loss.__name__}.{name}"
    rl_loss = theirs.setup_rl_loss_fn(CustomLossConfig(import_path=path, kwargs={}))
    rows = [sample(), sample()]
    columns = [[getattr(row, name) for row in rows] for name in ("trainer_logprobs", "inference_logprobs")]
    advantages, masks = [row.advantages for row in rows], [row.loss_mask for row in rows]
    loss, metrics = theirs.compute_loss(
        *columns, None, advantages, masks, None, None, None, rl_loss, rl_scale=6, ce_scale=1, ref_kl_scale=1
    )
    wanted = -(1.2 - 0.8 + 3.0) if name == "composer" else -(2.0 - 0.5 + 3.0)
    assert loss.item() == pytest.approx(2 * wanted / 6)
    assert metrics["composer/ratio_distance"].tolist() == pytest.approx([0.5, 0.5])
