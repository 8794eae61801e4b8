"""Hinted turns and preference pairs to tensors, and rollouts out of TRL's batch: which ids are forwarded, which carry loss.

Rows are padded on the right, so that under a causal mask no token sees padding. The ids are those of the records: nothing is
tokenised here. Loss lies on completions alone. Whether they fit the model is asked before the first step, since a model says
it late and badly, or not at all.

Letters: N rows, S columns of prompt and completion, M ids that carry loss, P pairs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from composer_replication.errors import ComposerError, InputError
from composer_replication.records import Completion, HintedTurn, PreferencePair, Rollout, StopReason, Turn
from composer_replication.rollouts.hints.hint_prompts import insertion
from composer_replication.trainer.generation import SEGMENT_STARTS, Generation, loss_mask

PASS_REWARD = 1.0
"""A row of a group passes from this reward on."""
Ids = Sequence[int]
Batch = dict[str, Any]


class TokenRows(NamedTuple):
    """Prompt and completion of each row; ``loss_mask_NS`` is 1 on the ids of completions that carry loss."""

    ids_NS: Tensor
    loss_mask_NS: Tensor


class HintedRows(NamedTuple):
    """The same completions after two prompts: what the policy saw, and the same with a hint.
    For each id that carries loss, row by row: the sampler's log-probability, NaN where it is not known, and its turn's weight.
    """

    student: TokenRows
    teacher: TokenRows
    sampled_logp_M: Tensor
    weight_M: Tensor


@dataclass(frozen=True, slots=True)
class SiblingPair(PreferencePair):
    """Two answers of one group."""

    chosen_mask: tuple[int, ...] = ()  # 1 on what was sampled, which carries loss
    rejected_mask: tuple[int, ...] = ()
    reference: tuple[float, ...] = (0.0, 0.0)  # log-probabilities of both under the first weights


def collate_hinted_turns(turns: Sequence[HintedTurn], *, pad_id: int) -> HintedRows:
    """Rows of turns that went wrong, at least one."""
    logps = [logp for turn in turns for logp in turn.sampled_logp or [math.nan] * len(turn.completion_ids)]
    weights = [turn.weight for turn in turns for _ in turn.completion_ids]
    return HintedRows(
        _token_rows([(turn.prompt_ids, turn.completion_ids) for turn in turns], pad_id=pad_id),
        _token_rows([(turn.hinted_prompt_ids, turn.completion_ids) for turn in turns], pad_id=pad_id),
        torch.tensor(logps),
        torch.tensor(weights, dtype=torch.float32),
    )


def collate_pairs(pairs: Sequence[PreferencePair], *, pad_id: int) -> TokenRows:
    """The chosen answers of P pairs, at least one, then the rejected ones to the same prompts, in 2 P rows."""
    rows = [(pair.prompt_ids, pair.chosen_ids) for pair in pairs]
    rows += [(pair.prompt_ids, pair.rejected_ids) for pair in pairs]
    masks = [getattr(pair, side, ()) for side in ("chosen_mask", "rejected_mask") for pair in pairs]
    return _token_rows(rows, masks, pad_id=pad_id)


def _token_rows(rows: Sequence[tuple[Ids, Ids]], loss_masks: Sequence[Ids] = (), *, pad_id: int) -> TokenRows:
    """Pad prompts and completions to rows; without a mask, or where it is empty, every completion id carries loss."""
    given = loss_masks or [()] * len(rows)
    masks = [mask or [1] * len(ids) for (_, ids), mask in zip(rows, given, strict=True)]
    ids = [torch.tensor([*prompt, *completion]) for prompt, completion in rows]
    loss = [torch.tensor([0] * len(prompt) + [*mask]) for (prompt, _), mask in zip(rows, masks, strict=True)]
    ids_NS = pad_sequence(ids, batch_first=True, padding_value=pad_id)
    return TokenRows(ids_NS, pad_sequence(loss, batch_first=True))


def check_pairs(pairs: Sequence[PreferencePair]) -> None:
    """Refuse pairs that say nothing: nothing to score, twice the same answer (CR0751), or an odd weight (CR0722)."""
    for row, pair in enumerate(pairs):
        if not (pair.prompt_ids and pair.chosen_ids and pair.rejected_ids):
            words, fix = "a prompt or an answer has no ids", "leave the pair out: there is nothing to score."
            raise _misaligned(words, f"pair {row}", fix)
        if tuple(pair.chosen_ids) == tuple(pair.rejected_ids):
            words = "the chosen and the rejected answer are the same ids"
            raise _misaligned(words, f"pair {row}", "leave the pair out: nothing is preferred in it.")
        refuse_odd_weight(pair.weight, f"pair {row}")


def refuse_odd_weight(weight: Any, where: str, *, error: type[ComposerError] = InputError) -> None:
    """A weight is a finite number of at least 0 (CR0722); True would silently be 1."""
    is_number = isinstance(weight, Real) and not isinstance(weight, bool)
    if not is_number or not 0.0 <= weight < math.inf:
        words = f"the weight {weight!r} is not a finite number of at least 0."
        raise error("CR0722", words, where=where, fix="give a weight of 0 or above.")


def _misaligned(
    sentence: str, where: str, fix: str = "take ids as they were sampled, never tokenise text again."
) -> InputError:
    return InputError("CR0751", f"{sentence}.", where=where, fix=fix)


def refuse_unfit_pairs(
    pairs: Sequence[PreferencePair], model: Any, *, name: Callable[[int], str] = "pair {}".format
) -> None:
    """Refuse ids outside the model's vocabulary (CR0751) and a prompt and answer longer than its context (CR0705).
    ``name`` says where the pair of that index comes from.
    """
    for idx, pair in enumerate(pairs):
        for answer in (pair.chosen_ids, pair.rejected_ids):
            _refuse_unfit((*pair.prompt_ids, *answer), model, name(idx))


def _refuse_unfit(ids: Ids, model: Any, where: str) -> None:
    num_ids = int(model.config.get_text_config().vocab_size)  # rows of the embedding
    most = num_positions(model)
    if odd := [one for one in ids if not 0 <= one < num_ids]:
        words = f"the id {odd[0]} is outside the model's vocabulary of {num_ids}"
        fix = "make the ids with this model's tokenizer, give texts in their place, or leave the record out."
        raise _misaligned(words, where, fix)
    if most is not None and len(ids) > most:
        words = f"prompt and answer take {len(ids)} tokens; the model has {most} positions."
        raise InputError("CR0705", words, where=where, fix="shorten the record or leave it out.")


def num_positions(model: Any) -> int | None:
    """How many tokens the model's context holds; None where its configuration does not say."""
    most = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return None if most is None else int(most)


def rollouts_of(
    generation: Generation, tokenizer: Any, *, step: int, eos_token_ids: Collection[int]
) -> list[Rollout]:
    """One rollout a row; a run of sampled ids between tool output is a turn.

    The prompt of a turn begins with its conversation, which in a chained row (``rollout_columns``) need not be the first.
    ``task_id`` is the row's column of that name, else its prompt; ``token_logp`` the sampler's. A row whose mask TRL has
    emptied (an answer cut off) has no turn.
    """
    rows, batch, rewards = generation.rows, generation.batch, generation.own_rewards()
    prompts, is_sampled_BT = _kept(batch["prompt_ids"], batch["prompt_mask"]), loss_mask(batch)
    known_logps = (batch.get(f"{of}_per_token_logps") for of in ("sampling", "old"))
    logps_BT = next((logps for logps in known_logps if logps is not None), None)
    chains = batch[SEGMENT_STARTS].tolist() if SEGMENT_STARTS in batch else [[]] * len(prompts)
    rollouts = []
    for idx, (prompt, ids) in enumerate(zip(prompts, batch["completion_ids"].tolist(), strict=True)):
        turns = []
        for start, end in _runs(is_sampled_BT[idx].tolist()):
            logp = () if logps_BT is None else tuple(logps_BT[idx, start:end].float().tolist())
            known = logp if all(math.isfinite(value) for value in logp) else ()
            text = tokenizer.decode(ids[start:end], skip_special_tokens=True)
            reason = StopReason.FINISHED if ids[end - 1] in eos_token_ids else StopReason.LENGTH
            opened = max((place for place in chains[idx] if place <= start), default=0)
            before = tuple(ids[opened:start]) if opened else (*prompt, *ids[:start])
            turns.append(Turn(before, Completion(tuple(ids[start:end]), text, reason, known)))
        task_id = str(rows[idx].get("task_id") or rows[idx].get("prompt", ""))
        reason = turns[-1].completion.stop_reason if turns else StopReason.LENGTH
        rollouts.append(Rollout(task_id, step, tuple(turns), rewards[idx], None, reason, 0.0))
    return rollouts


def matched_turns(
    turns_by_row: Any, rollouts: Sequence[Rollout], model: Any
) -> tuple[list[list[HintedTurn]], int]:
    """The hint source's answer to ``rollouts``: each turn must be one of its row, id for id, whose log-probabilities it gets.

    Turns that their hint makes longer than the model's context are left out; how many these are comes along. A run does not end
    because one hint met a conversation that was nearly full; an id outside the vocabulary does end it.
    """
    given = turns_by_row if isinstance(turns_by_row, Sequence) else ()
    each = [turn for turns in given for turn in (turns if isinstance(turns, Sequence) else [None])]
    if len(given) != len(rollouts) or not all(isinstance(turn, HintedTurn) for turn in each):
        words = f"the hint source gave something else than a list of HintedTurn for each of {len(rollouts)} rollouts"
        fix = "let hinted_turns give one list a rollout, empty where it has no hint."
        raise _misaligned(words, "hint_source", fix)
    matched: list[list[HintedTurn]] = [[] for _ in rollouts]
    num_too_long, most = 0, num_positions(model) or math.inf
    for row, (turns, rollout) in enumerate(zip(turns_by_row, rollouts, strict=True)):
        where = f"row {row}"
        known = {(t.prompt_ids, t.completion.token_ids): t.completion.token_logp for t in rollout.turns}
        for turn in turns:
            prompt, hinted, ids = map(tuple, (turn.prompt_ids, turn.hinted_prompt_ids, turn.completion_ids))
            if (prompt, ids) not in known:
                raise _misaligned("a hinted turn is not, id for id, a turn of its row", where)
            if prompt != hinted and insertion(prompt, hinted) is None:
                words = "the hinted prompt of a turn is not its prompt with one run of ids put in"
                raise _misaligned(words, where)
            logps = known[prompt, ids] or turn.sampled_logp
            if len(logps) not in (0, len(ids)):
                raise _misaligned(f"{len(ids)} sampled ids have {len(logps)} log-probabilities", where)
            refuse_odd_weight(turn.weight, where)
            if len(hinted) + len(ids) > most:
                num_too_long += 1
            else:
                _refuse_unfit((*hinted, *ids), model, where)
                matched[row].append(replace(turn, sampled_logp=logps))
    return matched, num_too_long


def sibling_pairs(batch: Batch, rewards: Sequence[float | None]) -> list[list[SiblingPair]]:
    """For each row, the pair in which it passed, if any: passing rows of a group paired with failing ones.

    Groups are rows with equal prompts. The i-th passing row is paired with the i-th failing one, so a row is
    in at most one pair; answers that are the same ids, empty answers, rows without a reward and chains of several
    conversations are in none.
    """
    own_mask = loss_mask(batch)
    may_pair = own_mask.any(-1)
    if SEGMENT_STARTS in batch:
        may_pair = may_pair & ~batch[SEGMENT_STARTS].bool().any(-1)
    prompts = _kept(batch["prompt_ids"], batch["prompt_mask"])
    answers, masks = (_kept(each, batch["completion_mask"]) for each in (batch["completion_ids"], own_mask))
    groups: dict[tuple[int, ...], tuple[list[int], list[int]]] = {}
    for row, (prompt, reward) in enumerate(zip(prompts, rewards, strict=True)):
        if reward is not None and may_pair[row]:
            groups.setdefault(tuple(prompt), ([], []))[0 if reward >= PASS_REWARD else 1].append(row)
    pairs: list[list[SiblingPair]] = [[] for _ in prompts]
    for group, sides in groups.items():
        for passed, failed in zip(*sides, strict=False):
            ids = tuple(answers[passed]), tuple(answers[failed])
            if ids[0] != ids[1]:
                own = tuple(masks[passed]), tuple(masks[failed])
                pairs[passed].append(SiblingPair(group, *ids, chosen_mask=own[0], rejected_mask=own[1]))
    return pairs


def _kept(values: Tensor, mask: Tensor) -> list[list[Any]]:
    return [row[kept].tolist() for row, kept in zip(values, mask.bool(), strict=True)]


def _runs(flags: Sequence[int]) -> list[tuple[int, int]]:
    edges = [idx for idx, (left, right) in enumerate(pairwise((0, *flags, 0))) if left != right]
    return list(zip(edges[::2], edges[1::2], strict=True))
