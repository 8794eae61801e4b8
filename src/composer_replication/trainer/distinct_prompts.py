"""The distinct prompts of a batch, and which rows have which."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from composer_replication.errors import InputError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Prompt:
    """One distinct prompt without its left padding; ``mask`` is all ones but for holes."""

    ids: tuple[int, ...]
    mask: tuple[int, ...]


def distinct_prompts(ids_BP: torch.Tensor, mask_BP: torch.Tensor) -> tuple[list[Prompt], list[int]]:
    """Distinct prompts in order of first appearance, and the index of each row's prompt."""
    index: dict[Prompt, int] = {}
    prompt_of_row: list[int] = []
    for row, (ids, mask) in enumerate(zip(ids_BP.tolist(), mask_BP.long().tolist(), strict=True)):
        if not any(mask):
            raise InputError(
                "CR0722", "a prompt has no unmasked token.", where=f"row {row}", fix="drop empty prompts."
            )
        start = mask.index(1)
        kept = tuple(token if keep else 0 for token, keep in zip(ids[start:], mask[start:], strict=True))
        prompt = Prompt(ids=kept, mask=tuple(mask[start:]))
        prompt_of_row.append(index.setdefault(prompt, len(index)))
    return list(index), prompt_of_row
