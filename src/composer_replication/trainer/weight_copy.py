"""A second set of the trained weights: the teacher, or the policy as it was before the first step.

It is no second model: the frozen part of the model, all of it with adapters, exists once. Where FSDP2 spreads the
weights over processes, each has its part of the copy, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from composer_replication.losses.gathered_weight import gathered, is_spread
from composer_replication.trainer.model_modes import spread_again


class WeightCopy:
    """A copy of the parameters that are trained, which can stand in for them during a forward.

    Kept in float32 where they are of lower precision: an average that moves by a twentieth of a small difference would stand
    still in bfloat16. ``model`` is without data-parallel wrappers, its weights whole in this process or spread by FSDP2.
    """

    def __init__(self, model: nn.Module) -> None:
        spread_again(model)
        self._weights = {
            name: parameter.detach().to(torch.promote_types(parameter.dtype, torch.float32), copy=True)
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        }

    @torch.no_grad()
    def move_towards(self, model: nn.Module, rate: float) -> None:
        """copy = (1 - rate) copy + rate weights, for each trained parameter."""
        for name, parameter in self._trained(model).items():
            weight = self._weights[name]
            _own_part(weight).lerp_(_own_part(parameter).to(weight.dtype), rate)

    @contextmanager
    def in_place_of(self, model: nn.Module) -> Iterator[None]:
        """Inside, the model has this copy's weights; no gradient may be asked for through them."""
        trained = self._trained(model)
        plain = {name: parameter for name, parameter in trained.items() if not is_spread(parameter)}
        spread = {name: parameter for name, parameter in trained.items() if is_spread(parameter)}
        originals = {name: parameter.data for name, parameter in plain.items()}
        own_parts = {name: _own_part(parameter).clone() for name, parameter in spread.items()}
        torch.clear_autocast_cache()  # it keeps casts by parameter, whatever data that holds
        try:
            for name, parameter in plain.items():
                parameter.data = self._weights[name].to(parameter.dtype)
            for name, parameter in spread.items():
                _own_part(parameter).copy_(_own_part(self._weights[name]))  # FSDP2 gathers from this memory
            yield
        finally:
            spread_again(model)
            for name, parameter in plain.items():
                parameter.data = originals[name]
            for name, parameter in spread.items():
                _own_part(parameter).copy_(own_parts[name])
            torch.clear_autocast_cache()

    def tensors(self) -> dict[str, torch.Tensor]:
        """The copy itself, whole, by parameter name, for a checkpoint. A collective call for spread weights."""
        return {
            name: gathered(weight).cpu() if is_spread(weight) else weight
            for name, weight in self._weights.items()
        }

    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take over what ``tensors`` gave in the run that saved it."""
        for name, weight in self._weights.items():
            _own_part(weight).copy_(_own_part(_spread_as(weight, tensors[name])))

    def _trained(self, model: nn.Module) -> dict[str, nn.Parameter]:
        """The parameters that the copy is of; spread since the copy was made, it is spread alike."""
        spread_again(model)
        trained = {name: parameter for name, parameter in model.named_parameters() if name in self._weights}
        for name, parameter in trained.items():
            self._weights[name] = _spread_as(parameter, self._weights[name])
        return trained


def _own_part(tensor: Any) -> torch.Tensor:
    """The memory of a tensor, or of this process's part of it."""
    part: torch.Tensor = tensor.detach().to_local() if is_spread(tensor) else tensor.detach()
    return part


def _spread_as(weight: Any, whole: torch.Tensor) -> torch.Tensor:
    """A whole tensor that each process has, spread as ``weight`` is; a spread one as it is."""
    if not is_spread(weight) or is_spread(whole):
        return whole
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(
        whole.to(weight.device), weight.device_mesh, weight.placements, src_data_rank=None
    )
