"""Do the prompts of the training data fit the model: a chat template where they are messages, and room for an answer?

Asked before the first step. Without a template the first generation would end in an error of the tokenizer, and at
positions that the model was never trained at nothing would say anything. The same for preference pairs and hinted turns:
an id that the model has no row for ends in an index error from the depths of an embedding.
"""

from __future__ import annotations

import heapq
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from datasets import Dataset
from transformers import PreTrainedTokenizerBase
from trl import is_conversational

from composer_replication.errors import InputError
from composer_replication.records import HintedTurn, PreferencePair
from composer_replication.trainer.policy import chat_prompt_ids

logger = logging.getLogger(__name__)

MOST_READ = 100_000
"""Of a larger data set so many rows are read, evenly spread, so that a run of millions begins at once."""
MOST_TOKENISED = 256
"""Of the rows that were read the longest, by bytes, are tokenised."""


def refuse_unfit_prompts(
    dataset: Any,
    tokenizer: Any,
    model: Any,
    *,
    template_options: Mapping[str, Any],
    max_new_tokens: int | None,
) -> None:
    """Look at the column ``prompt`` of a data set; one that is a stream, or made row by row, is not read.

    A prompt that fills the model's positions is refused. One whose longest answer would go past them is warned about.

    Args:
        dataset: the training data.
        tokenizer: the model's; with a processor of images as well no length is looked at.
        model: as transformers loads it.
        template_options: arguments of the chat template besides the messages.
        max_new_tokens: of an answer, if there is such a limit.

    Raises:
        InputError: messages without a chat template (CR0810), a prompt that leaves no room for an answer (CR0705), or that
            the template does not take (CR0810).
    """
    if not isinstance(dataset, Dataset) or "prompt" not in dataset.column_names or not len(dataset):
        return
    if dataset.format["type"] == "custom":  # a transform of the user's, which may cost anything
        return
    _refuse_missing_template(dataset[0], tokenizer, template_options)
    limit = num_positions(model)
    if limit is None or not isinstance(tokenizer, PreTrainedTokenizerBase):
        return
    sized = ((len(str(prompt).encode()), idx, prompt) for idx, prompt in _prompts(dataset))
    longest = 0
    for _, idx, prompt in heapq.nlargest(MOST_TOKENISED, sized, key=lambda row: row[0]):
        longest = max(longest, length := prompt_length(tokenizer, prompt, **template_options))
        if length >= limit:
            raise InputError(
                "CR0705",
                f"the prompt takes {length} tokens and the model has {limit} positions: there is no room for an answer.",
                where=f"train_dataset[{idx}]",
                fix="shorten the prompt, leave it out, or take a model with a longer context.",
            )
    if longest + (max_new_tokens or 0) > limit:
        logger.warning(
            "a prompt of %d tokens and an answer of trl.max_completion_length = %d go past the model's %d positions.",
            longest,
            max_new_tokens,
            limit,
        )


def prompt_length(tokenizer: Any, prompt: Any, **template_options: Any) -> int:
    """Tokens of a prompt, messages with their template.

    Raises:
        InputError: the template does not take them (CR0810).
    """
    if isinstance(prompt, str):
        return len(tokenizer(text=prompt)["input_ids"])
    return len(chat_prompt_ids(tokenizer, prompt, **template_options))


def _refuse_missing_template(row: Mapping[str, Any], tokenizer: Any, options: Mapping[str, Any]) -> None:
    has_one = getattr(tokenizer, "chat_template", None) or options.get("chat_template")
    if is_conversational({"prompt": row["prompt"]}) and not has_one:
        raise InputError(
            "CR0810",
            "the tokenizer has no chat template, and the prompts are messages.",
            where="ComposerReplicationTrainer(processing_class=, train_dataset=)",
            fix="take an instruction-tuned model, set tokenizer.chat_template, or give prompts as texts.",
        )


def _prompts(dataset: Dataset) -> Iterator[tuple[int, Any]]:
    """Number and prompt of at most ``MOST_READ`` rows."""
    column = dataset.select_columns(["prompt"])
    stride = -(-len(column) // MOST_READ)
    chosen = range(0, len(column), stride)
    rows = column if stride == 1 else column.select(chosen)
    for idx, row in zip(chosen, rows, strict=True):
        yield idx, row["prompt"]


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
