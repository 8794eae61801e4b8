"""Do preference pairs and hinted turns fit the model?

Asked before the first step: an id that the model has no row for ends in an index error from the depths of an embedding, and at
positions that the model was never trained at nothing would say anything.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from composer_replication.errors import InputError
from composer_replication.records import HintedTurn, PreferencePair


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
