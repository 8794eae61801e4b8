"""One sentence for each wrong argument of a loss, and the precision of its sums."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from composer_replication.errors import EmptyMaskError, InputError, UsageError


def require(fits: bool, message: str, *, where: str, fix: str = "correct the argument.") -> None:  # noqa: FBT001  reads as assert does
    """Raise CR0722 with this message unless ``fits``."""
    if not fits:
        raise UsageError("CR0722", message, where=where, fix=fix)


def require_number(value: float, name: str, *, low: float, high: float = math.inf, where: str) -> None:
    """Raise CR0722 unless ``low <= value <= high`` and the number is finite."""
    limit = f"between {low:g} and {high:g}" if math.isfinite(high) else f"at least {low:g}"
    require(
        math.isfinite(value) and low <= value <= high,
        f"{name} is {value!r} and must be a finite number {limit}.",
        where=where,
    )


def require_positive(value: float, name: str, *, where: str) -> None:
    """Raise CR0722 unless the number is finite and above 0."""
    require(
        math.isfinite(value) and value > 0,
        f"{name} is {value!r} and must be a finite number above 0.",
        where=where,
    )


def require_same_shape(tensors: Mapping[str, torch.Tensor], *, where: str) -> None:
    """Raise CR0722 unless all tensors have one shape; broadcasting would hide a wrong one."""
    if len({tensor.shape for tensor in tensors.values()}) > 1:
        shapes = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in tensors.items())
        raise InputError(
            "CR0722", f"shapes do not fit: {shapes}.", where=where, fix="pass tensors of one shape."
        )


def require_weights(weight: torch.Tensor, name: str, *, where: str) -> None:
    """Raise CR0722 unless every weight is finite and at least 0."""
    is_wrong = ~torch.isfinite(weight) | (weight < 0)
    if bool(is_wrong.any()):
        place = is_wrong.nonzero()[0].tolist()
        raise InputError(
            "CR0722",
            f"{name} holds {weight[tuple(place)].item()!r} at {place}; weights are finite and at least 0.",
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
