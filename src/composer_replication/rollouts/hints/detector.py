"""Which turn went wrong, and why.

A finding needs evidence in the record. What is normal work is none: a search that finds nothing, a test that
fails before the change that it asks for, the same test run again after an edit. A file that does not parse is a
fault of the turn that wrote it, and none where the policy did not. Failing tests at the end of the rollout belong
to the last turn that changed something. Where the sandbox failed nothing is found, since nothing is known.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import PurePosixPath
from typing import Any

from composer_replication.records import StopReason, ToolCall, ToolResult
from composer_replication.rollouts.hints.hint_context import Fault, ObservedRollout
from composer_replication.rollouts.tools.tool_schemas import Finding, call_fault
from composer_replication.tasks.syntax_trees import parse_syntax

EDIT_TOOLS = frozenset({"write_file", "str_replace"})
COMMAND_NOT_FOUND = 127
_COMMAND = re.compile(r"(?:^|: )(?P<subject>[\w./+-]+): (?:command )?not found", re.MULTILINE)
_MISSING_FILE = re.compile(r"(?P<subject>[^\s:'\"]+)['\"]?: (?:\[Errno 2\] )?No such file or directory")
_SYNTAX = re.compile(
    r"^(?:E\s+)?(?P<subject>(?:SyntaxError|IndentationError|TabError): [^\n]*)", re.MULTILINE
)
_SYNTAX_PLACE = re.compile(
    r'File "(?P<path>[^"\n]+)", line \d+\n(?:[^\n]*\n){0,3}?(?:E\s+)?(?:SyntaxError|IndentationError|TabError)'
)
_IMPORT = re.compile(
    r"^(?:E\s+)?(?:ModuleNotFoundError: No module named ['\"](?P<subject>[\w.]+)"
    r"|ImportError: cannot import name ['\"](?P<other>\w+))",
    re.MULTILINE,
)
_TOO_LONG = "the tests ran longer than"
_TOO_LARGE = "the tests used more memory"
_SHELL_WRITE = re.compile(
    r"(?<![\d&<>=-])>>?(?!\s*/dev/null)\s*[\w./\"'$~]"  # a file, not 2>&1
    r"|\btee\b|\bsed\b[^|;&]*-i|\bgit apply\b|\bpatch\b|\b(?:cp|mv)\b|write_text|\.write\("
)
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
    """Faults of single calls, in order."""
    written: list[tuple[int, str]] = []
    last: tuple[str, Any, ToolResult] | None = None
    for turn_idx, turn in enumerate(observed.turns):
        for call_idx, call in enumerate(turn.calls):
            result = turn.results[call_idx] if call_idx < len(turn.results) else None
            finding = call_fault(call, observed.tools)
            if finding is None and result is not None:
                finding = result_fault(call, result)
            author = turn_idx
            if finding is not None and finding[0] in {"syntax-error", "import-error"}:
                author = _author(finding, call, written, turn_idx)
                finding = finding if author >= 0 else None
            action = (call.name, _arguments(call), result)
            if finding is not None:
                yield Fault(author, *finding, call_idx if author == turn_idx else None)
            elif result is not None and last == action and call.name not in EDIT_TOOLS:
                evidence = f"{call.name} {call.arguments[:160]}"
                yield Fault(turn_idx, "repeated-action", evidence, call.name, call_idx)
            if result is not None:
                last = (*action[:2], result)
            if _is_writing(call) and (result is None or not result.failed):
                written.append((turn_idx, call.arguments))


def result_fault(call: ToolCall, result: ToolResult) -> Finding | None:
    """What a failed call shows, or None: what the tool says of it, else what shell and Python said in its output.

    A command that ends with an exit code above 0 and says none of these things is no fault: ``grep`` finds
    nothing, a test fails that has to fail first. A missing file or command counts only where the call itself names
    it. A tool that says that it failed is a fault in any words.
    """
    if not result.failed:
        return None
    first = next((line.strip() for line in result.text.splitlines() if line.strip()), "")
    if result.timed_out:
        return "time-out", first[:200] or "the call was stopped", call.name
    if result.fault == "missing-file":
        arguments = _arguments(call)
        path = arguments.get("path") if isinstance(arguments, dict) else None
        return result.fault, first[:200], str(path or call.name)
    if result.fault in ("edit-not-applied", "out-of-memory"):
        return result.fault, first[:200] or result.fault, call.name
    if result.is_error:
        return ("tool-error", first[:200], call.name) if first else None
    return _output_fault(call, result)


def _output_fault(call: ToolCall, result: ToolResult) -> Finding | None:
    """What shell and Python said."""
    text = result.text
    if found := _SYNTAX.search(text):
        place = _SYNTAX_PLACE.search(text)
        return "syntax-error", found["subject"][:200], place["path"] if place else ""
    if found := _IMPORT.search(text):
        return "import-error", found[0].strip()[:200], found["subject"] or found["other"]
    kind, pattern = ("missing-file", _MISSING_FILE)
    if result.exit_code == COMMAND_NOT_FOUND:
        kind, pattern = ("command-not-found", _COMMAND)
    for found in pattern.finditer(text):
        name = PurePosixPath(found["subject"]).name
        if name and name in call.arguments:
            return kind, _line(text, found), found["subject"]
    return None


def _line(text: str, found: re.Match[str]) -> str:
    """The line in which a match begins, at most 200 characters of it."""
    start = text.rfind("\n", 0, found.start("subject")) + 1
    return text[start:].partition("\n")[0].strip()[:200]


def _author(finding: Finding, call: ToolCall, written: Sequence[tuple[int, str]], turn_idx: int) -> int:
    """The turn that wrote the code which does not parse or import; -1 where the policy did not."""
    kind, evidence, subject = finding
    name = PurePosixPath(subject).name
    if kind == "syntax-error" and name in {"<string>", "<stdin>"}:
        return turn_idx  # the command itself
    for idx, text in reversed(written):
        if name and name in text:
            return idx
    if _is_writing(call) and name and name in call.arguments:
        return turn_idx
    is_own = kind == "import-error" and "No module named" in evidence and name in call.arguments
    return turn_idx if is_own else -1


def _is_writing(call: ToolCall) -> bool:
    """Whether a call changes files, as far as it shows."""
    return call.name in EDIT_TOOLS or (
        call.name == "bash" and _SHELL_WRITE.search(call.arguments) is not None
    )


def _turn_faults(observed: ObservedRollout) -> Iterator[Fault]:
    """Faults that a turn shows as a whole: cut off, or nothing said. A single answer is judged by its code."""
    if _is_single_answer(observed):
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
    if _is_single_answer(observed) and (fault := _answer_fault(observed)) is not None:
        yield fault
    elif score.error.startswith(_TOO_LONG):
        yield Fault(idx, "time-out", score.error[:200], "the tests")
    elif score.error.startswith(_TOO_LARGE):
        yield Fault(idx, "out-of-memory", score.error[:200], "the tests")
    else:
        named = [test.node_id for test in observed.failed_tests] or sorted(
            node_id
            for node_id, outcome in score.outcomes.items()
            if str(outcome) in {"failed", "error"} and node_id not in score.paid
        )
        if named or observed.run_error:
            evidence = (
                f"{len(named)} failed: {', '.join(named[:NUM_NAMED_TESTS])}"
                if named
                else observed.run_error[:200]
            )
            yield Fault(idx, "test-failure", evidence, named[0] if named else "")


def _is_single_answer(observed: ObservedRollout) -> bool:
    return len(observed.turns) == 1 and not observed.turns[0].calls


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
        parse_syntax(text)
    except SyntaxError as error:
        lines = text.splitlines()
        at = (error.lineno or 1) - 1
        shown = lines[at].strip()[:100] if 0 <= at < len(lines) else ""
        return f"{type(error).__name__}: {error.msg}" + (f" at `{shown}`" if shown else "")
    except (ValueError, RecursionError, MemoryError) as error:
        return f"{type(error).__name__}: the file cannot be read as Python"
    return ""


def _last_change(observed: ObservedRollout) -> int:
    """The last turn that changed a file, as far as its calls show; else the last turn."""
    for idx in reversed(range(len(observed.turns))):
        turn = observed.turns[idx]
        for call_idx, call in enumerate(turn.calls):
            result = turn.results[call_idx] if call_idx < len(turn.results) else None
            if _is_writing(call) and (result is None or not result.failed):
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


def _tail(text: str) -> str:
    return repr(text[-60:])
