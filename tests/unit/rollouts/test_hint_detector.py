"""Which turn went wrong, and why: over recorded rollouts, and without a false finding on clean ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hint_rollouts import cases, observe, single_turn
from hypothesis import given
from hypothesis import strategies as st

from composer_replication.records import (
    Completion,
    Outcome,
    Rollout,
    Score,
    StopReason,
    ToolCall,
    ToolResult,
    Turn,
)
from composer_replication.rollouts.episodes.episode import Episode, EpisodeTurn
from composer_replication.rollouts.hints.hinted_turns import (
    ObservedRollout,
    answered,
    fault_kind,
    find_faults,
)

KINDS = {
    "invalid-call", "missing-file", "command-not-found", "edit-not-applied", "time-out", "out-of-memory", "tool-error",
    "repeated-action", "truncated", "empty-answer", "syntax-error", "test-failure",
}  # fmt: skip


@pytest.mark.parametrize("case", cases(), ids=lambda case: str(case["name"]))
def test_recorded_rollouts(case: dict[str, Any]) -> None:
    observed = observe(case)
    found = find_faults(observed)
    assert [[fault.turn_idx, fault.kind] for fault in found] == [each[:2] for each in case["expected"]]
    for fault, (turn_idx, _, subject) in zip(found, case["expected"], strict=True):
        turn, test = observed.episode.turns[turn_idx], subject.rpartition("::")[2]
        called = zip(turn.calls, turn.results, strict=False)
        told = {answered(result.text) for call, result in called if call.name == subject}
        if "::" in subject:
            assert fault.texts == (answered(observed.run_error),) or test in fault.texts[0]
        else:
            assert told & {*fault.texts} or not subject, "what is told is of the call that failed"


def test_every_finding_has_something_to_say_and_a_known_kind() -> None:
    faults = [fault for case in cases() for fault in find_faults(observe(case))]
    assert all(fault.texts[0] for fault in faults)
    assert {fault.kind for fault in faults} == KINDS - {"syntax-error"}  # of single answers, below


@pytest.mark.parametrize(
    "case",
    [case for case in cases() if not case["expected"] and case["score"]],
    ids=lambda case: str(case["name"]),
)
def test_a_clean_rollout_whose_tests_fail_has_that_finding_alone(case: dict[str, Any]) -> None:
    observed = observe(case)
    failed = Score({"t.py::test_a": Outcome.FAILED})
    found = find_faults(replace(observed, episode=replace(observed.episode, score=failed, reward=0.0)))
    kinds = {fault.kind for fault in found}
    # a last answer that was cut off counts as soon as the rollout is not solved
    assert kinds == {"test-failure"} | ({"truncated"} if "cut off" in case["name"] else set())


GOOD = "def last(books):\n    return books[-1]\n"
BROKEN = "def last(books):\n    return books[-1\n"


@pytest.mark.parametrize(
    ("text", "stop", "known", "outcomes", "error", "kind"),
    [
        ("\n    return 0", "stop_rule", {"answered_text": GOOD}, {"t::a": "failed"}, "", "test-failure"),
        ("\n    return 0", "stop_rule", {"answered_text": GOOD}, {"t::a": "passed"}, "", None),
        ("\n    return 0", "length", {"answered_text": GOOD}, {"t::a": "passed"}, "", None),
        ("\n    return 0", "length", {"answered_text": GOOD}, {"t::a": "failed"}, "", "test-failure"),
        ("\n    return b[", "length", {"answered_text": BROKEN}, {"t::a": "failed"}, "", "truncated"),
        ("\n    return b[", "stop_rule", {"answered_text": BROKEN}, {"t::a": "failed"}, "", "syntax-error"),
        ("\n    return 0", "length", {}, {"t::a": "failed"}, "", "truncated"),
        ("", "finished", {"answered_text": ""}, {"t::a": "failed"}, "", "empty-answer"),
        ("\nreturn 1", "stop_rule", {"answered_text": ""}, {"t::a": "error"}, "", "empty-answer"),
        ("\nreturn 1", "length", {"answered_text": ""}, {"t::a": "error"}, "", "truncated"),
        ("\n \n", "length", {"answered_text": ""}, {"t::a": "error"}, "", "empty-answer"),
        ("\n    x", "stop_rule", {"answered_text": GOOD}, {"t::a": "failed"}, "the tests ran longer than 20 s", "test-failure"),
        ("\n    x", "stop_rule", {"answered_text": GOOD}, {"t::a": "failed"}, "the tests used more memory than allowed", "test-failure"),
        ("\n    x", "stop_rule", {"answered_text": GOOD}, {}, "the run ended without its closing record", "test-failure"),
    ],
)  # fmt: skip
def test_single_turns(
    text: str, stop: str, known: Mapping[str, Any], outcomes: Mapping[str, str], error: str, kind: str | None
) -> None:
    score = Score({test: Outcome(what) for test, what in outcomes.items()}, error)
    reward = float(score.all_passed)
    turn = Turn((1,), Completion((5, 6), text, StopReason(stop)))
    rollout = Rollout("t", 1, (turn,), reward, score, StopReason(stop), 1.0)
    found = find_faults(single_turn(rollout, **known))
    assert [fault.kind for fault in found] == ([] if kind is None else [kind])
    ungraded = single_turn(replace(rollout, score=None, reward=0.0), **known)
    assert find_faults(ungraded) == [], "the sandbox failed"


@pytest.mark.parametrize(
    ("result", "kind"),
    [
        (ToolResult("cat: a.txt: No such file or directory", exit_code=1), ""),
        (ToolResult("[stopped]", exit_code=-9, timed_out=True), "time-out"),
        (ToolResult("Not run", is_error=True, fault="refused"), "tool-error"),
        (ToolResult("no such tool", is_error=True, fault="invalid"), "invalid-call"),
        (ToolResult("the tree has no changes", is_error=True), "tool-error"),
    ],
)
def test_what_the_tool_says_counts_and_not_its_words(result: ToolResult, kind: str) -> None:
    assert fault_kind(result) == kind


@given(
    st.text(max_size=200),
    st.text(max_size=60),
    st.sampled_from([0, 1, 2, 127, 137, None]),
    st.booleans(),
    st.sampled_from(["bash", "read_file", "nothing"]),
)
def test_any_text_gives_a_list_and_a_clean_call_gives_none(
    text: str, arguments: str, exit_code: int | None, is_error: bool, name: str
) -> None:
    call, result = ToolCall(name, arguments), ToolResult(text, is_error, exit_code)
    turn = EpisodeTurn((1,), Completion((2,), "x", StopReason.FINISHED), (call,), (result,))
    episode = Episode("t", 0, 1, 0, (turn,), stop_reason=StopReason.FINISHED, reward=1.0)
    for fault in find_faults(ObservedRollout(episode)):
        assert fault.kind in KINDS
        assert result.failed
