"""Hinted turns and preference pairs to tensors: which ids are forwarded, and which of them carry loss.

Prompts are padded on the left and completions on the right, so that completion column 0 follows the
last prompt column in every row. The ids are those of the records: nothing is tokenised here.
Loss lies on completions alone: prompts (hints in them included) and padding never carry it. The rows of whole
rollouts, in which the tools' words carry none either, are made where they are played (``rollouts.generations``).

Whether they fit the model is asked before the first step: an id that the model has no row for ends in an index error from
the depths of an embedding, and at positions that it was never trained at nothing would say anything.

Letters: N rows, P prompt columns, T completion columns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Self

import torch

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


@dataclass(frozen=True, slots=True)
class TokenRows(_Rows):
    """Prompt and completion of each row; masks are 1 for tokens. ``loss_mask_NT`` is within ``completion_mask_NT``."""

    prompt_ids_NP: torch.Tensor
    prompt_mask_NP: torch.Tensor
    completion_ids_NT: torch.Tensor
    completion_mask_NT: torch.Tensor
    loss_mask_NT: torch.Tensor

    def __len__(self) -> int:
        return self.prompt_ids_NP.size(0)


@dataclass(frozen=True, slots=True)
class HintedRows(_Rows):
    """The same completions after two prompts: what the policy saw, and the same with a hint.

    ``completions`` exist once: ``student`` and ``teacher`` share the very tensors, so that their positions are
    the same ids by construction. ``sampled_logp_NT`` is NaN where the sampler's log-probability is not known.
    """

    student: TokenRows
    teacher: TokenRows
    sampled_logp_NT: torch.Tensor
    weight_N: torch.Tensor

    def __len__(self) -> int:
        return len(self.student)


@dataclass(frozen=True, slots=True)
class PairRows(_Rows):
    """Preference pairs: row p of ``chosen`` and of ``rejected`` have the same prompt."""

    chosen: TokenRows
    rejected: TokenRows
    weight_P: torch.Tensor

    def __len__(self) -> int:
        return len(self.chosen)

    def stacked(self) -> TokenRows:
        """Chosen rows, then rejected ones, in one batch of 2 P rows."""
        names = [part.name for part in fields(TokenRows)]
        return TokenRows(
            *(_stacked(getattr(self.chosen, name), getattr(self.rejected, name)) for name in names)
        )


def collate_hinted_turns(turns: Sequence[HintedTurn], *, pad_id: int) -> HintedRows:
    """Rows of turns that went wrong.

    Args:
        turns: at least one.
        pad_id: what fills the padding; its value does not matter to any result.

    Raises:
        InputError: an empty prompt or completion (CR0751), ids and log-probabilities that differ in number
            (CR0751), a weight below zero or not finite (CR0722).
    """
    for row, turn in enumerate(turns):
        where = f"hinted turn {row}"
        for ids in (turn.prompt_ids, turn.hinted_prompt_ids, turn.completion_ids):
            _refuse_empty(ids, where)
        _refuse_weight(turn.weight, where)
        if turn.sampled_logp and len(turn.sampled_logp) != len(turn.completion_ids):
            raise misaligned(
                f"{len(turn.completion_ids)} sampled ids have {len(turn.sampled_logp)} log-probabilities",
                where,
            )
    completions = [turn.completion_ids for turn in turns]
    student = token_rows([turn.prompt_ids for turn in turns], completions, pad_id=pad_id)
    hinted_ids, hinted_mask = padded([turn.hinted_prompt_ids for turn in turns], pad_id=pad_id, on_left=True)
    teacher = TokenRows(
        hinted_ids, hinted_mask, student.completion_ids_NT, student.completion_mask_NT, student.loss_mask_NT
    )
    return HintedRows(
        student,
        teacher,
        _padded_logp([t.sampled_logp for t in turns], student.completion_ids_NT.size(1)),
        _floats([t.weight for t in turns]),
    )


def collate_pairs(pairs: Sequence[PreferencePair], *, pad_id: int) -> PairRows:
    """Rows of preference pairs.

    Raises:
        InputError: an empty prompt or completion (CR0751), chosen equal to rejected (CR0751), a weight below
            zero or not finite (CR0722).
    """
    check_pairs(pairs)
    prompts = [pair.prompt_ids for pair in pairs]
    return PairRows(
        token_rows(prompts, [pair.chosen_ids for pair in pairs], pad_id=pad_id),
        token_rows(prompts, [pair.rejected_ids for pair in pairs], pad_id=pad_id),
        _floats([pair.weight for pair in pairs]),
    )


def token_rows(prompts: Sequence[Ids], completions: Sequence[Ids], *, pad_id: int) -> TokenRows:
    """Pad ids to rows; every completion id carries loss."""
    prompt_ids, prompt_mask = padded(prompts, pad_id=pad_id, on_left=True)
    ids, mask = padded(completions, pad_id=pad_id)
    return TokenRows(prompt_ids, prompt_mask, ids, mask, mask)


def padded(rows: Sequence[Ids], *, pad_id: int, on_left: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and their mask, both (N, longest row), int64."""
    width = max(map(len, rows), default=0)
    ids = torch.full((len(rows), width), pad_id, dtype=torch.long)
    mask = torch.zeros((len(rows), width), dtype=torch.long)
    for row, tokens in enumerate(rows):
        columns = slice(width - len(tokens), width) if on_left else slice(0, len(tokens))
        ids[row, columns] = torch.tensor(tokens, dtype=torch.long)
        mask[row, columns] = 1
    return ids, mask


def check_pairs(pairs: Sequence[PreferencePair]) -> None:
    """Refuse pairs that say nothing; errors as ``collate_pairs``."""
    for row, pair in enumerate(pairs):
        where = f"pair {row}"
        for ids in (pair.prompt_ids, pair.chosen_ids, pair.rejected_ids):
            _refuse_empty(ids, where)
        _refuse_weight(pair.weight, where)
        if tuple(pair.chosen_ids) == tuple(pair.rejected_ids):
            raise InputError(
                "CR0751",
                "the chosen and the rejected answer are the same ids.",
                where=where,
                fix="leave the pair out: nothing is preferred in it.",
            )


def refuse_other_contexts(turns: Sequence[HintedTurn]) -> None:
    """Recorded turns whose two prompts differ by more than the hint.

    Raises:
        InputError: there is one (CR0751).
    """
    for row, turn in enumerate(turns):
        if not differs_by_hint(turn):
            raise misaligned(
                OTHER_CONTEXT,
                f"hinted turn {row}",
                fix="put the hint's ids into prompt_ids at one place.",
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
    return InputError(
        "CR0751",
        f"{sentence}.",
        where=where,
        fix=fix or "take ids as they were sampled, never tokenise text again.",
    )


def _stacked(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """One above the other, both padded on the right with zeros; prompts are of equal width already."""
    width = max(first.size(1), second.size(1))
    return torch.cat([torch.nn.functional.pad(part, (0, width - part.size(1))) for part in (first, second)])


def _padded_logp(rows: Sequence[Sequence[float]], width: int) -> torch.Tensor:
    logp = torch.full((len(rows), width), math.nan)
    for row, values in enumerate(rows):
        logp[row, : len(values)] = _floats(values)
    return logp


def _floats(values: Sequence[float]) -> torch.Tensor:
    return torch.tensor(list(values), dtype=torch.float32)


def _refuse_empty(ids: Sequence[object], where: str) -> None:
    if not ids:
        raise InputError(
            "CR0751",
            "a prompt or a completion has no ids.",
            where=where,
            fix="leave the record out: there is nothing to score.",
        )


def _refuse_weight(weight: float, where: str) -> None:
    if not (math.isfinite(weight) and weight >= 0.0):
        raise InputError(
            "CR0722",
            f"the weight {weight} is not a finite number of at least 0.",
            where=where,
            fix="give a weight of 0 or above.",
        )


def refuse_unfit_pairs(
    pairs: Sequence[PreferencePair], model: Any, *, name: Callable[[int], str] = "pair {}".format
) -> None:
    """Compare pairs with the model's vocabulary and context.

    Args:
        pairs: to be trained on.
        model: as transformers loads it, with adapters or without.
        name: where the pair of that index comes from, for the message.

    Raises:
        InputError: an id outside the vocabulary (CR0751), a prompt and an answer longer than the context (CR0705).
    """
    for idx, pair in enumerate(pairs):
        for answer in (pair.chosen_ids, pair.rejected_ids):
            _refuse_unfit((*pair.prompt_ids, *answer), model, name, idx)


def refuse_unfit_turns(turns: Sequence[HintedTurn], model: Any) -> None:
    """The same for hinted turns; both prompts are looked at. Errors as ``refuse_unfit_pairs``."""
    for idx, turn in enumerate(turns):
        for prompt in (turn.prompt_ids, turn.hinted_prompt_ids):
            _refuse_unfit((*prompt, *turn.completion_ids), model, "hinted turn {}".format, idx)


def turns_that_fit(
    turns_by_row: Sequence[Sequence[HintedTurn]], model: Any
) -> tuple[list[list[HintedTurn]], int]:
    """Turns of a generation without those that their hint makes longer than the context, and how many these are.

    A run does not end because one hint met a conversation that was nearly full.

    Raises:
        InputError: an id outside the vocabulary (CR0751).
    """
    most = num_positions(model)
    kept: list[list[HintedTurn]] = []
    for turns in turns_by_row:
        lengths = [max(len(t.prompt_ids), len(t.hinted_prompt_ids)) + len(t.completion_ids) for t in turns]
        kept.append([t for t, length in zip(turns, lengths, strict=True) if most is None or length <= most])
        refuse_unfit_turns(kept[-1], model)
    return kept, sum(map(len, turns_by_row)) - sum(map(len, kept))


def _refuse_unfit(ids: Sequence[int], model: Any, name: Callable[[int], str], idx: int) -> None:
    num_ids, most = _num_ids(model), num_positions(model)
    if max(ids) >= num_ids or min(ids) < 0:
        odd = next(one for one in ids if not 0 <= one < num_ids)
        raise InputError(
            "CR0751",
            f"the id {odd} is outside the model's vocabulary of {num_ids}.",
            where=name(idx),
            fix="make the ids with this model's tokenizer, give texts in their place, or leave the record out.",
        )
    if most is not None and len(ids) > most:
        raise InputError(
            "CR0705",
            f"prompt and answer take {len(ids)} tokens; the model has {most} positions.",
            where=name(idx),
            fix="shorten the record or leave it out.",
        )


def _num_ids(model: Any) -> int:
    """Rows of the embedding, which may be some more than the tokenizer has ids."""
    return int(model.config.get_text_config().vocab_size)


def num_positions(model: Any) -> int | None:
    """How many tokens the model's context holds; None where its configuration does not say."""
    most = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return None if most is None else int(most)
