"""Between TRL's batch of one generation and records: rollouts out of it, pairs into it.

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
from composer_replication.trainer.collator import (
    OTHER_CONTEXT,
    PairRows,
    TokenRows,
    differs_by_hint,
    misaligned,
)
from composer_replication.trainer.generation import SEGMENT_STARTS, loss_mask

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
    is_sampled_BT = loss_mask(batch)
    known_logps = (batch.get(f"{of}_per_token_logps") for of in ("sampling", "old"))
    logps_BT = next((logps for logps in known_logps if logps is not None), None)
    chains = batch[SEGMENT_STARTS].tolist() if SEGMENT_STARTS in batch else [[]] * len(prompts)
    rollouts = []
    for idx, (prompt, ids) in enumerate(zip(prompts, completions, strict=True)):
        turns = []
        for start, end in _runs(is_sampled_BT[idx].tolist()):
            logp = () if logps_BT is None else tuple(logps_BT[idx, start:end].float().tolist())
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
    """What the hint source answered to ``rollouts``: turns of their row id for id, with its log-probabilities where it has some."""
    if (
        not isinstance(turns_by_row, Sequence)
        or len(turns_by_row) != len(rollouts)
        or not all(isinstance(turn, HintedTurn) for turns in turns_by_row for turn in turns)
    ):
        words = "the hint source gave something else than one list of HintedTurn a rollout"
        raise misaligned(words, "hint_source")
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
    own = loss_mask(batch)
    may_pair = own.any(-1)
    if SEGMENT_STARTS in batch:
        may_pair = may_pair & ~batch[SEGMENT_STARTS].bool().any(-1)
    groups: dict[tuple[int, ...], tuple[list[int], list[int]]] = {}
    for row, prompt in enumerate(_kept(batch["prompt_ids"], batch["prompt_mask"])):
        reward = rewards[row]
        if reward is not None and may_pair[row]:
            groups.setdefault(tuple(prompt), ([], []))[0 if reward >= pass_reward else 1].append(row)
    pairs = [
        (chosen, rejected)
        for passing, failing in groups.values()
        for chosen, rejected in zip(passing, failing, strict=False)
        if not torch.equal(ids[chosen] * mask[chosen], ids[rejected] * mask[rejected])
    ]
    made = {
        "sibling_ids": torch.full_like(ids, pad_id),
        "sibling_mask": torch.zeros_like(mask),
        "sibling_loss_mask": torch.zeros_like(mask),
        "sibling_weight": torch.zeros(ids.size(0), device=ids.device),
    }
    for chosen, rejected in pairs:
        made["sibling_ids"][chosen], made["sibling_mask"][chosen] = ids[rejected], mask[rejected]
        made["sibling_loss_mask"][chosen], made["sibling_weight"][chosen] = own[rejected], 1.0
    return made


def sibling_rows_in(batch: Mapping[str, Any]) -> PairRows | None:
    """The sibling pairs that a batch carries, or None."""
    if "sibling_weight" not in batch or not batch["sibling_weight"].any():
        return None
    used = batch["sibling_weight"] > 0
    width = int(batch["prompt_mask"][used].sum(-1).max())
    prompt = [batch[name][used][:, -width:].repeat(2, 1) for name in ("prompt_ids", "prompt_mask")]
    chosen = (batch["completion_ids"], batch["completion_mask"], loss_mask(batch))
    rejected = (batch["sibling_ids"], batch["sibling_mask"], batch["sibling_loss_mask"])
    answers = [torch.cat([one[used], other[used]]) for one, other in zip(chosen, rejected, strict=True)]
    return PairRows(batch["sibling_weight"][used], TokenRows(*prompt, *answers))


def _kept(values: torch.Tensor, mask: torch.Tensor) -> list[list[Any]]:
    return [row[kept].tolist() for row, kept in zip(values, mask.bool(), strict=True)]


def _runs(flags: Sequence[int]) -> list[tuple[int, int]]:
    """Start and end of each run of ones."""
    edges = [idx for idx, (left, right) in enumerate(pairwise((0, *flags, 0))) if left != right]
    return list(zip(edges[::2], edges[1::2], strict=True))
