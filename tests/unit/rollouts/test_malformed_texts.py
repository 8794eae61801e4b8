"""Ten thousand replies that are wrong in every way, through the reader, the tools and the monitor: no traceback."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from fake_sandbox import FakeSandbox, done
from malformed_texts import WRITERS, malformed_texts

from composer_replication.records import ToolCall, ToolResult
from composer_replication.rollouts.monitor.hack_monitor import HACK_CLASSES
from composer_replication.rollouts.monitor.reported import asked_for
from composer_replication.rollouts.tokens.call_dialects import DIALECTS, read_calls
from composer_replication.rollouts.tools.tool_context import (
    RefusedError,
    VisibleTests,
    arguments_of,
    example_of,
)
from composer_replication.rollouts.tools.toolbox import TOOLS, Toolbox

MOST_CALLS = 20
"""Of one reply that are made: a loop refuses the rest, and they are alike."""


def is_wrong(call: ToolCall) -> bool:
    try:
        arguments_of(call, TOOLS)
    except RefusedError:
        return True
    return False


def read_and_make(num_texts: int, seed: int) -> Counter[str]:
    """Read replies in their own dialect and in one other, make their calls; what came of it, counted."""
    box = Toolbox(FakeSandbox({"a.py": b"x = 1\n"}, done("out")), VisibleTests(("t.py::t",), {"t.py": b""}))
    dialects, counts = sorted(DIALECTS), Counter[str]()
    for number, (dialect, text) in enumerate(malformed_texts(num_texts, seed)):
        other = dialects[(number // len(dialects)) % len(dialects)]
        for each in dict.fromkeys((dialect, other)):
            calls = read_calls(text, each, tools=TOOLS, thought_is_open=number % 17 == 0)
            counts["replies with calls" if calls else "replies without"] += 1
            for call in calls[:MOST_CALLS]:
                box.is_over = False
                result = box.call(call)
                assert isinstance(result, ToolResult) and result.text
                assert len(result.text) <= box.max_characters
                json.dumps(
                    [call.name, call.arguments, call.call_id, result.text], ensure_ascii=False
                ).encode()
                is_fault = is_wrong(call)
                counts["refused" if result.is_error else "made"] += 1
                counts["faults"] += is_fault
                assert result.is_error or not is_fault
                if number % 3 == 0:
                    assert HACK_CLASSES.keys() >= {
                        name for name, _ in asked_for(call, {"tinyfmt"}, {"last"}, "")
                    }
    assert box.num_invalid == counts["faults"]
    return counts


def test_right_replies_are_read_in_every_way_of_writing_them() -> None:
    """Else the damaged ones would prove nothing."""
    calls = [ToolCall(tool.name, example_of(tool)) for tool in TOOLS if tool.name in ("bash", "read_file")]
    for dialect, writers in WRITERS.items():
        for write in writers:
            found = read_calls(write(calls), dialect, tools=TOOLS)
            assert found and all(call.name for call in found), (dialect, write(calls))


@pytest.mark.long
def test_no_malformed_reply_is_a_traceback() -> None:
    counts = read_and_make(10_000, seed=7)
    assert counts["made"] > 1000 and counts["refused"] > 3000  # both ways are taken
    assert counts["replies without"] > 1000


def test_json_of_any_depth_is_a_fault_and_no_traceback() -> None:
    """At some depth Python can still read a value and no longer write it; where, its own stack decides."""
    for depth in (*range(700, 1000), 5000):
        call = ToolCall("bash", f'{{"command": {"[" * depth}{"]" * depth}}}')
        with pytest.raises(RefusedError, match=r"wrong type|bad json"):
            arguments_of(call, TOOLS)
