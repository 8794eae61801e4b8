"""In which mode a model is, and whether one process has all of it.

FSDP2 gives each process a part of every parameter (a DTensor), which its hooks gather around a forward and a backward.
FSDP 1 and DeepSpeed spread them in forms of their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from accelerate.state import AcceleratorState, is_initialized
from accelerate.utils import DistributedType

from composer_replication.trainer.whole_weights import lies_in_parts


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
