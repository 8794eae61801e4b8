"""One hash for all weights of a model: equal bits, equal hash."""

from __future__ import annotations

import hashlib
from typing import Any

import torch

from composer_replication.trainer.whole_weights import whole_tensors


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
