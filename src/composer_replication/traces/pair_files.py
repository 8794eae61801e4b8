r"""Preference pairs in a file: one JSON object a line, in the three shapes that are in use.

    {"prompt": "def f(x):\n", "chosen": "    return x\n", "rejected": "    pass\n"}
    {"prompt": [{"role": "user", "content": "…"}], "chosen": [{"role": "assistant", "content": "…"}], "rejected": […]}
    {"prompt_ids": [1, 2], "chosen_ids": [3], "rejected_ids": [4]}

``weight`` and ``source`` may stand beside them, and ``tools`` (a list, or its JSON) beside messages; other keys are passed over.
The first two are the shapes of TRL's preference data sets. A Parquet file has the same rows, as ``traces pairs`` writes them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from composer_replication.errors import InputError, MissingError
from composer_replication.interfaces import Tokenizer
from composer_replication.records import PreferencePair

_SIDES = ("prompt", "chosen", "rejected")
PairRow = Mapping[str, Any]


def read_pair_rows(path: Path) -> tuple[PairRow, ...]:
    """The lines of a file of pairs, their shape checked and nothing tokenised.

    Raises:
        InputError: the file cannot be read or is empty, or a line is none of the three shapes, has an empty side, two
            equal answers, or a weight that is no number from 0 up, or all weigh 0 (CR0881).
    """
    try:
        lines = _lines(path)
    except (OSError, UnicodeDecodeError) as error:
        raise _unusable(f"the file of pairs cannot be read: {error}", str(path)) from error
    rows = tuple(_row(line, f"{path}:{number}") for number, line in lines)
    if not any(row.get("weight", 1.0) for row in rows):
        problem = (
            "every pair of the file weighs 0, so that nothing would be learned"
            if rows
            else "the file of pairs is empty"
        )
        raise _unusable(problem, str(path))
    return rows


def pair_places(path: Path) -> tuple[str, ...]:
    """``file:line`` of each pair of a file that ``read_pair_rows`` has taken, in its order."""
    return tuple(f"{path}:{number}" for number, _ in _lines(path))


def tokenised_pairs(
    rows: Sequence[PairRow], tokenizer: Tokenizer, *, where: str
) -> tuple[PreferencePair, ...]:
    """The pairs as token ids.

    Prompt and answer are tokenised apart, so that the border between them is a border of tokens. Of messages the answer
    is what the chat template writes after the prompt and its generation prompt, up to the end of the turn. Text
    gets no end of turn: write one into it where the model is to stop.

    Args:
        rows: of ``read_pair_rows``.
        tokenizer: of the model that is trained.
        where: the file, for messages.

    Raises:
        InputError: a pair that the chat template does not take, or that has no ids (CR0881); messages, and the tokenizer
            has no template (CR0703).
    """
    return tuple(
        PreferencePair(
            *_ids(row, tokenizer, f"{where}, pair {number}"),
            weight=float(row.get("weight", 1.0)),
            source=str(row.get("source", "")),
        )
        for number, row in enumerate(rows, start=1)
    )


def _lines(path: Path) -> list[tuple[int, str]]:
    """Lines with their numbers, cut at line feeds alone: ``str.splitlines`` cuts at signs that JSON texts may hold, too."""
    is_parquet = path.suffix == ".parquet"
    lines = _parquet_lines(path) if is_parquet else path.read_text(encoding="utf-8").split("\n")
    return [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]


def parquet_library(path: Path) -> tuple[Any, Any]:
    """``pyarrow`` and ``pyarrow.parquet``.

    Raises:
        MissingError: they are not installed (CR0101).
    """
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        fix = "pip install 'composer-replication[traces]', or name a file .jsonl"
        raise MissingError("CR0101", "Parquet needs pyarrow.", where=str(path), fix=fix) from error
    return pa, pq


def _parquet_lines(path: Path) -> list[str]:
    """The rows of a Parquet file as lines of JSON; messages stand in it as JSON of their own."""
    pa, pq = parquet_library(path)
    try:
        rows = pq.read_table(path).to_pylist()
    except (pa.ArrowException, ValueError) as error:
        raise _unusable(f"the file of pairs is not Parquet: {error!s:.200}", str(path)) from error
    for row in rows:
        for side in _SIDES:
            if isinstance(row.get(side), list):
                row[side] = [json.loads(each) if isinstance(each, str) else each for each in row[side]]
    return [json.dumps({key: value for key, value in row.items() if value is not None}) for row in rows]


def _row(line: str, where: str) -> PairRow:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise _unusable(f"a line is not JSON: {error}", where) from error
    if not isinstance(row, dict):
        raise _unusable("a line is not a JSON object", where)
    keys = _keys(row)
    sides, weight = [row.get(key) for key in keys], row.get("weight", 1.0)
    problems = {
        f"{next((key for key in keys if key not in row), '')} is missing": all(key in row for key in keys),
        "prompt, chosen and rejected are neither three texts, nor three lists of messages, nor ids": any(
            all(map(is_kind, sides)) for is_kind in (_is_ids, _is_text, _is_messages)
        ),
        "tools is neither a list of functions nor the JSON of one": isinstance(_tools(row), list),
        f"{next((key for key in keys if not row.get(key)), '')} is empty": all(sides),
        "the chosen and the rejected answer are the same": sides[1] != sides[2],
        f"weight is {weight!r}, not a number from 0 up": type(weight) in (int, float)
        and 0 <= weight < math.inf,
    }
    problem = next((sentence for sentence, is_good in problems.items() if not is_good), "")
    if problem:
        raise _unusable(problem, where)
    return row


def _keys(row: PairRow) -> tuple[str, ...]:
    return tuple(f"{side}_ids" for side in _SIDES) if any(f"{side}_ids" in row for side in _SIDES) else _SIDES


def _is_ids(side: Any) -> bool:
    return isinstance(side, list) and all(type(one) is int and one >= 0 for one in side)


def _is_text(side: Any) -> bool:
    return isinstance(side, str)


def _is_messages(side: Any) -> bool:
    return isinstance(side, list) and all(isinstance(one, dict) and "role" in one for one in side)


_Ids = tuple[int, ...]


def _ids(row: PairRow, tokenizer: Tokenizer, where: str) -> tuple[_Ids, _Ids, _Ids]:
    prompt, chosen, rejected = (row[key] for key in _keys(row))
    if _keys(row) != _SIDES:
        return tuple(prompt), tuple(chosen), tuple(rejected)
    is_text, texts = isinstance(prompt, str), [prompt, chosen, rejected]
    if not is_text:
        rendered = partial(_rendered, tokenizer, _tools(row) or None, where)
        texts[0] = rendered(prompt, is_open=True)
        for number, answer in enumerate((chosen, rejected), start=1):
            whole = rendered([*prompt, *answer], is_open=False)
            if not whole.startswith(texts[0]):
                raise _unusable(
                    "the chat template writes the prompt otherwise when an answer follows it", where
                )
            texts[number] = whole[len(texts[0]) :].rstrip("\n")
    # A template writes the tokens that begin a text itself.
    found = [
        tuple(tokenizer.encode(text, add_special_tokens=is_text and number == 0))
        for number, text in enumerate(texts)
    ]
    if not all(found):
        raise _unusable("a side of the pair has no token", where)
    if found[1] == found[2]:
        raise _unusable("the chosen and the rejected answer are the same once they are tokenised", where)
    return found[0], found[1], found[2]


def _tools(row: PairRow) -> Any:
    """The tools of a row; a text that is no JSON is handed back, to be refused."""
    tools = row.get("tools") or []
    try:
        return json.loads(tools) if isinstance(tools, str) else tools
    except ValueError:
        return tools


def _rendered(
    tokenizer: Tokenizer, tools: list[Any] | None, where: str, messages: list[Any], *, is_open: bool
) -> str:
    if getattr(tokenizer, "chat_template", "") is None:
        problem = "the model has no chat template, and this pair's sides are messages."
        fix = "give prompt, chosen and rejected as texts, or take an instruction-tuned model."
        raise InputError("CR0703", problem, where=where, fix=fix)
    try:
        render = tokenizer.apply_chat_template
        return str(render(messages, tools=tools, tokenize=False, add_generation_prompt=is_open))
    except Exception as error:  # whatever the template raises
        raise _unusable(f"the chat template does not take the messages: {error}", where) from error


def _unusable(sentence: str, where: str) -> InputError:
    return InputError(
        "CR0881",
        f"{sentence}.",
        where=where,
        fix='write one object a line: {"prompt": "…", "chosen": "…", "rejected": "…"}; composer-rl explain CR0881',
    )
