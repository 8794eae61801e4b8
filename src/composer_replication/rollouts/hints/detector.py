"""Which turn went wrong, and why.

A finding needs evidence in the record. What is normal work is none: a search that finds nothing, a test that
fails before the change that it asks for, the same test run again after an edit. Failing tests at the end of
the rollout belong to the last turn that changed something. Where the sandbox failed nothing is found, since
nothing is known.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import PurePosixPath
from typing import Any

from composer_replication.records import StopReason
from composer_replication.rollouts.hints.call_faults import call_fault
from composer_replication.rollouts.hints.hint_context import Fault, ObservedRollout, ToolCall, ToolResult
from composer_replication.rollouts.hints.result_faults import EDIT_TOOLS, result_fault

_TOO_LONG = "the tests ran longer than"
_TOO_LARGE = "the tests used more memory"
_SHELLS = frozenset({"bash", "execute_bash", "run", "run_command", "shell", "terminal"})
NUM_NAMED_TESTS = 3


def find_faults(observed: ObservedRollout) -> list[Fault]:
    """The turns that went wrong, first turn first, at most one fault each.

    Within a turn a call that could not run comes before what a result says, and both before what only the
    end of the rollout shows.
    """
    rollout = observed.rollout
    if rollout.stop_reason is StopReason.INFRASTRUCTURE or (rollout.reward is None and rollout.score is None):
        return []
    by_turn: dict[int, Fault] = {}
    for fault in (*_call_faults(observed), *_turn_faults(observed), *_final_faults(observed)):
        by_turn.setdefault(fault.turn_idx, fault)
    return [by_turn[idx] for idx in sorted(by_turn)]


def _call_faults(observed: ObservedRollout) -> Iterator[Fault]:
    """Faults of single calls; a syntax error in a file belongs to the turn that wrote the file."""
    writers: dict[str, int] = {}
    last: tuple[str, Any, ToolResult] | None = None
    for turn_idx, turn in enumerate(observed.turns):
        for call_idx, call in enumerate(turn.calls):
            result = turn.results[call_idx] if call_idx < len(turn.results) else None
            finding = call_fault(call, observed.tools)
            if finding is None and result is not None:
                finding = result_fault(call, result)
            arguments = _arguments(call)
            if finding is not None:
                fault = Fault(turn_idx, *finding, call_idx)
                writer = (
                    writers.get(PurePosixPath(fault.subject).name) if fault.kind == "syntax-error" else None
                )
                yield fault if writer is None else replace(fault, turn_idx=writer, call_idx=None)
            elif (
                result is not None and last == (call.name, arguments, result) and call.name not in EDIT_TOOLS
            ):
                yield Fault(
                    turn_idx, "repeated-action", f"{call.name} {call.arguments[:160]}", call.name, call_idx
                )
            if result is not None:
                last = (call.name, arguments, result)
            if call.name in EDIT_TOOLS and (result is None or not result.failed):
                writers |= {PurePosixPath(path).name: turn_idx for path in _paths(arguments)}


def _turn_faults(observed: ObservedRollout) -> Iterator[Fault]:
    """Faults that a turn shows as a whole: cut off, or nothing said. A rollout of one turn is judged at its end."""
    if len(observed.turns) == 1:
        return
    is_solved = _is_solved(observed)
    for idx, turn in enumerate(observed.turns):
        is_last = idx == len(observed.turns) - 1
        if is_last and is_solved:
            continue
        completion = turn.turn.completion
        if completion.stop_reason is StopReason.LENGTH:
            yield Fault(
                idx,
                "truncated",
                f"stopped after {len(completion.token_ids)} tokens: {_tail(completion.text)}",
            )
        elif not completion.text.strip() and not turn.calls:
            yield Fault(idx, "empty-answer", "the answer has no text and no call")


def _final_faults(observed: ObservedRollout) -> Iterator[Fault]:
    """What the tests say of the rollout as a whole, told of the turn that it comes from."""
    score = observed.rollout.score
    if score is None or score.all_passed or not observed.turns:
        return
    idx = _last_change(observed)
    if len(observed.turns) == 1 and (fault := _answer_fault(observed)) is not None:
        yield fault
    elif score.error.startswith(_TOO_LONG):
        yield Fault(idx, "time-out", score.error[:200], "the tests")
    elif score.error.startswith(_TOO_LARGE):
        yield Fault(idx, "out-of-memory", score.error[:200], "the tests")
    else:
        named = [test.node_id for test in observed.failed_tests] or sorted(
            node_id for node_id, outcome in score.outcomes.items() if str(outcome) in {"failed", "error"}
        )
        if named or score.error:
            evidence = (
                f"{len(named)} failed: {', '.join(named[:NUM_NAMED_TESTS])}" if named else score.error[:200]
            )
            yield Fault(idx, "test-failure", evidence, named[0] if named else "")


def _answer_fault(observed: ObservedRollout) -> Fault | None:
    """What is wrong with a single answer before any test looks at it."""
    completion = observed.turns[0].turn.completion
    is_cut = completion.stop_reason is StopReason.LENGTH
    if not completion.text.strip() or (observed.answer is not None and not observed.answer.strip()):
        if is_cut and completion.text.strip():
            return Fault(0, "truncated", f"no whole answer in {len(completion.token_ids)} tokens")
        return Fault(0, "empty-answer", "the answer has no usable code")
    if observed.answered_text is None:
        cut = f"stopped after {len(completion.token_ids)} tokens: {_tail(completion.text)}"
        return Fault(0, "truncated", cut) if is_cut else None
    problem = _syntax_problem(observed.answered_text, observed.path)
    if not problem:
        return None
    return Fault(0, "truncated" if is_cut else "syntax-error", problem, observed.path)


def _syntax_problem(text: str, path: str) -> str:
    """The message of Python's parser with the line; empty for good code and for other languages."""
    if PurePosixPath(path).suffix not in {".py", ".pyi"}:
        return ""
    try:
        ast.parse(text)
    except SyntaxError as error:
        lines = text.splitlines()
        at = (error.lineno or 1) - 1
        shown = lines[at].strip()[:100] if 0 <= at < len(lines) else ""
        return f"{type(error).__name__}: {error.msg}" + (f" at `{shown}`" if shown else "")
    except (ValueError, RecursionError, MemoryError) as error:
        return f"{type(error).__name__}: the file cannot be read as Python"
    return ""


def _last_change(observed: ObservedRollout) -> int:
    """The last turn that changed a file; else the last that ran a command; else the last."""
    for names in (EDIT_TOOLS, _SHELLS):
        for idx in reversed(range(len(observed.turns))):
            turn = observed.turns[idx]
            for call_idx, call in enumerate(turn.calls):
                result = turn.results[call_idx] if call_idx < len(turn.results) else None
                if call.name in names and (result is None or not result.failed):
                    return idx
    return len(observed.turns) - 1


def _is_solved(observed: ObservedRollout) -> bool:
    score, reward = observed.rollout.score, observed.rollout.reward
    return score.all_passed if score is not None else reward is not None and reward >= 1


def _arguments(call: ToolCall) -> Any:
    """The arguments as a value; their text where they are not JSON."""
    try:
        return json.loads(call.arguments or "{}")
    except (ValueError, RecursionError):
        return call.arguments


def _paths(arguments: Any) -> list[str]:
    if not isinstance(arguments, dict):
        return []
    return [
        value
        for name, value in arguments.items()
        if name in {"path", "file", "file_path", "filename", "target_file"} and isinstance(value, str)
    ]


def _tail(text: str) -> str:
    return repr(text[-60:])
