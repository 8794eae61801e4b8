"""Hinted turns and preference pairs to tensors: which ids are forwarded, and which of them carry loss.

Prompts are padded on the left and completions on the right, so that completion column 0 follows the
last prompt column in every row. The ids are those of the records: nothing is tokenised here.
Loss lies on completions alone: prompts (hints in them included) and padding never carry it. The rows of whole
rollouts, in which the tools' words carry none either, are made where they are played (``rollouts.episodes``).

Whether they fit the model is asked before the first step: an id that the model has no row for ends in an index error from
the depths of an embedding, and at positions that it was never trained at nothing would say anything.

Letters: N rows, P prompt columns, T completion columns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import torch
from torch.nn.utils.rnn import pad_sequence

from composer_replication.errors import InputError
from composer_replication.records import HintedTurn, PreferencePair

Ids = Sequence[int]
OTHER_CONTEXT = "the hinted prompt of a turn is not its prompt with one run of ids put in"


class _Rows:
    """Tensors of the same rows."""

    __slots__ = ()

    def to(self, device: torch.device) -> Self:
        """The same rows on a device."""
        moved = {part.name: getattr(self, part.name).to(device) for part in fields(self)}  # type: ignore[arg-type]
        return type(self)(**moved)

    def __len__(self) -> int:
        return len(getattr(self, fields(self)[0].name))  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class TokenRows(_Rows):
    """Prompt and completion of each row; masks are 1 for tokens. ``loss_mask_NT`` is within ``completion_mask_NT``."""

    prompt_ids_NP: torch.Tensor
    prompt_mask_NP: torch.Tensor
    completion_ids_NT: torch.Tensor
    completion_mask_NT: torch.Tensor
    loss_mask_NT: torch.Tensor


@dataclass(frozen=True, slots=True)
class HintedRows(_Rows):
    """The same completions after two prompts: what the policy saw, and the same with a hint.

    ``student`` and ``teacher`` share the very tensors of the completions, so that their positions are the same ids by
    construction. ``sampled_logp_NT`` is NaN where the sampler's log-probability is not known.
    """

    student: TokenRows
    teacher: TokenRows
    sampled_logp_NT: torch.Tensor
    weight_N: torch.Tensor


@dataclass(frozen=True, slots=True)
class PairRows(_Rows):
    """P preference pairs: the chosen answers, then the rejected ones to the same prompts, in 2 P rows."""

    weight_P: torch.Tensor
    answers: TokenRows


def collate_hinted_turns(turns: Sequence[HintedTurn], *, pad_id: int) -> HintedRows:
    """Rows of turns that went wrong, at least one. What cannot be scored is refused (CR0751, CR0722)."""
    completions = [turn.completion_ids for turn in turns]
    student = token_rows([turn.prompt_ids for turn in turns], completions, pad_id=pad_id)
    ids, mask = padded([turn.hinted_prompt_ids for turn in turns], pad_id=pad_id, on_left=True)
    logp_NT = torch.full(student.completion_ids_NT.shape, math.nan)
    for row, turn in enumerate(turns):
        where = f"hinted turn {row}"
        _check(where, turn.weight, turn.prompt_ids, turn.hinted_prompt_ids, turn.completion_ids)
        num_ids, num_logps = len(turn.completion_ids), len(turn.sampled_logp)
        if num_logps not in (0, num_ids):
            raise misaligned(f"{num_ids} sampled ids have {num_logps} log-probabilities", where)
        logp_NT[row, :num_logps] = torch.tensor(turn.sampled_logp)
    teacher = replace(student, prompt_ids_NP=ids, prompt_mask_NP=mask)
    return HintedRows(student, teacher, logp_NT, _weights(turns))


def collate_pairs(pairs: Sequence[PreferencePair], *, pad_id: int) -> PairRows:
    """Rows of preference pairs; errors as ``check_pairs``."""
    check_pairs(pairs)
    completions = [pair.chosen_ids for pair in pairs] + [pair.rejected_ids for pair in pairs]
    answers = token_rows([pair.prompt_ids for pair in pairs] * 2, completions, pad_id=pad_id)
    return PairRows(_weights(pairs), answers)


def _weights(records: Sequence[HintedTurn] | Sequence[PreferencePair]) -> torch.Tensor:
    return torch.tensor([record.weight for record in records], dtype=torch.float32)


def token_rows(prompts: Sequence[Ids], completions: Sequence[Ids], *, pad_id: int) -> TokenRows:
    """Pad ids to rows; every completion id carries loss."""
    ids, mask = padded(completions, pad_id=pad_id)
    return TokenRows(*padded(prompts, pad_id=pad_id, on_left=True), ids, mask, mask)


def padded(rows: Sequence[Ids], *, pad_id: int, on_left: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and their mask, both (N, longest row), int64."""
    parts = [torch.tensor(tokens, dtype=torch.long) for tokens in rows]
    side = "left" if on_left else "right"
    ids = pad_sequence(parts, batch_first=True, padding_value=pad_id, padding_side=side)
    mask = pad_sequence([torch.ones_like(part) for part in parts], batch_first=True, padding_side=side)
    return ids, mask


def check_pairs(pairs: Sequence[PreferencePair]) -> None:
    """Refuse pairs that say nothing: nothing to score, twice the same answer (CR0751), or an odd weight (CR0722)."""
    for row, pair in enumerate(pairs):
        where = f"pair {row}"
        _check(where, pair.weight, pair.prompt_ids, pair.chosen_ids, pair.rejected_ids)
        if tuple(pair.chosen_ids) == tuple(pair.rejected_ids):
            words = "the chosen and the rejected answer are the same ids"
            raise misaligned(words, where, fix="leave the pair out: nothing is preferred in it.")


def _check(where: str, weight: float, *parts: Ids) -> None:
    if not all(parts):
        words = "a prompt or a completion has no ids"
        raise misaligned(words, where, fix="leave the record out: there is nothing to score.")
    if not (math.isfinite(weight) and weight >= 0.0):
        raise InputError(
            "CR0722",
            f"the weight {weight} is not a finite number of at least 0.",
            where=where,
            fix="give a weight of 0 or above.",
        )


def differs_by_hint(turn: HintedTurn) -> bool:
    """Whether the hinted prompt is the prompt with one run of ids put in, or the prompt itself.

    Every hint that ``rollouts.hints`` writes is one: it copies the prompt's ids, and takes no place where they would change.
    """
    prompt, hinted = tuple(turn.prompt_ids), tuple(turn.hinted_prompt_ids)
    num_added = len(hinted) - len(prompt)
    differing = (idx for idx, (one, other) in enumerate(zip(prompt, hinted, strict=False)) if one != other)
    start = next(differing, len(prompt))
    return num_added >= 0 and prompt[start:] == hinted[start + num_added :]


def misaligned(sentence: str, where: str, *, fix: str = "") -> InputError:
    """The error for ids that do not line up."""
    fix = fix or "take ids as they were sampled, never tokenise text again."
    return InputError("CR0751", f"{sentence}.", where=where, fix=fix)


# ---- what the model can score -------------------------------------------------------------------------


def refuse_unfit_pairs(
    pairs: Sequence[PreferencePair], model: Any, *, name: Callable[[int], str] = "pair {}".format
) -> None:
    """Refuse ids outside the model's vocabulary (CR0751) and a prompt and answer longer than its context (CR0705).

    ``name`` says where the pair of that index comes from.
    """
    for idx, pair in enumerate(pairs):
        for answer in (pair.chosen_ids, pair.rejected_ids):
            _refuse_unfit((*pair.prompt_ids, *answer), model, name(idx))


def refuse_unfit_turns(turns: Sequence[HintedTurn], model: Any) -> None:
    """The same for hinted turns; both prompts are looked at."""
    for idx, turn in enumerate(turns):
        for prompt in (turn.prompt_ids, turn.hinted_prompt_ids):
            _refuse_unfit((*prompt, *turn.completion_ids), model, f"hinted turn {idx}")


def turns_that_fit(
    turns_by_row: Sequence[Sequence[HintedTurn]], model: Any
) -> tuple[list[list[HintedTurn]], int]:
    """Turns of a generation without those that their hint makes longer than the context, and how many these are.

    A run does not end because one hint met a conversation that was nearly full; an id outside the vocabulary does end it.
    """
    most = num_positions(model)
    kept: list[list[HintedTurn]] = []
    for turns in turns_by_row:
        lengths = [max(len(t.prompt_ids), len(t.hinted_prompt_ids)) + len(t.completion_ids) for t in turns]
        kept.append([t for t, length in zip(turns, lengths, strict=True) if most is None or length <= most])
        refuse_unfit_turns(kept[-1], model)
    return kept, sum(map(len, turns_by_row)) - sum(map(len, kept))


def _refuse_unfit(ids: Ids, model: Any, where: str) -> None:
    num_ids = int(model.config.get_text_config().vocab_size)  # rows of the embedding
    most = num_positions(model)
    if odd := [one for one in ids if not 0 <= one < num_ids]:
        words = f"the id {odd[0]} is outside the model's vocabulary of {num_ids}"
        fix = "make the ids with this model's tokenizer, give texts in their place, or leave the record out."
        raise misaligned(words, where, fix=fix)
    if most is not None and len(ids) > most:
        raise InputError(
            "CR0705",
            f"prompt and answer take {len(ids)} tokens; the model has {most} positions.",
            where=where,
            fix="shorten the record or leave it out.",
        )


def num_positions(model: Any) -> int | None:
    """How many tokens the model's context holds; None where its configuration does not say."""
    most = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return None if most is None else int(most)
