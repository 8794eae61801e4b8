"""In which mode a model is, whether one process has all of it, its weights as whole tensors, and a second copy of them.

FSDP2 gives each process a part of every parameter (a DTensor), which its hooks gather around a forward and a backward.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.state import AcceleratorState, is_initialized
from accelerate.utils import DistributedType
from torch import nn

from composer_replication.losses.gathered_weight import is_spread


def lies_in_parts(tensor: Any) -> bool:
    """Whether this process has a part of it alone: a DTensor of FSDP2, a parameter of ZeRO-3."""
    return is_spread(tensor) or hasattr(tensor, "ds_tensor")


def whole_tensors(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The entries of the model's state, sorted by name; each is whole until the next one is asked for.

    A collective call where weights lie in parts: every process has to come here, and to ask for all.
    """
    for name, part in sorted(model.state_dict(keep_vars=True).items()):
        if hasattr(part, "ds_tensor"):
            import deepspeed

            with deepspeed.zero.GatheredParameters([part]):
                yield name, part.detach()
        else:
            yield name, (part.full_tensor() if is_spread(part) else part).detach()


def parameter_sha256(model: Any) -> str:
    """Hex sha256 over the state dict: sorted names, dtypes, shapes and bytes; tied weights count under each name.

    A sharded tensor is gathered first, so every process must call it.
    """
    digest = hashlib.sha256()
    for name, value in whole_tensors(model):
        tensor = value.cpu().contiguous()
        digest.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().data if tensor.numel() else b"")
    return digest.hexdigest()


@contextmanager
def evaluation_mode(model: Any) -> Iterator[None]:
    """Inside, no part of the model is in training mode; afterwards the same parts are as before. None is no model."""
    trained = [part for part in model.modules() if part.training] if model is not None else []
    try:
        for part in trained:
            part.training = False
        yield
    finally:
        for part in trained:
            part.training = True


def weights_are_sharded(model: Any) -> bool:
    """Whether a forward needs every process: FSDP, DeepSpeed's ZeRO-3, or parameters that are parts of a whole."""
    if is_initialized():
        state = AcceleratorState()
        kind = state.distributed_type
        is_zero3 = kind == DistributedType.DEEPSPEED and state.deepspeed_plugin.zero_stage == 3
        if kind == DistributedType.FSDP or is_zero3:
            return True
    return model is not None and any(map(lies_in_parts, model.parameters()))


def fsdp_plugin() -> Any:
    """accelerate's settings of FSDP; None where it was not told of any."""
    return getattr(AcceleratorState(), "fsdp_plugin", None) if is_initialized() else None


def spread_again(model: Any) -> None:
    """Let FSDP2 free what it left whole after a forward: every parameter is a DTensor again. Backward gathers what it needs."""
    for module in model.modules():
        getattr(module, "reshard", lambda: None)()


class WeightCopy:
    """The trained weights a second time: the teacher, or the policy as it was before the first step.

    It is no second model: the frozen part of the model exists once. Where FSDP2 spreads the weights over processes, each has its
    part of the copy, too. Kept in float32 where they are of lower precision: an average that moves by a twentieth of a small
    difference would stand still in bfloat16. ``model`` is without data-parallel wrappers.
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
        for parameter, weight in self._pairs(model):
            _own_part(weight).lerp_(_own_part(parameter).to(weight.dtype), rate)

    @contextmanager
    def in_place_of(self, model: nn.Module) -> Iterator[None]:
        """Inside, the model has this copy's weights; no gradient may be asked for through them.

        They are written into the memory that autograd has seen, unnoticed by it, and so are the originals afterwards: FSDP2
        gathers from there, and what a forward before this one has saved is whole again when its backward comes.
        """
        pairs = self._pairs(model)
        kept = [_own_part(parameter).clone() for parameter, _ in pairs]
        torch.clear_autocast_cache()  # it keeps casts by parameter, whatever data that holds
        try:
            for parameter, weight in pairs:
                _own_part(parameter).copy_(_own_part(weight))
            yield
        finally:
            spread_again(model)
            for (parameter, _), own in zip(pairs, kept, strict=True):
                _own_part(parameter).copy_(own)
            torch.clear_autocast_cache()

    def tensors(self) -> dict[str, torch.Tensor]:
        """The copy itself, whole, by parameter name, for a checkpoint. A collective call for spread weights."""
        weights: dict[str, Any] = self._weights
        return {name: each.full_tensor().cpu() if is_spread(each) else each for name, each in weights.items()}

    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take over what ``tensors`` gave in the run that saved it."""
        for name, weight in self._weights.items():
            _own_part(weight).copy_(_own_part(_spread_as(weight, tensors[name])))

    def _pairs(self, model: nn.Module) -> list[tuple[nn.Parameter, torch.Tensor]]:
        """Each parameter and its copy; where weights were spread since the copy was made, it is spread alike."""
        spread_again(model)
        trained = [(name, each) for name, each in model.named_parameters() if name in self._weights]
        self._weights |= {name: _spread_as(each, self._weights[name]) for name, each in trained}
        return [(each, self._weights[name]) for name, each in trained]


def _own_part(tensor: Any) -> torch.Tensor:
    """The memory of a tensor, or of this process's part of it; autograd does not see what is written there."""
    part: torch.Tensor = (tensor.to_local() if is_spread(tensor) else tensor).data
    return part


def _spread_as(weight: Any, whole: torch.Tensor) -> torch.Tensor:
    """A whole tensor that each process has, spread as ``weight`` is; a spread one as it is."""
    if not is_spread(weight) or is_spread(whole):
        return whole
    from torch.distributed.tensor import distribute_tensor

    mesh, placements = weight.device_mesh, weight.placements
    return distribute_tensor(whole.to(weight.device), mesh, placements, src_data_rank=None)
