"""From verdicts, siblings and objections to preference pairs; and from passing attempts to rows for supervised training."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from composer_replication.errors import needs_extra
from composer_replication.traces import prompts
from composer_replication.traces.prompts import Message, action, prompt_of, recorded_answer
from composer_replication.traces.trace_records import NOT_LEARNED, Trace

WEIGHTS: Mapping[str, float] = {"executed": 1.0, "siblings": 0.5, "objection": 0.5}
TEXT_ONLY = 0.5
"""Times the weight where neither side calls anything: no test can tell such answers apart but by what follows."""
MAX_LENGTH_RATIO = 8.0
"""A pair whose longer side has so many times the characters of the shorter one would teach length."""
MAX_SHARE_OF_LAST = 0.25
"""Most of the pairs that may speak of the last step of a session: else ending early is what is learned."""
_REFUSED = {"denied", "interrupted"}
PairRow = dict[str, Any]
Rows = tuple[list[PairRow], Counter[str]]
"""Rows that are kept, and how many were dropped by reason."""
HELD_OUT = "a held-out task, or its code in the text"
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
    attempts: dict[str, list[Trace]] = {}
    for trace in (trace for trace in traces if trace.state.task_id and trace.passed is not None):
        attempts.setdefault(trace.state.task_id, []).append(trace)
    for own in attempts.values():
        for passing, failing in itertools.permutations(own, 2):
            is_pair = passing.passed and not failing.passed
            if is_pair and (idx := _parting(passing, failing)) is not None:
                sides = (recorded_answer(passing, idx), recorded_answer(failing, idx))
                yield _pair(passing, idx, sides, source="siblings", margin=1.0, failing=failing.trace_id)


def _parting(first: Trace, second: Trace) -> int | None:
    """The first answer in which two attempts part although everything before it was the same; None where there is none."""
    for idx, (a, b) in enumerate(zip(first.steps, second.steps, strict=False)):
        texts = [[step.source, *(result.text for result in step.results)] for step in (a, b)]
        if a.source == b.source == "agent":
            if action(recorded_answer(first, idx)) != action(recorded_answer(second, idx)):
                return idx
        elif a.text != b.text:
            return None
        if texts[0] != texts[1]:
            return None
    return None


def objection_pairs(traces: Sequence[Trace]) -> Iterator[PairRow]:
    """An action that the user refused or stopped, against the next one that was let through."""
    for trace in traces:
        calling = [(idx, step) for idx, step in trace.agent_steps() if step.calls]
        for idx in (idx for idx, step in calling if step.flags & _REFUSED):
            later = (n for n, s in calling if n > idx and s.results and not s.num_errors)
            good = (n for n in later if not trace.steps[n].flags & (_REFUSED | NOT_LEARNED))
            if (accepted := next(good, None)) is not None:
                sides = (recorded_answer(trace, accepted), recorded_answer(trace, idx))
                yield _pair(trace, idx, sides, source="objection", margin=0.5, accepted_step=accepted)


def _pair(
    trace: Trace, idx: int, sides: tuple[Message, Message], *, source: str, margin: float, **evidence: Any
) -> PairRow:
    is_text = not any("tool_calls" in side for side in sides)
    evidence |= {"margin": margin, "is_text_only": is_text, "prompt_origin": trace.prompt_origin}
    is_end = any(call.name in ("submit", "finish") for call in prompts.calls_of(sides[0]))
    return {
        "prompt": prompt_of(trace, idx),
        "chosen": [sides[0]],
        "rejected": [sides[1]],
        "tools": json.dumps(prompts.tools_of(trace)),
        "weight": WEIGHTS[source] * (TEXT_ONLY if is_text else 1.0) * min(1.0, margin),
        "source": source,
        "evidence": json.dumps(evidence),
        "trace_id": trace.trace_id,
        "step": idx,
        "task_id": trace.state.task_id,
        "is_last": is_end or idx == max(n for n, _ in trace.agent_steps()),
    }


def balanced(pairs: Iterable[PairRow], heldout: HeldoutRows) -> Rows:
    """The pairs that are kept: no copy, none that teaches length or ending, none of a held-out task."""
    dropped: Counter[str] = Counter()
    seen: set[str] = set()
    rows = []
    for pair in pairs:
        if why := _problem(pair, seen):
            dropped[why] += 1
        else:
            rows.append(pair)
    kept = _without(rows, heldout, dropped)
    last = [pair for pair in kept if pair["is_last"]]
    num_allowed = max(1, int(MAX_SHARE_OF_LAST * (len(kept) - len(last)) / (1 - MAX_SHARE_OF_LAST)))
    for pair in sorted(last, key=lambda each: -each["weight"])[num_allowed:]:
        kept.remove(pair)
        dropped["too many pairs of last steps"] += 1
    return kept, dropped


def _problem(pair: PairRow, seen: set[str]) -> str:
    chosen, rejected = sides = [json.dumps(pair[side], sort_keys=True) for side in ("chosen", "rejected")]
    key = f"{pair['trace_id']}/{pair['step']}/{chosen}/{rejected}"
    called = {call.name for side in ("chosen", "rejected") for call in prompts.calls_of(pair[side][0])}
    if chosen == rejected:
        return "both sides are the same"
    if called - {tool["function"]["name"] for tool in json.loads(pair["tools"])}:
        return "a call of a tool that is not offered"
    if key in seen:
        return "the same pair twice"
    seen.add(key)
    is_long = max(map(len, sides)) > MAX_LENGTH_RATIO * min(map(len, sides))
    return "one side is many times as long" if is_long else ""


def sft_rows(traces: Iterable[Trace], heldout: HeldoutRows) -> Rows:
    """Passing attempts as chats with tools."""
    rows: list[PairRow] = []
    dropped: Counter[str] = Counter()
    for trace in traces:
        last = max((idx for idx, _ in trace.agent_steps()), default=None)
        if trace.passed is not True or last is None:
            dropped["did not pass its tests" if trace.passed is False else "nobody ran its tests"] += 1
            continue
        known = {key: getattr(trace, key) for key in ("trace_id", "format", "model")}
        row: PairRow = {"messages": [*prompt_of(trace, last), recorded_answer(trace, last)]}
        row |= {"tools": json.dumps(prompts.tools_of(trace)), "task_id": trace.state.task_id}
        rows.append({**row, "provenance": json.dumps({**known, "task_id": trace.state.task_id})})
    return _without(rows, heldout, dropped), dropped


def _without(rows: list[PairRow], heldout: HeldoutRows, dropped: Counter[str]) -> list[PairRow]:
    """The rows that neither are of a held-out task nor show its code."""
    found = heldout(rows)
    dropped[HELD_OUT] += len(found)
    return [row for place, row in enumerate(rows) if place not in found]


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Parquet or lines of JSON, by the name. Parquet keeps messages as JSON that ``datasets`` reads as objects.

    Raises:
        MissingError: Parquet needs pyarrow (CR0101).
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix != ".parquet":
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
        return
    with needs_extra("traces", f"Parquet for {path.name}"):
        import pyarrow as pa
        import pyarrow.parquet as pq
    columns, features = {}, {}
    for name, first in rows[0].items():
        values = [row[name] for row in rows]
        if isinstance(first, list):
            texts = pa.array([json.dumps(each) for value in values for each in value], pa.string())
            offsets = [0, *itertools.accumulate(map(len, values))]
            objects = pa.ExtensionArray.from_storage(pa.json_(), texts)
            columns[name] = pa.ListArray.from_arrays(offsets, objects)
            features[name] = {"feature": {"_type": "Json"}, "_type": "List"}
        else:
            columns[name] = pa.array(values)
            kind = str(columns[name].type).replace("double", "float64")
            features[name] = {"dtype": kind, "_type": "Value"}
    known = {"huggingface": json.dumps({"info": {"features": features}})}
    pq.write_table(pa.table(columns).replace_schema_metadata(known), path)
