"""Recorded sessions on one page: steps, results, and the answers that were executed in their place."""

from __future__ import annotations

import re
from pathlib import Path

from composer_replication.records import ToolCall
from composer_replication.report import trace_page
from composer_replication.report.trace_page import write_trace_page
from composer_replication.run_folder import append_jsonl
from composer_replication.traces.trace_records import StepResult, Trace, TraceStep


def session(trace_id: str = "s1") -> Trace:
    calls = [ToolCall("bash", '{"command": "<b>ls</b>"}', "c1"), ToolCall("bash", "{}", "c2")]
    answer = TraceStep(
        "agent", "x" * 1300, parent=0, calls=calls, results=[StepResult("c1", "no such file", exit_code=2)]
    )
    return Trace(trace_id, "atif", steps=[TraceStep("user", "mend <it>"), answer])


def test_steps_results_and_branches_are_shown_and_escaped(tmp_path: Path) -> None:
    verdict = {
        "source": "teacher",
        "answer": {"content": "better <i>", "tool_calls": []},
        "scores": [1.0, 0.5],
        "recorded_scores": [0.0],
        "interval": [0.25, 1.5],
        "decision": "better",
    }
    row = {"trace_id": "s1", "step": 1, "verdicts": [verdict], "problem": ""}
    append_jsonl(tmp_path / "verdicts.jsonl", row)
    path = tmp_path / "out" / "page.html"
    assert write_trace_page(tmp_path, iter([session(), session("s2")]), path) == 2
    page = path.read_text()
    text = re.sub(r"\s+", " ", re.sub("<[^>]*>", " ", page))
    assert "s1 · atif · 1 answers, 2 calls, 1 failed · branched" in text
    assert "mend &lt;it&gt;" in page and "&lt;b&gt;ls&lt;/b&gt;" in page
    assert "… 100 more characters" in text
    assert "failed no such file" in text and "No result was recorded." in text
    assert "teacher better &lt;i&gt; 1.00, 0.50 0.00 +0.25 to +1.50 better" in text
    assert 'class="good"' in page
    assert "<script" not in page and "default-src &#39;none&#39;" in page


def test_sessions_beyond_the_first_are_counted(tmp_path: Path) -> None:
    num_sessions = trace_page.MAX_SESSIONS + 2
    sessions = (Trace(f"s{number}", "atif") for number in range(num_sessions))
    assert write_trace_page(tmp_path, sessions, tmp_path / "page.html") == trace_page.MAX_SESSIONS
    assert "And 2 more sessions." in (tmp_path / "page.html").read_text()
