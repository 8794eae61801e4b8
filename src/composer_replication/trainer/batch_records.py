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
SAMPLED = "is_sampled"
"""Under this name a batch says which completion ids (B, T) the policy sampled, before TRL has emptied any mask."""


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
    answers it, else its ids decoded; ``token_logp`` are the sampler's, where TRL has them. A row whose masks TRL has
    emptied, as its answer was cut off, has its turns all the same where ``SAMPLED`` is in the batch.
    """
    prompts = _kept(batch["prompt_ids"], batch["prompt_mask"])
    completions = batch["completion_ids"].tolist()
    is_sampled_BT = batch.get(SAMPLED, batch["completion_mask"] * batch.get("tool_mask", 1))
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


def sampled_tensor(
    completion_ids: Sequence[Sequence[int]], tool_masks: Sequence[Sequence[int]] | None, like_BT: torch.Tensor
) -> torch.Tensor:
    """1 for each id that the policy sampled, 0 for those of tools and for padding, of the shape of ``like_BT``."""
    flags = [[1] * len(ids) for ids in completion_ids] if tool_masks is None else tool_masks
    sampled_BT = torch.zeros_like(like_BT)
    for row, of_row in enumerate(flags):
        sampled_BT[row, : len(of_row)] = sampled_BT.new_tensor(list(of_row))
    return sampled_BT


def matched_turns(
    turns_by_row: Any,
    rollouts: Sequence[Rollout],
    *,
    strict: bool,
    are_samplers: bool = True,
) -> tuple[list[list[HintedTurn]], int]:
    """The hinted turns that are turns of their row id for id, with its log-probabilities, and how many are not.

    The hinted prompt must be the turn's with one run of ids put in, and a source's own log-probabilities the row's.

    Args:
        turns_by_row: what the hint source answered: of each rollout its hinted turns.
        rollouts: what it was asked about.
        strict: refuse a turn that does not match; otherwise it is left out.
        are_samplers: the log-probabilities of the rows are the sampler's. Where they were computed again, in another
            batch and maybe another precision, a source may know the sampler's own, and they are not compared.

    Raises:
        InputError: with ``strict``, a turn that was not sampled in its row, in another context or with other
            log-probabilities (CR0751).
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
    kept: list[list[HintedTurn]] = []
    num_left_out = 0
    for row, (turns, rollout) in enumerate(zip(turns_by_row, rollouts, strict=True)):
        logps = {(t.prompt_ids, t.completion.token_ids): t.completion.token_logp for t in rollout.turns}
        kept.append([])
        for turn in turns:
            problem = _mismatch(turn, logps, are_samplers=are_samplers)
            if not problem:
                known = logps[_key(turn)]
                kept[row].append(turn if turn.sampled_logp else replace(turn, sampled_logp=known))
            elif strict:
                raise misaligned(problem, f"row {row}")
            else:
                num_left_out += 1
    return kept, num_left_out


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


def _key(turn: HintedTurn) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return tuple(turn.prompt_ids), tuple(turn.completion_ids)


def _mismatch(turn: HintedTurn, logps: Mapping[Any, Sequence[float]], *, are_samplers: bool) -> str:
    """Why a hinted turn is none of its row, whose turns have these log-probabilities; empty if it is one."""
    if _key(turn) not in logps:
        return "a hinted turn is not, id for id, a turn of its row"
    if not differs_by_hint(turn):
        return OTHER_CONTEXT
    known = logps[_key(turn)]
    if are_samplers and known and turn.sampled_logp and not _are_close(turn.sampled_logp, known):
        return "the log-probabilities of a hinted turn are not those with which its row was sampled"
    return ""


def _are_close(given: Sequence[float], known: Sequence[float]) -> bool:
    """Equal but for the rounding to float32, which the row's have been through."""
    return len(given) == len(known) and all(
        math.isclose(one, other, rel_tol=1e-6, abs_tol=1e-6) for one, other in zip(given, known, strict=True)
    )


def _kept(values: torch.Tensor, mask: torch.Tensor) -> list[list[Any]]:
    return [row[kept].tolist() for row, kept in zip(values, mask.bool(), strict=True)]


def _sampled_logps(batch: Batch) -> list[list[float]] | None:
    """Log-probabilities by completion column: the sampler's, else those of the weights that sampled.

    The latter are forwarded under TRL's masks, so they are NaN, unknown, where these are 0.
    """
    if batch.get("sampling_per_token_logps") is not None:
        logps_BT = batch["sampling_per_token_logps"]
    elif batch.get("old_per_token_logps") is not None:
        logps_BT = batch["old_per_token_logps"].masked_fill(batch["completion_mask"] == 0, math.nan)
    else:
        return None
    rows: list[list[float]] = logps_BT.float().tolist()
    return rows


def _runs(flags: Sequence[int]) -> list[tuple[int, int]]:
    """Start and end of each run of ones."""
    edges = [idx for idx, (left, right) in enumerate(pairwise((0, *flags, 0))) if left != right]
    return list(zip(edges[::2], edges[1::2], strict=True))


def _cut_left(ids: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    width = int(mask.sum(-1).max())
    return ids[:, ids.size(1) - width :], mask[:, ids.size(1) - width :]
