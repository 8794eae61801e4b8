"""A second set of the trained weights: the teacher, or the policy as it was before the first step.

It is no second model: the frozen part of the model, all of it with adapters, exists once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn


class WeightCopy:
    """A copy of the parameters that are trained, which can stand in for them during a forward.

    Kept in float32 where they are of lower precision: an average that moves by a twentieth of a small
    difference would stand still in bfloat16.

    Args:
        model: the model without data-parallel wrappers, its weights whole in this process.
    """

    def __init__(self, model: nn.Module) -> None:
        self._weights = {
            name: parameter.detach().to(_wide(parameter.dtype), copy=True)
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        }

    @torch.no_grad()
    def move_towards(self, model: nn.Module, rate: float) -> None:
        """copy = (1 - rate) copy + rate weights, for each trained parameter."""
        trained = dict(model.named_parameters())
        for name, weight in self._weights.items():
            weight.lerp_(trained[name].detach().to(weight.dtype), rate)

    @contextmanager
    def in_place_of(self, model: nn.Module) -> Iterator[None]:
        """Inside, the model has this copy's weights; no gradient may be asked for through them."""
        trained = {name: p for name, p in model.named_parameters() if name in self._weights}
        originals = {name: parameter.data for name, parameter in trained.items()}
        torch.clear_autocast_cache()  # it keeps casts by parameter, whatever data that holds
        try:
            for name, parameter in trained.items():
                parameter.data = self._weights[name].to(parameter.dtype)
            yield
        finally:
            for name, parameter in trained.items():
                parameter.data = originals[name]
            torch.clear_autocast_cache()

    def tensors(self) -> dict[str, torch.Tensor]:
        """The copy itself, by parameter name, for a checkpoint."""
        return self._weights

    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take over what ``tensors`` gave in the run that saved it."""
        for name, weight in self._weights.items():
            weight.copy_(tensors[name])


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
