"""One self-contained page of recorded sessions: their steps, what was taken out, and how other answers did in their place."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from composer_replication.report.templates import html_page
from composer_replication.run_folder import read_json, read_jsonl, write_atomic
from composer_replication.traces.pairs import calls_of
from composer_replication.traces.trace_records import Trace, TraceStep

MAX_SESSIONS = 100
MAX_STEPS = 200
"""Of one session; the first ones, and all that were branched."""
MAX_CHARACTERS = 1200


def write_trace_page(folder: Path, traces: Iterable[Trace], path: Path) -> int:
    """Write the page, and say how many sessions are on it; the page runs no script and loads nothing.

    Raises:
        InputError: as ``read_traces``.
    """
    rows, sums = read_jsonl(folder / "verdicts.jsonl"), folder / "ingest.json"
    branches = {(row["trace_id"], row["step"]): row for row in rows}
    iterator = iter(traces)
    sessions = [_session(trace, branches) for trace in islice(iterator, MAX_SESSIONS)]
    num_more = sum(1 for _ in iterator)
    page = html_page(
        "traces.html.j2",
        name=folder.resolve().name,
        sums=read_json(sums) if sums.is_file() else {},
        sessions=sessions,
        num_more=num_more,
        cut=_cut,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, page)
    return len(sessions)


def _session(trace: Trace, branches: Mapping[tuple[str, int], Mapping[str, Any]]) -> dict[str, Any]:
    rows = [_step(idx, step, branches.get((trace.trace_id, idx))) for idx, step in enumerate(trace.steps)]
    shown = rows[:MAX_STEPS] + [row for row in rows[MAX_STEPS:] if row["branches"]]
    return {
        "trace": trace,
        "is_branched": any(row["branches"] for row in rows),
        "rows": shown,
        "num_hidden": len(rows) - len(shown),
    }


def _step(idx: int, step: TraceStep, executed: Mapping[str, Any] | None) -> dict[str, Any]:
    results = {result.call_id: result for result in step.results}
    return {
        "number": idx + 1,
        "step": step,
        "calls": [(call, results.get(call.call_id)) for call in step.calls],
        "branches": [] if executed is None else [_branch(each) for each in executed["verdicts"]],
        "problem": "" if executed is None else executed["problem"],
    }


def _branch(verdict: Mapping[str, Any]) -> dict[str, Any]:
    low, high = verdict["interval"]
    answer = verdict["answer"]
    calls = "\n".join(f"{call.name} {_cut(call.arguments)}" for call in calls_of(answer))
    return {
        "source": verdict["source"],
        "text": _cut("\n".join(part for part in (answer["content"], calls) if part)),
        "scores": ", ".join(f"{score:.2f}" for score in verdict["scores"]),
        "recorded_scores": ", ".join(f"{score:.2f}" for score in verdict["recorded_scores"]),
        "interval": f"{low:+.2f} to {high:+.2f}",
        "decision": verdict["decision"],
        "tone": {"better": "good", "worse": "bad"}.get(verdict["decision"], "warn"),
        "left": 100 * (1 + max(-1.0, low)) / 2,
        "width": 100 * (min(1.0, high) - max(-1.0, low)) / 2,
    }


def _cut(text: str) -> str:
    more = len(text) - MAX_CHARACTERS
    return f"{text[:MAX_CHARACTERS]}\n… {more} more characters" if more > 0 else text
