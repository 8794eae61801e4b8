r"""Preference pairs: made of verdicts, siblings and objections, balanced, written and read; and rows for supervised training.

A file of pairs has one JSON object a line, in the two shapes of TRL's preference data sets, or the same rows as Parquet:

    {"prompt": "def f(x):\n", "chosen": "    return x\n", "rejected": "    pass\n"}
    {"prompt": [{"role": "user", "content": "…"}], "chosen": [{"role": "assistant", "content": "…"}], "rejected": […]}

``weight`` and ``source`` may stand beside them, and ``tools`` (a list, or its JSON) beside messages; other keys are passed over.
"""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from composer_replication.errors import needs_extra
from composer_replication.rollouts.tokens.pair_ids import SIDES, PairRow, unusable_pair
from composer_replication.traces import prompts
from composer_replication.traces.json_values import parsed
from composer_replication.traces.prompts import Message, action, prompt_of, recorded_answer
from composer_replication.traces.trace_records import NOT_LEARNED, Trace

WEIGHTS: Mapping[str, float] = {"executed": 1.0, "siblings": 0.5, "objection": 0.5}
TEXT_ONLY = 0.5  # times the weight where neither side calls anything, so that no test tells them apart
MAX_LENGTH_RATIO = 8.0  # a side that has so many times the characters of the other one would teach length
MAX_SHARE_OF_LAST = 0.25  # that may speak of the last step of a session: else ending early is what is learned
_REFUSED = {"denied", "interrupted"}
Rows = tuple[list[PairRow], Counter[str]]  # rows that are kept, and how many were dropped by reason
HeldoutRows = Callable[[Sequence[Mapping[str, Any]]], set[int]]
"""The places of rows that are of a held-out task or show its code."""


def executed_pairs(traces: Mapping[str, Trace], verdicts: Iterable[Mapping[str, Any]]) -> Iterator[PairRow]:
    """Pairs of the branches that the tests decided, better and worse."""
    for row in (row for row in verdicts if row["trace_id"] in traces):
        trace, idx = traces[row["trace_id"]], row["step"]
        for verdict in (each for each in row["verdicts"] if each["decision"] != "not decided"):
            sides = (verdict["answer"], recorded_answer(trace, idx))
            margin = abs(fmean(verdict["scores"]) - fmean(verdict["recorded_scores"]))
            evidence = {key: verdict[key] for key in ("scores", "recorded_scores", "interval", "source")}
            sides = sides if verdict["decision"] == "better" else sides[::-1]
            yield _pair(trace, idx, sides, source="executed", margin=margin, branch=evidence)


def sibling_pairs(traces: Sequence[Trace]) -> Iterator[PairRow]:
    """Of two attempts at one task, one passing and one failing: the first answers in which they part."""
    attempts: dict[str, tuple[list[Trace], list[Trace]]] = {}
    for trace in (trace for trace in traces if trace.task_id and trace.passed is not None):
        attempts.setdefault(trace.task_id, ([], []))[not trace.passed].append(trace)
    for passing, failing in (both for own in attempts.values() for both in itertools.product(*own)):
        if (idx := _parting(passing, failing)) is not None:
            sides = (recorded_answer(passing, idx), recorded_answer(failing, idx))
            yield _pair(passing, idx, sides, source="siblings", margin=1.0, failing=failing.trace_id)


def _parting(first: Trace, second: Trace) -> int | None:
    """The first answer in which two attempts part although everything before it was the same; None where there is none."""
    for idx, (a, b) in enumerate(zip(first.steps, second.steps, strict=False)):
        is_answer = a.source == b.source == "agent"
        if is_answer and action(recorded_answer(first, idx)) != action(recorded_answer(second, idx)):
            return idx
        seen, other = ([step.source, *(result.text for result in step.results)] for step in (a, b))
        if seen != other or not (is_answer or a.text == b.text):
            return None
    return None


def objection_pairs(traces: Sequence[Trace]) -> Iterator[PairRow]:
    """An action that the user refused or stopped, against the next one that was let through."""
    for trace in traces:
        calling = [(idx, step) for idx, step in trace.agent_steps() if step.calls]
        good = [
            n for n, s in calling if s.results and not (s.num_errors or s.flags & (_REFUSED | NOT_LEARNED))
        ]
        for idx in (idx for idx, step in calling if step.flags & _REFUSED):
            if (accepted := next((n for n in good if n > idx), None)) is not None:
                sides = (recorded_answer(trace, accepted), recorded_answer(trace, idx))
                yield _pair(trace, idx, sides, source="objection", margin=0.5, accepted_step=accepted)


def _pair(
    trace: Trace, idx: int, sides: tuple[Message, Message], *, source: str, margin: float, **evidence: Any
) -> PairRow:
    is_text = not any("tool_calls" in side for side in sides)
    evidence |= {"margin": margin, "is_text_only": is_text, "prompt_origin": trace.prompt_origin}
    is_end = any(call.name in ("submit", "finish") for call in prompts.calls_of(sides[0]))
    weight = WEIGHTS[source] * (TEXT_ONLY if is_text else 1.0) * min(1.0, margin)
    row: PairRow = {"prompt": prompt_of(trace, idx), "chosen": [sides[0]], "rejected": [sides[1]]}
    row |= {"tools": json.dumps(prompts.tools_of(trace)), "weight": weight, "source": source}
    row |= {"evidence": json.dumps(evidence), "trace_id": trace.trace_id, "step": idx}
    return row | {"task_id": trace.task_id, "is_last": is_end or idx == trace.agent_steps()[-1][0]}


def balanced(pairs: Iterable[PairRow], heldout: HeldoutRows) -> Rows:
    """The pairs that are kept: no copy, none that teaches length or ending, none of a held-out task."""
    dropped: Counter[str] = Counter()
    rows: dict[str, PairRow] = {}
    for pair in pairs:
        chosen, rejected = sides = [json.dumps(pair[side], sort_keys=True) for side in SIDES[1:]]
        key = f"{pair['trace_id']}/{pair['step']}/{chosen}/{rejected}"
        called = {call.name for side in SIDES[1:] for call in prompts.calls_of(pair[side][0])}
        if chosen == rejected:
            dropped["both sides are the same"] += 1
        elif called - {tool["function"]["name"] for tool in json.loads(pair["tools"])}:
            dropped["a call of a tool that is not offered"] += 1
        elif key in rows:
            dropped["the same pair twice"] += 1
        elif max(map(len, sides)) > MAX_LENGTH_RATIO * min(map(len, sides)):
            dropped["one side is many times as long"] += 1
        else:
            rows[key] = pair
    kept = without_heldout([*rows.values()], heldout, dropped)
    last = [pair for pair in kept if pair["is_last"]]
    num_allowed = max(1, int(MAX_SHARE_OF_LAST * (len(kept) - len(last)) / (1 - MAX_SHARE_OF_LAST)))
    for pair in sorted(last, key=lambda each: -each["weight"])[num_allowed:]:
        kept.remove(pair)
        dropped["too many pairs of last steps"] += 1
    return kept, dropped


def sft_rows(traces: Iterable[Trace], heldout: HeldoutRows) -> Rows:
    """Passing attempts as chats with tools."""
    rows: list[PairRow] = []
    dropped: Counter[str] = Counter()
    for trace in traces:
        if not (trace.passed and trace.agent_steps()):
            dropped["did not pass its tests" if trace.passed is False else "nobody ran its tests"] += 1
            continue
        last = trace.agent_steps()[-1][0]
        row: PairRow = {"messages": [*prompt_of(trace, last), recorded_answer(trace, last)]}
        row |= {"tools": json.dumps(prompts.tools_of(trace)), "task_id": trace.task_id}
        known = {key: getattr(trace, key) for key in ("trace_id", "format", "model", "task_id")}
        rows.append({**row, "provenance": json.dumps(known)})
    return without_heldout(rows, heldout, dropped), dropped


def without_heldout(rows: list[PairRow], heldout: HeldoutRows, dropped: Counter[str]) -> list[PairRow]:
    """The rows that neither are of a held-out task nor show its code."""
    found = heldout(rows)
    dropped["a held-out task, or its code in the text"] += len(found)
    return [row for place, row in enumerate(rows) if place not in found]


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Parquet or lines of JSON, by the name. Parquet keeps messages as JSON that ``datasets`` reads as objects."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix != ".parquet":
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
        return
    with needs_extra("traces", f"Parquet for {path.name}"):
        import pyarrow as pa
        import pyarrow.parquet as pq
    columns: dict[str, Any] = {name: [row[name] for row in rows] for name in rows[0]}
    for name in (name for name, value in rows[0].items() if isinstance(value, list)):
        texts = [[json.dumps(each) for each in value] for value in columns[name]]
        columns[name] = pa.array(texts, pa.list_(pa.string())).cast(pa.list_(pa.json_()))
    pq.write_table(pa.table(columns), path)


def read_pair_rows(path: Path) -> dict[str, PairRow]:
    """The pairs of a file by their places (``FILE:LINE``), their shape checked and nothing tokenised.

    A file that cannot be read or is empty, a line of neither shape, and pairs that all weigh 0 raise ``InputError`` (CR0751).
    """
    try:
        # ``str.splitlines`` cuts at signs that JSON texts may hold, too
        is_parquet = path.suffix == ".parquet"
        found = _parquet_lines(path) if is_parquet else path.read_text(encoding="utf-8").split("\n")
    except (OSError, ValueError) as error:
        raise unusable_pair(f"the file of pairs cannot be read: {error!s:.200}", str(path)) from error
    rows: dict[str, PairRow] = {}
    for number, line in enumerate(found, start=1):
        where = f"{path}:{number}"
        try:
            rows |= {where: json.loads(line)} if line.strip() else {}
        except ValueError as error:
            raise unusable_pair(f"a line is not JSON: {error}", where) from None
        if where in rows and (problem := _problem(rows[where])):
            raise unusable_pair(problem, where)
    if not rows:
        raise unusable_pair("the file of pairs is empty", str(path))
    if not any(row.get("weight", 1.0) for row in rows.values()):
        raise unusable_pair("every pair of the file weighs 0, so that nothing would be learned", str(path))
    return rows


def _parquet_lines(path: Path) -> list[str]:
    """The rows of a Parquet file, a JSON object each; messages stand in it as JSON of their own."""
    with needs_extra("traces", f"Parquet for {path.name}"):
        import pyarrow.parquet as pq
    found = pq.read_table(path).to_pylist()
    rows = [{key: value for key, value in row.items() if value is not None} for row in found]
    for row in rows:
        row |= {side: [*map(parsed, row[side])] for side in SIDES if isinstance(row.get(side), list)}
    return [*map(json.dumps, rows)]


def _problem(row: Any) -> str:
    """What is wrong with a row; an empty text where nothing is."""
    if not isinstance(row, dict):
        return "a line is not a JSON object"
    if empty := next((side for side in SIDES if not row.get(side)), ""):
        return f"{empty} is {'empty' if empty in row else 'missing'}"
    sides, weight = [row[side] for side in SIDES], row.get("weight", 1.0)
    if not all(isinstance(side, str) for side in sides):
        messages = [one for side in sides for one in (side if isinstance(side, list) else [None])]
        if not all(isinstance(one, dict) and "role" in one for one in messages):
            return "prompt, chosen and rejected are neither three texts nor three lists of messages"
    if not isinstance(parsed(row.get("tools")) or [], list):
        return "tools is neither a list of functions nor the JSON of one"
    if sides[1] == sides[2]:
        return "the chosen and the rejected answer are the same"
    is_weight = type(weight) in (int, float) and 0 <= weight < math.inf
    return "" if is_weight else f"weight is {weight!r}, not a number from 0 up"


def pair_sources(rows: Iterable[PairRow]) -> dict[str, dict[str, float]]:
    """By where their label comes from, how many pairs there are and what they weigh together."""
    table: dict[str, dict[str, float]] = {}
    for row in rows:
        counts = table.setdefault(str(row.get("source") or "not said"), {"pairs": 0, "weight": 0.0})
        counts["pairs"] += 1
        counts["weight"] += float(row.get("weight", 1.0))
    return table
