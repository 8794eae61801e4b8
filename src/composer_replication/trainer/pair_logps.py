"""Log-probabilities of whole answers: of the policy with gradient, of the reference once and kept.

Letters: P pairs, M positions that carry loss, T completion columns.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

from composer_replication.errors import InputError
from composer_replication.losses.chunked_head import sampled_logp
from composer_replication.losses.preferences import sequence_logp
from composer_replication.records import PreferencePair
from composer_replication.run_folder import read_json, write_json
from composer_replication.trainer.collator import PairRows, collate_pairs
from composer_replication.trainer.completion_states import completion_states, scored_ids
from composer_replication.trainer.model_modes import evaluation_mode
from composer_replication.trainer.output_head import head_of
from composer_replication.trainer.parameter_hash import parameter_sha256
from composer_replication.trainer.processes import from_first

Scope = Callable[[], AbstractContextManager[Any]]
_PAIRS_AT_ONCE = 8


def pair_logps(model: Any, rows: PairRows, *, length_normalised: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability of each chosen and each rejected answer, nats: two tensors (P,), at temperature 1.

    Sums over the ids that carry loss, or means over them.
    """
    stacked = rows.stacked()
    head = head_of(model)
    states_MH = completion_states(model, stacked)
    logp_M, _ = sampled_logp(states_MH, head.weight_VH, scored_ids(stacked), **head.arguments())
    mask = stacked.loss_mask_NT.bool()
    logp_NT = torch.zeros(mask.shape, dtype=logp_M.dtype, device=mask.device).masked_scatter(mask, logp_M)
    logp_N = sequence_logp(logp_NT, mask, length_normalised=length_normalised)
    return logp_N[: len(rows)], logp_N[len(rows) :]


def reference_logps(
    model: Any, pairs: Sequence[PreferencePair], *, pad_id: int, length_normalised: bool, autocast: Scope
) -> torch.Tensor:
    """Columns chosen and rejected (P, 2), float32, of the model as it stands, without gradient or dropout."""
    parts = []
    with torch.no_grad(), evaluation_mode(model):
        for start in range(0, len(pairs), _PAIRS_AT_ONCE):
            rows = collate_pairs(pairs[start : start + _PAIRS_AT_ONCE], pad_id=pad_id).to(model.device)
            with autocast():
                parts.append(torch.stack(pair_logps(model, rows, length_normalised=length_normalised), dim=1))
    return torch.cat(parts).float()


def cached_reference_logps(
    model: Any,
    pairs: Sequence[PreferencePair],
    *,
    pairs_sha256: str,
    cache: Path | None,
    pad_id: int,
    length_normalised: bool,
    autocast: Scope,
) -> torch.Tensor:
    """As ``reference_logps``; a file named by model, pairs and form of the mean is read if it is there and whole.

    Args:
        model: the reference.
        pairs: in the order of the rows of the result.
        pairs_sha256: of the pairs.
        cache: folder; None keeps nothing. Of several processes, which all call this, the first one's counts.
        pad_id: fills the padding.
        length_normalised: means in place of sums.
        autocast: a context for forwards.
    """
    key = hashlib.sha256(f"{parameter_sha256(model)} {pairs_sha256} {length_normalised}".encode()).hexdigest()
    path = None if cache is None else cache / f"reference-{key[:32]}.json"
    kept = from_first(None if path is None else _read(path, key, len(pairs)))
    if kept is not None:
        return kept.to(model.device)
    logps = reference_logps(
        model, pairs, pad_id=pad_id, length_normalised=length_normalised, autocast=autocast
    )
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, {"key": key, "logps": logps.tolist()})
    return logps


def _read(path: Path, key: str, num_pairs: int) -> torch.Tensor | None:
    """The kept numbers, or None where the file is missing, another's or damaged: they are computed again then."""
    if not path.is_file():
        return None
    try:
        kept = read_json(path)
        logps = torch.tensor(kept["logps"], dtype=torch.float32)
    except (InputError, ValueError, KeyError, TypeError):
        return None
    return (
        logps
        if kept["key"] == key and logps.shape == (num_pairs, 2) and bool(logps.isfinite().all())
        else None
    )
