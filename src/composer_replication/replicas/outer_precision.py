"""Outer gradients as bytes: in full, as bfloat16, or as 8 or 4 bits with one scale a block.

    fp32   4 bytes a number
    bf16   2 bytes a number
    int8   1 byte a number and 4 bytes a block of 256: q = round(x / s), s = max|x| / 127
    int4   half a byte a number and 4 bytes a block: q = round(x / s), s = max|x| / 7

What rounding takes away is not lost: the sender adds it to what it sends next (error feedback), which
keeps the sum over the rounds within one round's error. The same code runs on every device, since it works on
numbers in the processor's memory. Nothing but numbers is in the bytes, so reading foreign ones runs no code.
"""

from __future__ import annotations

from typing import Final

import torch

from composer_replication.replicas.replica_errors import damaged

BLOCK: Final = 256
_WHOLE: Final = {"fp32": torch.float32, "bf16": torch.bfloat16}
_LARGEST: Final = {"int8": 127, "int4": 7}


def encode(values: torch.Tensor, precision: str) -> bytes:
    """The bytes of a flat float32 tensor in the processor's memory."""
    if precision in _WHOLE:
        return _bytes(values.to(_WHOLE[precision]))
    blocks = torch.nn.functional.pad(values, (0, -values.numel() % BLOCK)).view(-1, BLOCK)
    scales = blocks.abs().amax(dim=1) / _LARGEST[precision]
    levels = (blocks / torch.where(scales > 0, scales, 1.0)[:, None]).round_().to(torch.int8).flatten()
    if precision == "int4":
        nibbles = (levels + 8).to(torch.uint8)
        return _bytes(scales) + _bytes(nibbles[0::2] | (nibbles[1::2] << 4))
    return _bytes(scales) + _bytes(levels[: values.numel()])


def decode(payload: bytes, num_values: int, precision: str) -> torch.Tensor:
    """The flat float32 tensor of ``num_values`` numbers; bytes of another length are refused (CR1107)."""
    wanted = num_bytes(num_values, precision)
    if len(payload) != wanted:
        raise damaged(f"an outer gradient has {len(payload)} bytes in place of {wanted}")
    raw = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
    if precision in _WHOLE:
        return raw.view(_WHOLE[precision]).float()
    num_blocks = -(-num_values // BLOCK)
    scales, packed = raw[: 4 * num_blocks].view(torch.float32), raw[4 * num_blocks :]
    if precision == "int4":
        levels = torch.stack(((packed & 15), (packed >> 4)), dim=1).flatten().to(torch.int8) - 8
    else:
        levels = torch.nn.functional.pad(packed.view(torch.int8), (0, -num_values % BLOCK))
    return (levels.float().view(num_blocks, BLOCK) * scales[:, None]).flatten()[:num_values]


def num_bytes(num_values: int, precision: str) -> int:
    """How long ``encode`` makes it."""
    if precision in _WHOLE:
        return num_values * _WHOLE[precision].itemsize
    num_blocks = -(-num_values // BLOCK)
    return 4 * num_blocks + (num_values if precision == "int8" else num_blocks * BLOCK // 2)


def _bytes(values: torch.Tensor) -> bytes:
    return values.contiguous().view(torch.uint8).numpy().tobytes()
