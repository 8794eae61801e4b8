"""Weights as whole tensors, one at a time, where FSDP2 or ZeRO-3 has spread them over processes; and their hash."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from composer_replication.losses.gathered_weight import is_spread


def lies_in_parts(tensor: Any) -> bool:
    """Whether this process has a part of it alone: a DTensor of FSDP2, a parameter of ZeRO-3."""
    return is_spread(tensor) or hasattr(tensor, "ds_tensor")


def whole_tensors(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The entries of the model's state, sorted by name; each is whole until the next one is asked for.

    A collective call where weights lie in parts: every process has to come here, and to ask for all.
    """
    for name, part in sorted(model.state_dict(keep_vars=True).items()):
        with _gathered_by_deepspeed(part):
            yield name, (part.full_tensor() if is_spread(part) else part).detach()


def _gathered_by_deepspeed(part: Any) -> AbstractContextManager[Any]:
    if not hasattr(part, "ds_tensor"):
        return nullcontext()
    import deepspeed

    context: AbstractContextManager[Any] = deepspeed.zero.GatheredParameters([part])
    return context


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
