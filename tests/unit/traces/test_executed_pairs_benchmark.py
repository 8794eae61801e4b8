"""Four ways to choose pairs, on sessions made by hand: what each takes for better, and from which text."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from composer_replication.records import ToolCall
from composer_replication.traces.json_values import json_text
from composer_replication.traces.pairs import ChosenStep, assistant_message
from composer_replication.traces.trace_records import StepResult, Trace, TraceStep

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

import executed_pairs as benchmark

LOOK, PUT_IN = "sed -n '1,2p' a.py", "sed -i -e '2r /dev/stdin' a.py <<'EOF'\n    return {}\nEOF"


def answer(body: str) -> dict[str, Any]:
    command = PUT_IN.format(body)
    call = ToolCall("bash", json_text({"command": command}), "2")
    return assistant_message(f"```bash\n{command}\n```", [call])


def session(name: str, body: str, *, passed: bool) -> Trace:
    steps = [TraceStep("user", "The function that ends lines 1 to 2 of a.py")]
    for number, command in enumerate((LOOK, PUT_IN.format(body)), start=1):
        call = ToolCall("bash", json_text({"command": command}), str(number))
        step = TraceStep("agent", f"```bash\n{command}\n```", parent=number - 1, calls=[call])
        step.results = [StepResult(str(number), "|class A:\n|    def f(self):" if number == 1 else "")]
        steps.append(step)
    return Trace(name, "atif", steps=steps, prompt_origin="recorded", task_id="a", passed=passed)


def bodies(pairs: list[dict[str, str]]) -> set[tuple[str, str]]:
    return {(pair["chosen"].split()[-1], pair["rejected"].split()[-1]) for pair in pairs}


def test_each_way_takes_its_own_side_for_the_better_one() -> None:
    traces = [session("good", "1", passed=True), session("bad", "2", passed=False)]
    both = {"cool": answer("3"), "warm": answer("3")}
    branchings = [ChosenStep(trace, 2, [], both) for trace in traces]
    known = {"scores": [1.0] * 3, "recorded_scores": [0.0] * 3, "interval": (0.1, 1.0), "source": "cool"}
    verdicts = [
        {"trace_id": name, "step": 2, "verdicts": [{**known, "answer": answer("3"), "decision": decision}]}
        for name, decision in (("good", "worse"), ("bad", "not decided"))
    ]
    found = benchmark.choose(traces, branchings, verdicts)
    assert bodies(found["executed"]) == {("1", "3")}
    assert bodies(found["siblings"]) == {("1", "2")}
    assert bodies(found["majority"]) == {("3", "1"), ("3", "2")}  # nothing was executed
    assert {frozenset(pair) for pair in bodies(found["random"])} == {frozenset("13"), frozenset("23")}
    assert {pair["prompt"] for pairs in found.values() for pair in pairs} == {"class A:\n    def f(self):"}


def test_a_body_ends_where_the_indentation_falls() -> None:
    assert benchmark.body_of("\n    return 1\n\ndef g():\n    pass") == "    return 1"
    body = "    if x:\n        return 1\n    return 2"
    assert benchmark.body_of(f"\n{body}\n") == body
