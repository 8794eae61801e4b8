r"""Preference pairs in a file: one JSON object a line, in the two shapes of TRL's preference data sets.

    {"prompt": "def f(x):\n", "chosen": "    return x\n", "rejected": "    pass\n"}
    {"prompt": [{"role": "user", "content": "…"}], "chosen": [{"role": "assistant", "content": "…"}], "rejected": […]}

``weight`` and ``source`` may stand beside them, and ``tools`` (a list, or its JSON) beside messages; other keys are passed over.
A Parquet file has the same rows, as ``traces pairs`` writes them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from composer_replication.errors import InputError, needs_extra
from composer_replication.interfaces import Tokenizer
from composer_replication.records import PreferencePair
from composer_replication.traces.json_values import parsed

_SIDES = ("prompt", "chosen", "rejected")
PairRow = dict[str, Any]


def read_pair_rows(path: Path) -> dict[str, PairRow]:
    """The pairs of a file by their places (``FILE:LINE``), their shape checked and nothing tokenised.

    Raises:
        InputError: the file cannot be read or is empty, a line is neither of the two shapes, or all weigh 0 (CR0751).
        MissingError: Parquet needs pyarrow (CR0101).
    """
    try:
        # ``str.splitlines`` cuts at signs that JSON texts may hold, too
        is_parquet = path.suffix == ".parquet"
        lines = _parquet_rows(path) if is_parquet else path.read_text(encoding="utf-8").split("\n")
    except (OSError, ValueError) as error:
        raise _unusable(f"the file of pairs cannot be read: {error!s:.200}", str(path)) from error
    places = ((f"{path}:{number}", line) for number, line in enumerate(lines, start=1))
    rows = {place: _row(line, place) for place, line in places if not isinstance(line, str) or line.strip()}
    if not rows:
        raise _unusable("the file of pairs is empty", str(path))
    if not any(row.get("weight", 1.0) for row in rows.values()):
        raise _unusable("every pair of the file weighs 0, so that nothing would be learned", str(path))
    return rows


def pair_sources(rows: Iterable[PairRow]) -> dict[str, dict[str, float]]:
    """By where their label comes from, how many pairs there are and what they weigh together."""
    table: dict[str, dict[str, float]] = {}
    for row in rows:
        counts = table.setdefault(str(row.get("source") or "not said"), {"pairs": 0, "weight": 0.0})
        counts["pairs"] += 1
        counts["weight"] += float(row.get("weight", 1.0))
    return table


def tokenised_pairs(rows: Mapping[str, PairRow], tokenizer: Tokenizer) -> tuple[PreferencePair, ...]:
    """The pairs of ``read_pair_rows`` as token ids, by the tokenizer of the model that is trained.

    Prompt and answer are tokenised apart, so that the border between them is a border of tokens. Of messages the answer
    is what the chat template writes after the prompt and its generation prompt, up to the end of the turn. Text
    gets no end of turn: write one into it where the model is to stop.

    Raises:
        InputError: a pair that the chat template does not take, or that has no ids (CR0751); messages, and the tokenizer
            has no template (CR0810).
    """
    pairs = []
    for where, row in rows.items():
        prompt, chosen, rejected = tokenised(row, _SIDES, tokenizer, where)
        if chosen == rejected:
            raise _unusable("the chosen and the rejected answer are the same once they are tokenised", where)
        known = (float(row.get("weight", 1.0)), str(row.get("source", "")))
        pairs.append(PreferencePair(prompt, chosen, rejected, *known))
    return tuple(pairs)


def tokenised(row: PairRow, sides: Sequence[str], tokenizer: Tokenizer, where: str) -> list[tuple[int, ...]]:
    """The ids of a prompt, the first of ``sides``, and of its answers, the others, as ``tokenised_pairs`` has them."""
    is_text = isinstance(row["prompt"], str)
    texts = [row[side] for side in sides] if is_text else _rendered(row, sides, tokenizer, where)
    # A template writes the tokens that begin a text itself.
    ids = [
        tuple(tokenizer.encode(text, add_special_tokens=is_text and number == 0))
        for number, text in enumerate(texts)
    ]
    if not all(ids):
        raise _unusable("a side of the pair has no token", where)
    return ids


def _rendered(row: PairRow, sides: Sequence[str], tokenizer: Tokenizer, where: str) -> list[str]:
    """Prompt and answers as the chat template writes them."""
    if getattr(tokenizer, "chat_template", "") is None:
        problem = "the model has no chat template, and this pair's sides are messages."
        fix = "give prompt, chosen and rejected as texts, or take an instruction-tuned model."
        raise InputError("CR0810", problem, where=where, fix=fix)
    render = partial(tokenizer.apply_chat_template, tools=parsed(row.get("tools")) or None, tokenize=False)
    try:
        prompt = str(render(row["prompt"], add_generation_prompt=True))
        chats = ([*row["prompt"], *row[side]] for side in sides[1:])
        wholes = [str(render(chat, add_generation_prompt=False)) for chat in chats]
    except Exception as error:  # whatever the template raises
        raise _unusable(f"the chat template does not take the messages: {error}", where) from error
    if not all(whole.startswith(prompt) for whole in wholes):
        raise _unusable("the chat template writes the prompt otherwise when an answer follows it", where)
    return [prompt, *(whole[len(prompt) :].rstrip("\n") for whole in wholes)]


def _parquet_rows(path: Path) -> list[PairRow]:
    """The rows of a Parquet file; messages stand in it as JSON of their own."""
    with needs_extra("traces", f"Parquet for {path.name}"):
        import pyarrow.parquet as pq
    rows: list[PairRow] = pq.read_table(path).to_pylist()
    for row in rows:
        messages = {side: row[side] for side in _SIDES if isinstance(row.get(side), list)}
        row |= {side: [parsed(each) for each in found] for side, found in messages.items()}
    return [{key: value for key, value in row.items() if value is not None} for row in rows]


def _row(line: Any, where: str) -> PairRow:
    try:
        row = json.loads(line) if isinstance(line, str) else line
    except ValueError as error:
        raise _unusable(f"a line is not JSON: {error}", where) from error
    if problem := _problem(row) if isinstance(row, dict) else "a line is not a JSON object":
        raise _unusable(problem, where)
    return dict(row)


def _problem(row: PairRow) -> str:
    """What is wrong with a row; an empty text where nothing is."""
    if empty := next((side for side in _SIDES if not row.get(side)), ""):
        return f"{empty} is {'empty' if empty in row else 'missing'}"
    sides, weight = [row[side] for side in _SIDES], row.get("weight", 1.0)
    if not (all(isinstance(side, str) for side in sides) or all(map(_is_messages, sides))):
        return "prompt, chosen and rejected are neither three texts nor three lists of messages"
    if not isinstance(parsed(row.get("tools")) or [], list):
        return "tools is neither a list of functions nor the JSON of one"
    if sides[1] == sides[2]:
        return "the chosen and the rejected answer are the same"
    is_weight = type(weight) in (int, float) and 0 <= weight < math.inf
    return "" if is_weight else f"weight is {weight!r}, not a number from 0 up"


def _is_messages(side: Any) -> bool:
    return isinstance(side, list) and all(isinstance(one, dict) and "role" in one for one in side)


def _unusable(sentence: str, where: str) -> InputError:
    fix = (
        'write one object a line: {"prompt": "…", "chosen": "…", "rejected": "…"}; composer-rl explain CR0751'
    )
    return InputError("CR0751", f"{sentence}.", where=where, fix=fix)
