"""What a teacher would have given to the student's own tokens at recorded steps: data for distillation.

The recorded prompt and action, as the student's template and tokenizer write them, are sent as ids to the completions API with
``prompt_logprobs`` (a field of vLLM's; ``serve-model`` has it, too). The answer says the log-probability of each id at temperature 1,
and its text, which tells whether the teacher has the student's tokenizer: an id means something else to another one.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from composer_replication.errors import InputError
from composer_replication.interfaces import Tokenizer
from composer_replication.traces import prompts
from composer_replication.traces.branches import Chosen, Report
from composer_replication.traces.pair_files import tokenised
from composer_replication.traces.pair_rules import HELD_OUT, HeldoutRows, Rows
from composer_replication.traces.teachers import Classroom, UnfitTeacher

_CUT_CHARACTER = "\ufffd"
"""Stands in the text of an id that is a part of a character; servers spell such texts in ways of their own."""


def scoring_rows(chosen: Sequence[Chosen], tokenizer: Tokenizer, heldout: HeldoutRows) -> Rows:
    """The ids of the prompt and of the recorded action at each step, and how many steps were dropped by reason."""
    rows, dropped = [], Counter[str]()
    chats: list[dict[str, Any]] = []
    for trace, idx, _ in chosen:
        sides = {"prompt": prompts.prompt_of(trace, idx), "action": [prompts.recorded_answer(trace, idx)]}
        chats.append({**sides, "tools": prompts.tools_of(trace), "task_id": trace.state.task_id})
    left_out = heldout(chats)
    for place, ((trace, idx, _), chat) in enumerate(zip(chosen, chats, strict=True)):
        try:
            ids = tokenised(chat, ("prompt", "action"), tokenizer, trace.trace_id)
        except InputError as error:
            dropped[error.message] += 1
            continue
        if place in left_out:
            dropped[HELD_OUT] += 1
            continue
        row = {"prompt_ids": list(ids[0]), "completion_ids": list(ids[1]), "trace_id": trace.trace_id}
        rows.append({**row, "step": idx, "prompt_origin": trace.prompt_origin})
    return rows, dropped


def scoring_request(row: dict[str, Any]) -> dict[str, Any]:
    """What a teacher is sent."""
    how = {"max_tokens": 1, "temperature": 0.0, "extra_body": {"prompt_logprobs": 0}}
    return {"prompt": row["prompt_ids"] + row["completion_ids"], **how}


async def scored_rows(
    rows: Sequence[dict[str, Any]], room: Classroom, tokenizer: Tokenizer, *, report: Report | None = None
) -> list[dict[str, Any]]:
    """Each row once for each teacher that answered, with ``teacher_logp`` of ``completion_ids`` and its ``source``."""
    decode = partial(tokenizer.decode, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def reader(row: dict[str, Any]) -> Callable[[Any], list[float]]:
        ids = row["completion_ids"]
        return partial(_scores_in, ids=ids, texts=[decode([token]) for token in ids])

    found = await room.ask_all(rows, scoring_request, reader, report)
    scores = [(row, name, logps) for row, own in zip(rows, found, strict=True) for name, logps in own.items()]
    return [{**row, "teacher_logp": logps, "source": name} for row, name, logps in scores if logps]


def _scores_in(choice: Any, *, ids: Sequence[int], texts: Sequence[str]) -> list[float]:
    """The log-probabilities of the last ids of the prompt."""
    if not isinstance(rows := choice.get("prompt_logprobs"), list):
        raise UnfitTeacher("it gives no log-probabilities of given tokens (prompt_logprobs)")
    own = [row[str(token)] for row, token in zip(rows[-len(ids) :], ids, strict=True)]
    for said, text in zip((row["decoded_token"] for row in own), texts, strict=True):
        if said != text and _CUT_CHARACTER not in said + text:
            raise UnfitTeacher(f"its tokenizer is another one than the student's: {said!r} is not {text!r}")
    logps = [float(row["logprob"]) for row in own]
    if not all(map(math.isfinite, logps)):
        raise ValueError("a log-probability that is no number")
    return logps
