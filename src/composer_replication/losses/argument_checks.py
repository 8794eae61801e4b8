"""One sentence for each wrong argument of a loss, and the precision of its sums."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from composer_replication.errors import EmptyMaskError, InputError, UsageError


def require(fits: bool, message: str, *, where: str, fix: str = "correct the argument.") -> None:  # noqa: FBT001  reads as assert does
    """Raise CR0722 with this message unless ``fits``."""
    if not fits:
        raise UsageError("CR0722", message, where=where, fix=fix)


def require_same_shape(tensors: Mapping[str, torch.Tensor], *, where: str) -> None:
    """Raise CR0722 unless all tensors have one shape; broadcasting would hide a wrong one."""
    if len({tensor.shape for tensor in tensors.values()}) > 1:
        shapes = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in tensors.items())
        raise InputError(
            "CR0722", f"shapes do not fit: {shapes}.", where=where, fix="pass tensors of one shape."
        )


def require_weights(weight: torch.Tensor, name: str, *, where: str) -> None:
    """Raise CR0722 unless every weight is finite and at least 0."""
    if not bool((torch.isfinite(weight) & (weight >= 0)).all()):
        raise InputError(
            "CR0722",
            f"{name} holds a weight that is below 0 or not finite.",
            where=where,
            fix="repair or drop what that weight belongs to.",
        )


def require_something(mask: torch.Tensor, what: str, *, where: str) -> None:
    """Raise CR0722 when no entry of the mask is set."""
    if not bool(mask.any()):
        raise EmptyMaskError(
            "CR0722",
            f"no {what} is left to average over.",
            where=where,
            fix="leave this batch out, or look at how its mask was made.",
        )


def wide(tensor: torch.Tensor) -> torch.Tensor:
    """At least float32: sums lose too much in half precision."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
