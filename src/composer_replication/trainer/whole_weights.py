"""Weights as whole tensors, one at a time, where FSDP2 or ZeRO-3 has spread them over processes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from composer_replication.losses.gathered_weight import is_spread

if TYPE_CHECKING:
    import torch


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
