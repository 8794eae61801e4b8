"""Grade untrusted code: what a watched run says, read by the parent outside.

The code under test shares an interpreter with its tests, so a report from inside is evidence and
no proof. ``running/watched_runner.py`` sends each observation when it is made, as a line that is
signed together with all lines before it; here the lines are checked, put in order, and made into
outcomes. What does not fit is an error of the whole run, what is merely odd is a flag: whether
honest code raises it as well is for the caller to know (see ``rollouts.forgery_checks``).
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

from composer_replication.records import ExecResult, Limits, Outcome
from composer_replication.tasks.intake.environment import Environment
from composer_replication.tasks.test_run import (
    NOTHING_COLLECTED,
    Trial,
    broken_off,
    compare_ids,
    last_words,
    program_text,
    record_bytes,
    run_inside,
)

_WORST = (Outcome.PASSED, Outcome.SKIPPED, Outcome.FAILED, Outcome.ERROR)
_NUM_MAC_LETTERS = 32
_EVENTS = frozenset({"flag", "collected", "start", "call", "report", "finish", "end"})


@dataclass(frozen=True, slots=True)
class WatchedReport:
    """What one watched run said.

    ``outcomes``: of the wanted tests; after an ``error`` all failed. ``error``: empty, or why the
    run as a whole is a failure. ``flags``: what was seen that honest tests seldom do, by name.
    ``test_seconds``: how long each test took, in processor time, or an eighth of the time by the clock
    where that is more. ``pytest_exit_code``: -1 where there is none. ``cpu_seconds``: as the run says, to be believed of
    golden code alone.
    """

    outcomes: Mapping[str, Outcome]
    error: str
    flags: frozenset[str]
    seconds: float
    test_seconds: Mapping[str, float] = field(default_factory=dict)
    pytest_exit_code: int = -1
    cpu_seconds: float = 0.0


def run_watched(
    tree: Path,
    environment: Environment,
    node_ids: Sequence[str],
    *,
    backend: str | None = None,
    timeout_seconds: float,
    wall_factor: float = 1.0,
    limits: Limits | None = None,
    shuffle_seed: int | None = None,
    backwards: bool = False,
) -> WatchedReport:
    """Run tests over a private copy of a tree that holds untrusted code.

    Args:
        tree: the caller's private copy; its tests may write into it.
        environment: where the test runner lives.
        node_ids: the tests to run; exactly these must be collected and run.
        backend: sandbox backend by name or dotted path; None for the best of this machine.
        timeout_seconds: above 0, processor time in whole seconds, rounded up; past it the run is a failure.
        wall_factor: at least 1; the limit by the clock is so many times as long.
        limits: of the sandbox; records may use more output than other programs.
        shuffle_seed: draws the order, as in ``Trial``.
        backwards: that order from its end.
    """
    key = secrets.token_hex(32)
    trial = Trial(
        {}, node_ids, timeout_seconds, wall_factor=wall_factor, shuffle_seed=shuffle_seed, backwards=backwards
    )
    chosen = limits or Limits()
    result = run_inside(
        tree,
        environment,
        [_program()],
        bytes.fromhex(key) + json.dumps(trial.request(tree, "")).encode(),
        backend=backend,
        limits=replace(chosen, output_bytes=record_bytes(chosen)),
        timeout_seconds=trial.wall_seconds,
        is_ours=False,
    )
    return judge_watched(result, key, node_ids, timeout_seconds=timeout_seconds)


@cache
def _program() -> str:
    """The runner in a namespace of its own: no module has it, and its built-in functions are copies."""
    names = ("running.suite_plugin", "running.pytest_runner", "running.watched_runner")
    text = program_text(*names) + "\n\nwatched_main()\n"
    own = "{'__name__': 'watched_runner', '__builtins__': dict(vars(__import__('builtins')))}"
    return f"exec(compile({text!r}, '<runner>', 'exec'), {own})"


def judge_watched(
    result: ExecResult, key: str, node_ids: Sequence[str], *, timeout_seconds: float
) -> WatchedReport:
    """Turn what came out of the sandbox into a report; anything out of order is an error."""
    records, problem = read_transcript(result.stdout, key)
    story = _Story()
    problems = (
        (result.truncated, "the records are cut off"),
        (not records or records[-1][0] != "end", "the run ended without its closing record"),
        (result.exit_code != 0, "the run was ended after its closing record"),
    )
    limit = broken_off(result, timeout_seconds)
    problem = limit or problem or next((text for is_so, text in problems if is_so), "")
    problem = problem or story.disorder_in(records)
    outcomes = story.outcomes
    if problem := problem or compare_ids(node_ids, story.collected, outcomes):
        outcomes = dict.fromkeys(node_ids, Outcome.FAILED)
        problem = f"{problem}{last_words(result)}"
    flags, times = frozenset(story.flags), story.test_seconds
    return WatchedReport(
        outcomes, problem, flags, result.seconds, times, story.pytest_exit_code, story.cpu_seconds
    )


def read_transcript(stdout: str, key: str) -> tuple[list[list[str]], str]:
    """The records in order, and what is wrong with them: empty when each line is signed with all before it.

    A line is ``MAC HEX.HEX…``: blake2s of 16 bytes, keyed with the 32 bytes of ``key``, over the
    second words of this line and all before it, each with a line feed; each HEX is one UTF-8 text.
    """
    state = hashlib.blake2s(key=bytes.fromhex(key), digest_size=_NUM_MAC_LETTERS // 2)
    records: list[list[str]] = []
    lines = stdout.split("\n")
    if lines[-1]:
        return records, "the records are cut off"
    for line in lines[:-1]:
        mac, _, body = line.partition(" ")
        state.update(body.encode("utf-8", "replace") + b"\n")
        if not hmac.compare_digest(mac.encode("utf-8", "replace"), state.copy().hexdigest().encode()):
            return records, "something else than the test runner wrote records"
        try:
            records.append([bytes.fromhex(each).decode("utf-8", "surrogatepass") for each in body.split(".")])
        except ValueError:
            return records, "a record is malformed"
    return records, ""


class _OutOfOrder(Exception):
    """What of a run is not as it must be."""


@dataclass(slots=True)
class _Story:
    """Reads the records of one run in order, each kind by the method of its name; ``watched_runner.make_recorder`` writes them."""

    collected: tuple[str, ...] = ()
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    flags: set[str] = field(default_factory=set)
    test_seconds: dict[str, float] = field(default_factory=dict)
    pytest_exit_code: int = -1
    cpu_seconds: float = 0.0
    was_collected: bool = False
    has_ended: bool = False
    kinds: dict[str, str] = field(default_factory=dict)
    current: str = ""
    phases: list[tuple[str, str]] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)

    def disorder_in(self, records: Sequence[Sequence[str]]) -> str:
        """Take all records; the answer is empty, or what is out of order."""
        try:
            for event, *fields in records:
                if self.has_ended:
                    return "records follow the closing one"
                if event not in _EVENTS:
                    return "a record is malformed"
                if event in ("call", "report", "finish") and fields[0] != self.current:
                    return f"a result for {fields[0]} which is not running"
                getattr(self, f"_{event}")(*fields)
        except _OutOfOrder as disorder:
            return str(disorder)
        except (IndexError, KeyError, TypeError, ValueError):
            return "a record is malformed"
        return "" if self.was_collected else NOTHING_COLLECTED

    def _flag(self, *texts: str) -> None:
        self.flags.update(texts)

    def _collected(self, kinds: str, *node_ids: str) -> None:
        if self.was_collected:
            raise _OutOfOrder("tests were collected twice")
        if len(set(node_ids)) != len(node_ids) or len(kinds) != len(node_ids):
            raise _OutOfOrder("two tests have the same node id")
        self.was_collected, self.collected = True, node_ids
        self.kinds = dict(zip(node_ids, kinds, strict=True))

    def _start(self, node_id: str, *flags: str) -> None:
        self.flags.update(flags)
        position = len(self.outcomes)
        if self.current or position >= len(self.collected) or self.collected[position] != node_id:
            raise _OutOfOrder(f"{node_id} ran out of turn")
        self.current, self.phases, self.calls = node_id, [], []

    def _call(self, _node_id: str, how: str) -> None:
        self.calls.append(how)

    def _report(self, _node_id: str, when: str, outcome: str, expected: str) -> None:
        """What one phase says of its test; nothing for a setup or teardown that went well."""
        if outcome == "failed":
            said = "failed" if when == "call" else "error"
        elif outcome == "skipped" or expected:
            said = "skipped"
        else:
            said = "passed" if when == "call" and outcome == "passed" else ""
        self.phases.append((when, said))

    def _finish(self, node_id: str, seconds: str) -> None:
        found = [Outcome(outcome) for _, outcome in self.phases if outcome]
        outcome = max(found, key=_WORST.index) if found else Outcome.MISSING
        names = [when for when, _ in self.phases]
        if names not in (["setup", "call", "teardown"], ["setup", "teardown"]):
            self.flags.add("a test was not reported in the usual three steps")
        if self.kinds[node_id] == "f" and outcome is Outcome.PASSED and self.calls != ["returned"]:
            self.flags.add("a test was reported as passed that did not return")
        self.outcomes[node_id], self.test_seconds[node_id] = outcome, float(seconds)
        self.current = ""

    def _end(self, code: str, seconds: str, *flags: str) -> None:
        self.has_ended = True
        self.pytest_exit_code, self.cpu_seconds = int(code), float(seconds)
        self.flags.update(flags)
        if self.current:
            raise _OutOfOrder("a test has no end")
