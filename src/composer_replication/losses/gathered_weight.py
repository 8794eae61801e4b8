"""A weight that FSDP2 spread over processes, whole for as long as it is used."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


def is_spread(tensor: Any) -> bool:
    """Whether this is a DTensor, of which each process has a part."""
    return hasattr(tensor, "full_tensor")


def gathered(tensor: torch.Tensor) -> torch.Tensor:
    """The whole of a spread tensor; any other tensor as it is. A collective call for a spread one.

    With parts w_r on R processes: w = concat_r w_r forward, and backward the part of (1 / R) sum_r dL_r/dw, the mean
    that FSDP2 makes of the gradients it gathers itself. A collective call backward, too.
    """
    whole: torch.Tensor = _Gathered.apply(tensor) if is_spread(tensor) else tensor  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return whole


@contextmanager
def gathered_again_for_backward(tensor: torch.Tensor, whole: torch.Tensor) -> Iterator[None]:
    """Inside, autograd keeps no hold of the ``whole`` of a spread ``tensor``: backward gathers it once more."""
    if not is_spread(tensor):
        yield
        return
    place = whole.data_ptr()

    def keep(saved: torch.Tensor) -> torch.Tensor | None:
        return None if saved.data_ptr() == place and saved.shape == tensor.shape else saved

    def give_back(kept: torch.Tensor | None) -> torch.Tensor:
        return gathered(tensor.detach()) if kept is None else kept

    with torch.autograd.graph.saved_tensors_hooks(keep, give_back):
        yield


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Any) -> torch.Tensor:
        ctx.mesh, ctx.placements = tensor.device_mesh, tensor.placements
        whole: torch.Tensor = tensor.detach().full_tensor()
        return whole

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        from torch.distributed.tensor import DTensor, Partial

        if grad.device.type != "cpu":
            torch.accelerator.synchronize()  # FSDP2 adds to the same gradient on a stream of its own
        summed = DTensor.from_local(
            grad / ctx.mesh.size(), ctx.mesh, [Partial()] * ctx.mesh.ndim, run_check=False
        )
        return summed.redistribute(placements=ctx.placements)
