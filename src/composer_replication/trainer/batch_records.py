"""Between TRL's batch of one generation and records: rollouts out of it, pairs into it.

TRL shuffles and splits every tensor of a batch along its first dimension, so what a row needs travels as
tensors whose first dimension is the row.

Letters: B rows, T completion columns.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch

from composer_replication.records import Completion, HintedTurn, Rollout, StopReason, Turn
from composer_replication.trainer.chained_rows import SEGMENT_STARTS
from composer_replication.trainer.collator import (
    OTHER_CONTEXT,
    PairRows,
    TokenRows,
    differs_by_hint,
    misaligned,
)

Batch = dict[str, Any]


def rollouts_of(
    rows: Sequence[Mapping[str, Any]],
    batch: Batch,
    rewards: Sequence[float | None],
    tokenizer: Any,
    *,
    step: int,
    eos_token_ids: Collection[int],
) -> list[Rollout]:
    """One rollout a row; a run of sampled ids between tool output is a turn.

    The prompt of a turn begins with its conversation, which in a chained row (``chained_rows``) need not be the first.
    ``task_id`` is the row's column of that name, else its prompt; ``prompt_text`` is the data's own text where a turn
    answers it, else its ids decoded; ``token_logp`` are the sampler's, where TRL has them. A row whose mask TRL has
    emptied, as its answer was cut off, has no turn.
    """
    prompts = _kept(batch["prompt_ids"], batch["prompt_mask"])
    completions = batch["completion_ids"].tolist()
    is_sampled_BT = batch["completion_mask"] * batch.get("tool_mask", 1)
    logps = _sampled_logps(batch)
    chains = batch[SEGMENT_STARTS].tolist() if SEGMENT_STARTS in batch else [[]] * len(prompts)
    rollouts = []
    for idx, (prompt, ids) in enumerate(zip(prompts, completions, strict=True)):
        turns = []
        for start, end in _runs(is_sampled_BT[idx].tolist()):
            logp = () if logps is None else tuple(logps[idx][start:end])
            known = logp if all(math.isfinite(value) for value in logp) else ()
            text = tokenizer.decode(ids[start:end], skip_special_tokens=True)
            reason = StopReason.FINISHED if ids[end - 1] in eos_token_ids else StopReason.LENGTH
            answer = Completion(tuple(ids[start:end]), text, reason, known)
            opened = max((place for place in chains[idx] if place <= start), default=0)
            before = tuple(ids[opened:start]) if opened else (*prompt, *ids[:start])
            given = rows[idx].get("prompt") if start == 0 else None
            turns.append(Turn(before, answer, given if isinstance(given, str) else tokenizer.decode(before)))
        task_id = str(rows[idx].get("task_id") or rows[idx].get("prompt", ""))
        reason = turns[-1].completion.stop_reason if turns else StopReason.LENGTH
        rollouts.append(Rollout(task_id, step, tuple(turns), rewards[idx], None, reason, 0.0))
    return rollouts


def matched_turns(turns_by_row: Any, rollouts: Sequence[Rollout]) -> list[list[HintedTurn]]:
    """The hinted turns, which have to be turns of their row id for id, with its log-probabilities.

    The hinted prompt must be the turn's with one run of ids put in. Log-probabilities are the row's, where it has some.

    Args:
        turns_by_row: what the hint source answered: of each rollout its hinted turns.
        rollouts: what it was asked about.

    Raises:
        InputError: a turn that was not sampled in its row, or in another context (CR0751).
        InputError: the answer is not one list of hinted turns for each rollout (CR0751).
    """
    if (
        not isinstance(turns_by_row, Sequence)
        or len(turns_by_row) != len(rollouts)
        or not all(isinstance(turn, HintedTurn) for turns in turns_by_row for turn in turns)
    ):
        raise misaligned(
            "the hint source gave something else than one list of HintedTurn a rollout", "hint_source"
        )
    matched: list[list[HintedTurn]] = []
    for row, (turns, rollout) in enumerate(zip(turns_by_row, rollouts, strict=True)):
        known = {(t.prompt_ids, t.completion.token_ids): t.completion.token_logp for t in rollout.turns}
        matched.append([])
        for turn in turns:
            key = tuple(turn.prompt_ids), tuple(turn.completion_ids)
            if key not in known:
                raise misaligned("a hinted turn is not, id for id, a turn of its row", f"row {row}")
            if not differs_by_hint(turn):
                raise misaligned(OTHER_CONTEXT, f"row {row}")
            matched[row].append(replace(turn, sampled_logp=known[key] or turn.sampled_logp))
    return matched


def sibling_tensors(
    batch: Batch, rewards: Sequence[float | None], *, pass_reward: float, pad_id: int
) -> Batch:
    """For each group, passing rows paired with failing ones; the pair travels with the passing row.

    Groups are rows with equal prompts. The i-th passing row is paired with the i-th failing one, so a row is
    in at most one pair; answers that are the same ids, empty answers, rows without a reward and chains of several
    conversations are in none.
    """
    ids, mask = batch["completion_ids"], batch["completion_mask"]
    loss_mask = mask * batch.get("tool_mask", 1)
    is_chain = (
        batch[SEGMENT_STARTS].bool().any(-1)
        if SEGMENT_STARTS in batch
        else torch.zeros(ids.size(0), dtype=torch.bool)
    )
    groups: dict[tuple[int, ...], tuple[list[int], list[int]]] = {}
    for row, prompt in enumerate(_kept(batch["prompt_ids"], batch["prompt_mask"])):
        reward = rewards[row]
        if reward is not None and bool(loss_mask[row].any()) and not is_chain[row]:
            groups.setdefault(tuple(prompt), ([], []))[0 if reward >= pass_reward else 1].append(row)
    rejected_ids = torch.full_like(ids, pad_id)
    rejected_mask, rejected_loss_mask = torch.zeros_like(mask), torch.zeros_like(mask)
    weight = torch.zeros(ids.size(0), device=ids.device)
    for passing, failing in groups.values():
        for chosen, rejected in zip(passing, failing, strict=False):
            if torch.equal(ids[chosen] * mask[chosen], ids[rejected] * mask[rejected]):
                continue
            rejected_ids[chosen], rejected_mask[chosen] = ids[rejected], mask[rejected]
            rejected_loss_mask[chosen], weight[chosen] = loss_mask[rejected], 1.0
    return {
        "sibling_ids": rejected_ids,
        "sibling_mask": rejected_mask,
        "sibling_loss_mask": rejected_loss_mask,
        "sibling_weight": weight,
    }


def sibling_rows_in(batch: Mapping[str, Any]) -> PairRows | None:
    """The sibling pairs that a batch carries, or None."""
    if "sibling_weight" not in batch or not batch["sibling_weight"].any():
        return None
    used = batch["sibling_weight"] > 0
    prompt = _cut_left(batch["prompt_ids"][used], batch["prompt_mask"][used])
    mask = batch["completion_mask"][used]
    loss_mask = mask * batch["tool_mask"][used] if "tool_mask" in batch else mask
    return PairRows(
        TokenRows(*prompt, batch["completion_ids"][used], mask, loss_mask),
        TokenRows(
            *prompt, batch["sibling_ids"][used], batch["sibling_mask"][used], batch["sibling_loss_mask"][used]
        ),
        batch["sibling_weight"][used],
    )


def _kept(values: torch.Tensor, mask: torch.Tensor) -> list[list[Any]]:
    return [row[kept].tolist() for row, kept in zip(values, mask.bool(), strict=True)]


def _sampled_logps(batch: Batch) -> list[list[float]] | None:
    """Log-probabilities by completion column: the sampler's, else those of the weights that sampled."""
    for name in ("sampling_per_token_logps", "old_per_token_logps"):
        if batch.get(name) is not None:
            rows: list[list[float]] = batch[name].float().tolist()
            return rows
    return None


def _runs(flags: Sequence[int]) -> list[tuple[int, int]]:
    """Start and end of each run of ones."""
    edges = [idx for idx, (left, right) in enumerate(pairwise((0, *flags, 0))) if left != right]
    return list(zip(edges[::2], edges[1::2], strict=True))


def _cut_left(ids: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    width = int(mask.sum(-1).max())
    return ids[:, ids.size(1) - width :], mask[:, ids.size(1) - width :]
