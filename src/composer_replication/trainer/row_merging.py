"""Rows of one generation put in the place of rows of another, as tensors of one width."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

import torch
from torch.nn.functional import pad

from composer_replication.trainer.routed_experts import COLUMN, UNKNOWN
from composer_replication.trainer.setting_errors import TrainerSettingError

NOT_BY_ROW = "num_items_in_batch"


def merge_rows(
    old: Mapping[str, Any], new: Mapping[str, Any], places: Sequence[tuple[int, int]], *, pad_token_id: int
) -> dict[str, Any]:
    """``old`` with row ``a`` replaced by row ``b`` of ``new`` for each ``(a, b)`` of ``places``.

    Prompts are padded on the left and everything else on the right: ids with ``pad_token_id``, routed experts with -1,
    masks and numbers with 0. ``num_items_in_batch`` stays as it was and is for the caller to count again.

    Args:
        old: tensors with one row a rollout, as TRL's ``_generate_and_score_completions`` gives them.
        new: the same names; other widths are fine.
        places: pairs of row numbers; row numbers of ``old`` must differ.
        pad_token_id: of the tokenizer.

    Raises:
        TrainerSettingError: a part is not one row a rollout (images), or is missing in one of them (CR0760).
    """
    num_old, num_new = old["prompt_ids"].size(0), new["prompt_ids"].size(0)
    merged: dict[str, Any] = {}
    for name in old.keys() | new.keys():
        mine, theirs = old.get(name), new.get(name)
        if name == NOT_BY_ROW:
            merged[name] = mine
            continue
        if not (_is_by_row(mine, num_old) and _is_by_row(theirs, num_new)):
            raise TrainerSettingError(
                "CR0760",
                f"dynamic sampling cannot replace rollouts whose batches carry {name}.",
                where="trainer.dynamic_sampling_rounds",
                fix="set trainer.dynamic_sampling_rounds = 0 for such data.",
            )
        merged[name] = _replaced(name, mine, theirs, places, pad_token_id)
    return {name: merged[name] for name in old if name in merged} | merged


def _is_by_row(part: Any, num_rows: int) -> TypeGuard[torch.Tensor]:
    return isinstance(part, torch.Tensor) and part.dim() >= 1 and part.size(0) == num_rows


def _replaced(
    name: str,
    old: torch.Tensor,
    new: torch.Tensor,
    places: Sequence[tuple[int, int]],
    pad_token_id: int,
) -> torch.Tensor:
    if old.dim() > 1 and old.size(1) != new.size(1):
        width = max(old.size(1), new.size(1))
        fill = pad_token_id if name.endswith("_ids") else UNKNOWN if name.endswith(COLUMN) else 0
        is_left = name.startswith("prompt_")
        old, new = (_widened(part, width, fill, is_left=is_left) for part in (old, new))
    result = old.clone()
    if places:
        rows_old, rows_new = (torch.tensor(rows, device=old.device) for rows in zip(*places, strict=True))
        result[rows_old] = new[rows_new]
    return result


def _widened(part: torch.Tensor, width: int, fill: int, *, is_left: bool) -> torch.Tensor:
    missing = width - part.size(1)
    before = [0, 0] * (part.dim() - 2)
    return pad(part, [*before, missing, 0] if is_left else [*before, 0, missing], value=fill)
