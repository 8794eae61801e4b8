"""Run tests of a task tree in a fresh sandbox and learn, outside, what became of each.

Nothing that the jailed process prints counts: only records with the nonce of this run do,
once each, for exactly the tests that were asked for, and closed by a last record. A run
that breaks any of this is a failure of the candidate, never a success by absence.
"""

from __future__ import annotations

import json
import signal
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cache
from importlib.resources import files
from pathlib import Path
from types import MappingProxyType
from typing import Any

from composer_replication.records import ExecResult, Limits, Outcome, SandboxSpec
from composer_replication.sandbox import open_sandbox
from composer_replication.tasks.intake.cache import refuse_when_full
from composer_replication.tasks.intake.environment import Environment
from composer_replication.tasks.intake.tree_rules import folders_of_tree
from composer_replication.tasks.suite_options import OVERRIDES, suite_arguments
from composer_replication.tasks.test_functions import Place

_OVER_CPU = (-signal.SIGXCPU, 128 + signal.SIGXCPU)
NOTHING_COLLECTED = "nothing was collected"
_RECORD_BYTES = 64 * 1024**2
VARIABLES = {
    "PATH": "/usr/bin:/bin",
    "LC_ALL": "C.UTF-8",
    "TZ": "UTC",
    "CI": "true",  # hypothesis then draws the same examples every time and keeps no files
    "PYTHONHASHSEED": "0",
    "PYTHONDONTWRITEBYTECODE": "1",
    "OMP_NUM_THREADS": "1",
}
"""Of every run."""
BLOCKED = ("cacheprovider", "randomly", "faulthandler")
"""Plugins of pytest that are left out of every run."""
ARGUMENTS = (
    "-q", "--tb=no", "--no-header", "--no-summary", *(f"-pno:{name}" for name in BLOCKED), *OVERRIDES,
    "--continue-on-collection-errors",
)  # fmt: skip


class Ended(Enum):
    """What ended a run; never told from what its tests print."""

    BY_ITSELF = "by itself"
    TIME = "time"
    LIMIT = "another limit of the sandbox"
    EMPTY = "before anything was collected"


@dataclass(frozen=True, slots=True)
class TestReport:
    """What one run said.

    ``outcomes`` holds the tests that ran (after an ``error``: all requested ones, failed).
    ``collected`` are the node ids in run order. ``error`` is empty, or says why the run as
    a whole is a failure. ``places`` gives the file, first line and name of each test's
    function; ``called`` the functions (file, first line) that were called, when asked for and known.
    ``collect_errors`` maps files that could not be collected to the reason, and ``why`` tests that
    failed to the first line of theirs; ``skips`` has the same of what was skipped, files too. ``running`` is the test or file in which a run broke off and ``broke`` how, else both
    are empty. ``done`` are the outcomes that were known by then.
    ``cpu_seconds`` is the processor time that the run says it used: to be believed of golden code alone.
    Of a watched run (``running/watched_run.py``) alone: ``flags``, what was seen that honest tests seldom do, by name;
    ``test_seconds``, how long each test took, in processor time, or an eighth of the time by the clock where that is
    more; and ``pytest_exit_code``.
    """

    __test__ = False  # the name starts with Test; pytest must not collect it

    outcomes: Mapping[str, Outcome]
    collected: tuple[str, ...]
    error: str
    seconds: float
    places: Mapping[str, Place] = field(default_factory=dict)
    collect_errors: Mapping[str, str] = field(default_factory=dict)
    called: frozenset[tuple[str, int]] | None = None
    why: Mapping[str, str] = field(default_factory=dict)
    cpu_seconds: float = field(default=0.0, compare=False)
    skips: Mapping[str, str] = field(default_factory=dict, compare=False)
    running: str = field(default="", compare=False)
    broke: str = field(default="", compare=False)
    done: Mapping[str, Outcome] = field(default_factory=dict, compare=False)
    ended: Ended = field(default=Ended.BY_ITSELF, compare=False)
    flags: frozenset[str] = frozenset()
    test_seconds: Mapping[str, float] = field(default_factory=dict)
    pytest_exit_code: int = -1

    @property
    def passed(self) -> frozenset[str]:
        return frozenset(test for test, outcome in self.outcomes.items() if outcome is Outcome.PASSED)

    def all_passed(self, tests: Iterable[str]) -> bool:
        """Whether the run came to its end and these tests passed in it."""
        return not self.error and self.passed.issuperset(tests)


@dataclass(frozen=True, slots=True)
class Trial:
    """One run to make.

    Args:
        files: all files of its tree.
        node_ids: the tests to run; their files are collected and nothing else. None: all.
        seconds: past it the whole run is a failure; 0 for what a bench gives.
        stop_at_first_failure: enough for a gate that wants one failure; ``outcomes`` is then partial.
        wall_factor: at least 1: ``seconds`` is then processor time of the process that runs the tests
            (in whole seconds, rounded up), which a busy machine hardly changes, and the limit by the
            clock is so many times as long. None: it is time by the clock.
        left_out: tests that are not run and files that are not collected.
        with_calls: also report which functions of the tree are called.
        shuffle_seed: draws another order, with folders, modules and classes kept together; None:
            the order of the files.
        backwards: the drawn order from its end, so that any two tests meet both ways round.
    """

    files: Mapping[str, bytes]
    node_ids: Sequence[str] | None
    seconds: float = 0.0
    stop_at_first_failure: bool = False
    wall_factor: float | None = None
    left_out: Sequence[str] = ()
    with_calls: bool = False
    shuffle_seed: int | None = None
    backwards: bool = False

    @property
    def wall_seconds(self) -> float:
        """What it may take by the clock."""
        return self.seconds * (self.wall_factor or 1.0)

    def request(self, tree: Path, nonce: str) -> dict[str, Any]:
        """What the runner inside the sandbox reads."""
        return {
            "nonce": nonce,
            "node_ids": None if self.node_ids is None else list(self.node_ids),
            "files": sorted({node_id.partition("::")[0] for node_id in self.node_ids or ()}),
            "arguments": [*ARGUMENTS, *(["--maxfail=1"] if self.stop_at_first_failure else [])],
            "options": suite_arguments(tree),
            "import_roots": folders_of_tree(tree),
            "shuffle_seed": self.shuffle_seed,
            "backwards": self.backwards,
            "cpu_seconds": None if self.wall_factor is None else self.seconds,
            "left_out": list(self.left_out),
            "calls": self.with_calls,
        }


def run_inside(
    tree: Path,
    environment: Environment,
    program: Sequence[str],
    stdin: bytes,
    *,
    backend: str | None,
    limits: Limits,
    timeout_seconds: float,
    more_variables: Mapping[str, str] = MappingProxyType({}),
    is_ours: bool = True,
) -> ExecResult:
    """Start a program (its text, then its arguments) over a tree in a fresh sandbox; its records are kept up to 64 MiB."""
    limits = replace(limits, output_bytes=max(limits.output_bytes, _RECORD_BYTES))
    spec = SandboxSpec(tree=tree, read_only=environment.read_only, masked=environment.masked, limits=limits)
    with open_sandbox(spec, backend) as sandbox:
        result = sandbox.exec(
            [str(environment.python), "-P", "-B", "-c", *program],
            timeout_seconds=timeout_seconds,
            stdin=stdin,
            env={**variables(environment), **more_variables},
        )
        if is_ours:
            refuse_when_full(tree)
    return result


def variables(environment: Environment) -> dict[str, str]:
    """The variables of a run."""
    return {**VARIABLES, "PATH": f"{environment.root}/bin:{VARIABLES['PATH']}"}


@cache
def program_text(*modules: str) -> str:
    """The sources of modules below ``tasks``, one behind the other: a program that runs inside the sandbox."""
    paths = (f"{module.replace('.', '/')}.py" for module in modules)
    return "\n\n".join(
        files("composer_replication.tasks").joinpath(path).read_text("utf-8") for path in paths
    )


def judge(result: ExecResult, records: Sequence[dict[str, Any]], trial: Trial) -> TestReport:
    """Turn what came out of the sandbox into a report; anything out of order is an error.

    ``records`` are those with the nonce of the run.
    """
    by_event: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    for record in records:
        by_event[record["event"]].append(record)
    said: dict[str, Any] = {"collected": (), "outcomes": {}}
    try:
        said, disorder = _said(by_event), ""
    except (KeyError, TypeError, ValueError, IndexError) as error:
        disorder = f"a record is malformed: {error}"
    collected, outcomes = said["collected"], said["outcomes"]
    limit = broken_off(result, trial.seconds)
    problems = (
        (limit, limit),
        (by_event["forked"], "a test forks, and both processes go on"),
        (not records or records[-1]["event"] != "end", "the run ended without its closing record"),
        (len(by_event["end"]) != 1, "the run has more than one closing record"),
        (result.truncated, "the records are cut off"),
        (disorder, disorder),
        (not by_event["collected"], NOTHING_COLLECTED),
    )
    wanted = collected if trial.node_ids is None else trial.node_ids
    problem = next((text for is_so, text in problems if is_so), "") or compare_ids(
        wanted, collected, outcomes, is_partial=trial.stop_at_first_failure
    )
    if not problem:
        return TestReport(**said, error="", seconds=result.seconds)
    running, broke = ("", "") if disorder else _where(by_event, result)
    ended = Ended.EMPTY if problem == NOTHING_COLLECTED else Ended.BY_ITSELF
    if limit:
        ended = Ended.TIME if _has_run_out(result) else Ended.LIMIT
    return TestReport(
        **{**said, "outcomes": dict.fromkeys(trial.node_ids or collected, Outcome.FAILED)},
        error=f"{problem}{last_words(result)}",
        seconds=result.seconds,
        running=running,
        broke=broke,
        done=outcomes,
        ended=ended,
    )


def _said(by_event: Mapping[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """The fields of a report that the records say; ValueError where they contradict each other."""
    asked = by_event["collected"] or [{"ids": (), "places": ()}]
    collected = tuple(map(str, asked[0]["ids"]))
    if len(asked) > 1 or len(set(collected)) != len(collected):
        raise ValueError("a test or all of them were collected twice")
    outcomes = {str(record["id"]): Outcome(record["outcome"]) for record in by_event["test"]}
    if len(outcomes) != len(by_event["test"]) or not outcomes.keys() <= {*collected}:
        raise ValueError("a test has a second result, or was not collected")
    end = by_event["end"][-1] if by_event["end"] else {}
    called = end.get("called")
    return {
        "collected": collected,
        "outcomes": outcomes,
        "places": {
            node_id: (str(path), int(line), str(name))
            for node_id, (path, line, name) in zip(collected, asked[0]["places"], strict=False)
        },
        "collect_errors": {str(one["id"]): str(one["text"]) for one in by_event["collect_error"]},
        "skips": {str(one["id"]): str(one["text"]) for one in by_event["skip"]},
        "why": {str(one["id"]): str(one["why"]) for one in by_event["test"] if one.get("why")},
        "called": None if called is None else frozenset((str(path), int(line)) for path, line in called),
        "cpu_seconds": float(end.get("cpu_seconds", 0.0)),
    }


def _where(by_event: Mapping[str, list[dict[str, Any]]], result: ExecResult) -> tuple[str, str]:
    """The test or file in which a run broke off, and how; empty where the records do not tell."""
    tests, says = by_event["test"], f" (exit code {result.exit_code})"
    leaving = [record for record in tests if record["outcome"] == Outcome.MISSING]
    if by_event["forked"]:
        running, how = by_event["forked"][0].get("id"), "it forks, and both processes go on"
    elif leaving:
        running = leaving[0]["id"]
        how = f"it ends the whole run: {leaving[0].get('why') or 'no reason is given'}"
    elif not by_event["collected"]:
        running = by_event["file"][-1].get("id") if by_event["file"] else ""
        how = f"importing it ends the run{says}"
    elif by_event["end"]:  # a test asked for the end and passed
        running, how = tests[-1]["id"] if tests else "", f"the run ends after it{says}"
    else:
        done = {record["id"] for record in tests}
        waiting = (test for test in by_event["collected"][0]["ids"] if test not in done)
        running, how = next(waiting, ""), f"it ends the process{says}"
    running = str(running or "")[:400]
    if result.timed_out:  # empty where the time of all of it was over: no fault of the test that was running
        return running, result.stopped
    return running, how if running else ""


def broken_off(result: ExecResult, timeout_seconds: float) -> str:
    """Empty, or which limit ended a run."""
    if result.out_of_memory:
        return "the tests used more memory than allowed"
    if result.stopped:
        return f"the run was ended: {result.stopped}"
    return f"the tests ran longer than {timeout_seconds:g} s" if _has_run_out(result) else ""


def _has_run_out(result: ExecResult) -> bool:
    return result.timed_out or result.exit_code in _OVER_CPU


def last_words(result: ExecResult) -> str:
    """How the process ended and the last line that it printed, for a sentence's end."""
    lines = [line.strip() for line in result.stderr.splitlines() if line.strip()]
    said = f"; last output: {lines[-1][:200]}" if lines else ""
    return f" (exit code {result.exit_code}{said})"


def read_records(stdout: str, nonces: Collection[str]) -> list[dict[str, Any]]:
    """What was told with one of these nonces, in order: nothing else that a process printed counts."""
    records: list[dict[str, Any]] = []
    for line in stdout.split("\n"):
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict) and value.get("nonce") in nonces and isinstance(value.get("event"), str):
            records.append(value)
    return records


def compare_ids(
    node_ids: Sequence[str],
    collected: Sequence[str],
    outcomes: Mapping[str, Outcome],
    *,
    is_partial: bool = False,
) -> str:
    """Empty where exactly the wanted tests were collected, and all of them or a part ran; else what differs."""
    missing = sorted(set(node_ids) - set(collected))
    if missing or len(set(node_ids)) != len(collected):
        return f"the tests are not the stored ones: {missing[0] if missing else 'there are more'}"
    if not is_partial and set(outcomes) != set(node_ids):
        return f"not every test ran: {min(set(node_ids) - set(outcomes))}"
    return ""
