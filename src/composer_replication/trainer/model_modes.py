"""In which mode a model is, whether one process has all of it, and its weights as whole tensors.

FSDP2 gives each process a part of every parameter (a DTensor), which its hooks gather around a forward and a backward.
FSDP 1 and DeepSpeed spread them in forms of their own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from accelerate.state import AcceleratorState, is_initialized
from accelerate.utils import DistributedType

from composer_replication.losses.gathered_weight import is_spread


def lies_in_parts(tensor: Any) -> bool:
    """Whether this process has a part of it alone: a DTensor of FSDP2, a parameter of ZeRO-3."""
    return is_spread(tensor) or hasattr(tensor, "ds_tensor")


def whole_tensors(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The entries of the model's state, sorted by name; each is whole until the next one is asked for.

    A collective call where weights lie in parts: every process has to come here, and to ask for all.
    """
    for name, part in sorted(model.state_dict(keep_vars=True).items()):
        gathered: AbstractContextManager[Any] = nullcontext()
        if hasattr(part, "ds_tensor"):
            import deepspeed

            gathered = deepspeed.zero.GatheredParameters([part])
        with gathered:
            yield name, (part.full_tensor() if is_spread(part) else part).detach()


def parameter_sha256(model: Any) -> str:
    """Hex sha256 over the state dict: sorted names, dtypes, shapes and bytes.

    Tied weights count under each of their names. A sharded tensor is gathered first, so
    every process must call it.
    """
    digest = hashlib.sha256()
    for name, value in whole_tensors(model):
        tensor = value.cpu().contiguous()
        digest.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().data if tensor.numel() else b"")
    return digest.hexdigest()


@contextmanager
def evaluation_mode(model: Any) -> Iterator[None]:
    """Inside, no part of the model is in training mode; afterwards the same parts are as before."""
    modules = getattr(model, "modules", None)
    trained = [part for part in modules() if part.training] if modules is not None else []
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
        if state.distributed_type == DistributedType.FSDP:
            return True
        if state.distributed_type == DistributedType.DEEPSPEED and state.deepspeed_plugin.zero_stage == 3:
            return True
    parameters = getattr(model, "parameters", None)
    return parameters is not None and any(map(lies_in_parts, parameters()))


def fsdp_plugin() -> Any:
    """accelerate's settings of FSDP; None where it was not told of any."""
    return getattr(AcceleratorState(), "fsdp_plugin", None) if is_initialized() else None


def spread_again(model: Any) -> None:
    """Let FSDP2 free what it left whole after a forward: every parameter is a DTensor again. Nothing elsewhere.

    Backward gathers what it needs.
    """
    for module in model.modules():
        reshard = getattr(module, "reshard", None)
        if reshard is not None:
            reshard()
