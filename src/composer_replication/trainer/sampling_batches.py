"""The rows that are being sampled and how their next logits come about: behind a shared cache, or by whole forwards.

Letters: A samples still running, B all samples, K distinct prompts, P prompt columns, C columns so far, V vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakSet

import torch
from torch import nn

from composer_replication.errors import InputError
from composer_replication.trainer.packed_rows import Prompt
from composer_replication.trainer.prefix_sharing import (
    copy_cache_to_rows,
    forward_with_cache,
    prefill,
)
from composer_replication.trainer.prefix_support import accepts, inner_model, unsupported_reason

if TYPE_CHECKING:
    from transformers import DynamicCache

logger = logging.getLogger(__name__)

_ROWS_AT_ONCE = 8  # of a forward without a cache; bounds the logits of models that cannot leave positions out
_TOLD: WeakSet[nn.Module] = WeakSet()


class SamplingBatch(Protocol):
    """The rows still running; row a of everything is sample ``row_numbers[a]``.

    Attributes:
        context_AC: the ids so far, for the repetition penalty; its left is filled by ids that the row has anyway.
    """

    row_numbers: list[int]
    context_AC: torch.Tensor

    def keep(self, places: list[int]) -> None:
        """Drop every row but these places."""

    def next_logits(self, newest_ids: Sequence[int]) -> torch.Tensor:
        """The logits (A, V) behind the newest id of each running row."""


def start_batch(
    model: nn.Module,
    prompts: Sequence[Prompt],
    prompt_of_row: Sequence[int],
    pad_token_id: int,
    *,
    needs_cache: bool = False,
) -> tuple[SamplingBatch, torch.Tensor]:
    """A row for each entry of ``prompt_of_row``, and the first logits (B, V).

    A model that cannot share prompts exactly gets whole forwards, and the log says so once. With ``needs_cache`` one that
    leaves the cache alone is refused: how many whole forwards there are goes by the rows, and other processes would wait.

    Raises:
        InputError: CR0757, as ``prefill``.
    """
    device = next(inner_model(model).parameters()).device
    context_BC = _context(prompts, device)[torch.tensor(prompt_of_row, device=device)]
    reason = unsupported_reason(model, training=False)
    if reason is None:
        try:
            return _start_cached(model, prompts, prompt_of_row, pad_token_id, context_BC)
        except InputError as error:  # a forward of the user's own that leaves the cache alone
            if needs_cache:
                raise
            reason = error.message
    if model not in _TOLD:
        _TOLD.add(model)
        logger.warning(
            "sampling for evaluation and episodes forwards each row whole for every token, which is slow: %s",
            reason,
        )
    ids = [prompts[index].ids for index in prompt_of_row]
    plain = PlainBatch(model, list(range(len(ids))), ids, context_BC)
    return plain, plain.logits()


@dataclass
class CachedBatch:
    """Rows whose past is in a cache; a step forwards one id of each."""

    model: nn.Module
    row_numbers: list[int]
    cache: DynamicCache
    mask_AC: torch.Tensor
    positions_A: torch.Tensor
    context_AC: torch.Tensor

    def keep(self, places: list[int]) -> None:
        if len(places) == len(self.row_numbers):
            return
        places_A = torch.tensor(places, device=self.mask_AC.device)
        self.row_numbers = [self.row_numbers[place] for place in places]
        copy_cache_to_rows(self.cache, places_A)
        self.mask_AC = self.mask_AC[places_A]
        self.positions_A = self.positions_A[places_A]
        self.context_AC = self.context_AC[places_A]

    def next_logits(self, newest_ids: Sequence[int]) -> torch.Tensor:
        newest_A1 = torch.tensor(newest_ids, device=self.mask_AC.device)[:, None]
        self.mask_AC = nn.functional.pad(self.mask_AC, (0, 1), value=1)
        mask = None if bool(self.mask_AC.all()) else self.mask_AC
        logits_A1V = forward_with_cache(self.model, newest_A1, self.cache, self.positions_A[:, None], mask)
        self.positions_A = self.positions_A + 1
        return logits_A1V[:, -1]


@dataclass
class PlainBatch:
    """Rows of any causal language model; a step forwards each row from its first id on, without cache and padding.

    Rows of one length go together, equal ones once.
    """

    model: nn.Module
    row_numbers: list[int]
    ids: list[tuple[int, ...]]
    context_AC: torch.Tensor

    def keep(self, places: list[int]) -> None:
        self.row_numbers = [self.row_numbers[place] for place in places]
        self.ids = [self.ids[place] for place in places]
        self.context_AC = self.context_AC[torch.tensor(places, device=self.context_AC.device)]

    def next_logits(self, newest_ids: Sequence[int]) -> torch.Tensor:
        self.ids = [(*ids, newest) for ids, newest in zip(self.ids, newest_ids, strict=True)]
        return self.logits()

    def logits(self) -> torch.Tensor:
        by_length: dict[int, list[tuple[int, ...]]] = {}
        for ids in dict.fromkeys(self.ids):
            by_length.setdefault(len(ids), []).append(ids)
        found: dict[tuple[int, ...], torch.Tensor] = {}
        for _, rows in sorted(by_length.items()):
            for start in range(0, len(rows), _ROWS_AT_ONCE):
                part = rows[start : start + _ROWS_AT_ONCE]
                found.update(zip(part, self._forward(part), strict=True))
        return torch.stack([found[ids] for ids in self.ids])

    def _forward(self, rows: Sequence[tuple[int, ...]]) -> torch.Tensor:
        input_ids = torch.tensor(rows, device=self.context_AC.device)
        more: dict[str, Any] = {
            "attention_mask": torch.ones_like(input_ids),
            "use_cache": False,
            "logits_to_keep": 1,
        }
        taken = {name: value for name, value in more.items() if accepts(self.model, name)}
        logits_aTV: torch.Tensor = self.model(input_ids=input_ids, **taken).logits
        return logits_aTV[:, -1]


def _context(prompts: Sequence[Prompt], device: torch.device) -> torch.Tensor:
    """The prompts' ids (K, P); padding repeats the first one, so that the padding id itself (often the end) is not penalised."""
    width = max(len(prompt.ids) for prompt in prompts)
    rows = [(prompt.ids[0],) * (width - len(prompt.ids)) + prompt.ids for prompt in prompts]
    return torch.tensor(rows, device=device)


def _start_cached(
    model: nn.Module,
    prompts: Sequence[Prompt],
    prompt_of_row: Sequence[int],
    pad_token_id: int,
    context_BC: torch.Tensor,
) -> tuple[CachedBatch, torch.Tensor]:
    """Forward each prompt once and copy its cache to its rows."""
    device = context_BC.device
    logits_KV, cache, mask_KP, lengths_K = prefill(model, prompts, device=device, pad_id=pad_token_id)
    index_B = torch.tensor(prompt_of_row, device=device)
    copy_cache_to_rows(cache, index_B)
    row_numbers = list(range(len(prompt_of_row)))
    batch = CachedBatch(model, row_numbers, cache, mask_KP[index_B], lengths_K[index_B], context_BC)
    return batch, logits_KV[index_B]
