"""One hash for all weights of a model: equal bits, equal hash."""

from __future__ import annotations

import hashlib
from typing import Any

import torch


def parameter_sha256(model: Any) -> str:
    """Hex sha256 over the state dict: sorted names, dtypes, shapes and bytes.

    Tied weights count under each of their names. A sharded tensor is gathered first, so
    every process must call it.
    """
    digest = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        tensor = value.full_tensor() if hasattr(value, "full_tensor") else value
        tensor = tensor.detach().cpu().contiguous()
        digest.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().data if tensor.numel() else b"")
    return digest.hexdigest()
