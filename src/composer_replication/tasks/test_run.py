"""Run tests of a task tree in a fresh sandbox and learn, outside, what became of each.

Nothing that the jailed process prints counts: only records with the nonce of this run do,
once each, for exactly the tests that were asked for, and closed by a last record. A run
that breaks any of this is a failure of the candidate, never a success by absence.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cache
from importlib.resources import files
from pathlib import Path
from types import MappingProxyType
from typing import Any

from composer_replication.records import ExecResult, Limits, Outcome, SandboxSpec
from composer_replication.sandbox import open_sandbox
from composer_replication.sandbox.supervised_run import Verdict
from composer_replication.tasks.call_contexts import Contexts, decode
from composer_replication.tasks.intake.cache import refuse_when_full
from composer_replication.tasks.intake.environment import Environment
from composer_replication.tasks.intake.tree_rules import folders_of_tree
from composer_replication.tasks.suite_options import OVERRIDES, suite_arguments
from composer_replication.tasks.test_functions import Place

_TOO_LONG = "the tests ran longer than"
_TOO_MUCH_MEMORY = "the tests used more memory than allowed"
_OVER_CPU = (-signal.SIGXCPU, 128 + signal.SIGXCPU)
import_roots = folders_of_tree
"""Where the package under test is imported from, relative to the tree."""
NOTHING_COLLECTED = "nothing was collected"
_NAME = 400
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
    """Which limit ended a run, if one did; never told from what its tests print. The sandbox's own are its verdicts."""

    BY_ITSELF = "by itself"
    TIME = "time"
    MEMORY = Verdict.OVER_MEMORY.value
    DISK = Verdict.OVER_DISK.value
    PROCESSES = Verdict.OVER_PROCESSES.value
    EMPTY = "before anything was collected"


SANDBOX_LIMITS = (Ended.MEMORY, Ended.DISK, Ended.PROCESSES)


@dataclass(frozen=True, slots=True)
class TestReport:
    """What one run said.

    ``outcomes`` holds the tests that ran (after an ``error``: all requested ones, failed).
    ``collected`` are the node ids in run order. ``error`` is empty, or says why the run as
    a whole is a failure. ``places`` gives the file, first line and name of each test's
    function; ``contexts`` the functions (file, first line) that each test called, and under
    ``""`` those called for all of them (see ``call_contexts``); both only when asked for.
    ``collect_errors`` maps files that could not be collected to the reason, and ``why`` tests that
    failed to the first line of theirs (when places were asked for); ``skips`` has the same of what was
    skipped, files too. ``running`` is the test or file in which a run broke off and ``broke`` how, else both
    are empty. ``done`` are the outcomes that were known by then.
    ``cpu_seconds`` is the processor time that the run says it used: to be believed of golden code alone.
    """

    __test__ = False  # the name starts with Test; pytest must not collect it

    outcomes: Mapping[str, Outcome]
    collected: tuple[str, ...]
    error: str
    seconds: float
    places: Mapping[str, Place] = field(default_factory=dict)
    collect_errors: Mapping[str, str] = field(default_factory=dict)
    contexts: Contexts = field(default_factory=dict)
    why: Mapping[str, str] = field(default_factory=dict)
    cpu_seconds: float = field(default=0.0, compare=False)
    skips: Mapping[str, str] = field(default_factory=dict, compare=False)
    running: str = field(default="", compare=False)
    broke: str = field(default="", compare=False)
    done: Mapping[str, Outcome] = field(default_factory=dict, compare=False)
    ended: Ended = field(default=Ended.BY_ITSELF, compare=False)

    @property
    def ran_out_of_time(self) -> bool:
        return self.ended is Ended.TIME

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
        idle_seconds: it ends when all of it has waited so long at a stretch; seen only where there is a ``/proc``.
        left_out: tests that are not run and files that are not collected.
        is_golden: it should pass, so where it runs out of time the machine may be to blame.
        each_seconds: of a run that is alone: it ends when one test, or the import of one file, takes longer by the clock;
            that test is named then.
        with_places: also report where test functions stand.
        with_contexts: also report which functions each single test calls.
        shuffle_seed: draws another order, with folders, modules and classes kept together; None:
            the order of the files.
        backwards: the drawn order from its end, so that any two tests meet both ways round.
    """

    files: Mapping[str, bytes]
    node_ids: Sequence[str] | None
    seconds: float = 0.0
    stop_at_first_failure: bool = False
    wall_factor: float | None = None
    idle_seconds: float | None = None
    left_out: Sequence[str] = ()
    is_golden: bool = False
    each_seconds: float | None = None
    with_places: bool = False
    with_contexts: bool = False
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
            "import_roots": import_roots(tree),
            "places": self.with_places,
            "shuffle_seed": self.shuffle_seed,
            "backwards": self.backwards,
            "cpu_seconds": None if self.wall_factor is None else self.seconds,
            "left_out": list(self.left_out),
            "contexts": self.with_contexts,
            "tell": None,
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
    """Start a program (its text, then its arguments) over a tree in a fresh sandbox."""
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


def record_bytes(limits: Limits) -> int:
    """How much of each stream of a run is kept."""
    return max(limits.output_bytes, _RECORD_BYTES)


@cache
def runner_text(name: str) -> str:
    """The source of a program that runs inside the sandbox."""
    return files("composer_replication.tasks.running").joinpath(name).read_text()


def judge(result: ExecResult, nonce: str, trial: Trial) -> TestReport:
    """Turn what came out of the sandbox into a report; anything out of order is an error."""
    records = read_records(result.stdout, nonce)
    ended = _ended(result, records)
    problem = broken_off(result, trial.seconds)
    if not problem and (not records or records[-1]["event"] != "end"):
        problem = "the run ended without its closing record"
    if not problem and sum(record["event"] == "end" for record in records) != 1:
        problem = "the run has more than one closing record"
    if not problem and result.truncated:
        problem = "the records are cut off"
    tally = _Tally()
    disorder = tally.read_all(records)
    problem = problem or disorder
    if not problem and any(record["event"] == "doubled" for record in records):
        problem = "a test forks, and both processes go on with the suite"
    if problem == NOTHING_COLLECTED:
        ended = Ended.EMPTY
    if not problem and trial.node_ids is not None:
        problem = compare_ids(
            trial.node_ids, tally.collected, tally.outcomes, is_partial=trial.stop_at_first_failure
        )
    elif not problem and not trial.stop_at_first_failure and set(tally.outcomes) != set(tally.collected):
        problem = "not every collected test ran"
    running, broke = _where_it_broke(records, result) if problem else ("", "")
    if result.timed_out:  # the time of all of it: no fault of the test that was running then
        broke = ""
    done = {} if disorder else tally.outcomes
    outcomes = tally.outcomes
    if problem:
        outcomes = dict.fromkeys(trial.node_ids or tally.collected, Outcome.FAILED)
        problem = f"{problem}{last_words(result)}"
    else:
        ended = Ended.BY_ITSELF
    return TestReport(
        **{name: getattr(tally, name) for name in tally.__slots__ if name != "outcomes"},
        outcomes=outcomes,
        error=problem,
        seconds=result.seconds,
        running=running,
        broke=broke,
        done=done if problem else {},
        ended=ended,
    )


def _ended(result: ExecResult, records: Sequence[dict[str, Any]]) -> Ended:
    is_stuck = any(one.get("event") == "stuck" for one in records)
    if is_stuck or result.timed_out or result.exit_code in _OVER_CPU:
        return Ended.TIME
    if result.out_of_memory:
        return Ended.MEMORY
    return next((limit for limit in SANDBOX_LIMITS if limit.value == result.stopped), Ended.BY_ITSELF)


def broken_off(result: ExecResult, timeout_seconds: float) -> str:
    """Empty, or which limit ended a run."""
    if result.timed_out or result.exit_code in _OVER_CPU:
        return f"{_TOO_LONG} {timeout_seconds:g} s"
    return _TOO_MUCH_MEMORY if result.out_of_memory else ""


def last_words(result: ExecResult) -> str:
    """How the process ended and the last line that it printed, for a sentence's end."""
    lines = [line.strip() for line in result.stderr.splitlines() if line.strip()]
    return (
        f" (exit code {result.exit_code}; last output: {lines[-1][:200]})"
        if lines
        else f" (exit code {result.exit_code})"
    )


def read_records(stdout: str, nonce: str) -> list[dict[str, Any]]:
    """The records of one run in order: nothing else that its process printed counts."""
    records: list[dict[str, Any]] = []
    for line in stdout.split("\n"):
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict) and value.get("nonce") == nonce and isinstance(value.get("event"), str):
            records.append(value)
    return records


def _where_it_broke(records: Sequence[dict[str, Any]], result: ExecResult) -> tuple[str, str]:
    """The test or file in which a run broke off, and how; empty where the records do not tell."""
    try:
        by_event: dict[str, list[dict[str, Any]]] = {}
        for record in records:
            by_event.setdefault(record["event"], []).append(record)
        tests = by_event.get("test", [])
        for record in by_event.get("stuck", []):
            return str(record["id"])[:_NAME], str(record["text"])
        for record in by_event.get("doubled", []):
            return str(record["id"])[:_NAME], "it forks, and both processes go on with the suite"
        says = f" (exit code {result.exit_code})"
        for record in tests:
            if record["outcome"] == Outcome.MISSING:
                why = record.get("why", "no reason is given")
                return str(record["id"])[:_NAME], f"it ends the whole run: {why}"
        if "collected" not in by_event:
            file = str(by_event["file"][-1]["id"]) if "file" in by_event else ""
            return file[:_NAME], f"importing it ends the run{says}" if file else ""
        if "end" in by_event:  # a test asked for the end and passed
            return (str(tests[-1]["id"])[:_NAME], f"the run ends after it{says}") if tests else ("", "")
        done = {record["id"] for record in tests}
        waiting = (str(test) for test in by_event["collected"][0]["ids"] if test not in done)
        running = next(waiting, "")[:_NAME]
        return running, f"it ends the process{says}" if running else ""
    except (KeyError, TypeError, IndexError):  # forged
        return "", ""


@dataclass(slots=True)
class _Tally:
    """Reads the records of one run in order; its fields are those of the report."""

    collected: tuple[str, ...] = ()
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    places: dict[str, Place] = field(default_factory=dict)
    collect_errors: dict[str, str] = field(default_factory=dict)
    contexts: Contexts = field(default_factory=dict)
    why: dict[str, str] = field(default_factory=dict)
    skips: dict[str, str] = field(default_factory=dict)
    cpu_seconds: float = 0.0

    def read_all(self, records: Sequence[dict[str, Any]]) -> str:
        """Take all records; the answer is empty, or what is out of order."""
        try:
            for record in records:
                problem = self._take(record)
                if problem:
                    return problem
        except (KeyError, TypeError, ValueError, IndexError):
            return "a record is malformed"
        return "" if any(record["event"] == "collected" for record in records) else NOTHING_COLLECTED

    def _take(self, record: dict[str, Any]) -> str:
        if record["event"] in ("file", "stuck", "doubled"):
            return ""
        if record["event"] == "end":
            self.contexts = decode(record["contexts"]) if "contexts" in record else {}
            self.cpu_seconds = float(record.get("cpu_seconds", 0.0))
        elif record["event"] == "collect_error":
            self.collect_errors[str(record["id"])] = str(record["text"])
        elif record["event"] == "skip":
            self.skips[str(record["id"])] = str(record["text"])
        elif record["event"] == "collected":
            if self.collected:
                return "tests were collected twice"
            self.collected = tuple(map(str, record["ids"]))
            for node_id, (path, line, name) in zip(self.collected, record["places"], strict=False):
                self.places[node_id] = (str(path), int(line), str(name))
            if len(set(self.collected)) != len(self.collected):
                return "two tests have the same node id"
        else:
            node_id = str(record["id"])
            if node_id in self.outcomes or node_id not in self.collected:
                return f"a second or unknown result for {node_id}"
            self.outcomes[node_id] = Outcome(record["outcome"])
            if "why" in record:
                self.why[node_id] = str(record["why"])
        return ""


def compare_ids(
    node_ids: Sequence[str],
    collected: Sequence[str],
    outcomes: Mapping[str, Outcome],
    *,
    is_partial: bool = False,
) -> str:
    """Empty where exactly the wanted tests were collected and ran; else what differs."""
    missing = sorted(set(node_ids) - set(collected))
    if missing or len(set(node_ids)) != len(collected):
        return f"the tests are not the stored ones: {missing[0] if missing else 'there are more'}"
    if not is_partial and set(outcomes) != set(node_ids):
        return f"not every test ran: {min(set(node_ids) - set(outcomes))}"
    return ""
