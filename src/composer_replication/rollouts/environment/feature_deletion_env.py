"""One attempt at one task: tools in a sandbox, grading outside of it. Fulfils ``interfaces.AgentEnvironment``.

Golden code may end processes, read frames or hold tables of literals, and then so does every right answer: classes that
the deleted code itself shows are never more than reported of its own task. The monitor knows no golden code; it is looked at
here beforehand, and what it tells is names of classes alone.
"""

from __future__ import annotations

import json
import shlex
import tempfile
import weakref
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from composer_replication.errors import SandboxFailure
from composer_replication.interfaces import Sandbox, SandboxBackend
from composer_replication.records import (
    Limits,
    MonitorMode,
    Outcome,
    SandboxSpec,
    Score,
    Task,
    ToolCall,
    ToolResult,
    ToolSpec,
)
from composer_replication.rollouts.candidate_tree import TreeTooLargeError, candidate_files, rule_of
from composer_replication.rollouts.environment.lease import no_attempt
from composer_replication.rollouts.environment.reward_options import Judgement, RewardOptions, reward_of
from composer_replication.rollouts.grading import Grader, GradeRequest, TestsUsed
from composer_replication.rollouts.monitor.hack_monitor import HackMonitor, monitor_for
from composer_replication.rollouts.monitor.report import (
    EpisodeEvidence,
    MonitorReport,
    PublicTask,
    public_task,
)
from composer_replication.rollouts.regressions import find_regressions
from composer_replication.rollouts.tools.command_tools import VisibleTests
from composer_replication.rollouts.tools.tool_limits import ToolLimits
from composer_replication.rollouts.tools.toolbox import TOOLS, CallCounts, Toolbox
from composer_replication.sandbox import open_sandbox
from composer_replication.sandbox.process_folder import process_folder, remove_abandoned
from composer_replication.tasks.instructions.writing import write_instruction
from composer_replication.tasks.patches import readable_patch
from composer_replication.tasks.store import TaskStore
from composer_replication.tasks.suite_options import suite_arguments
from composer_replication.tasks.test_run import import_roots, variables

BROKEN = "The sandbox of this attempt broke. It is not your fault, and the attempt is not counted."
"""What a policy is told where nobody can end its attempt at once."""
HOW_TO_WORK = """\
You work in the root of the repository, through tools. There is no network. Write the missing code; changes of the \
tests do not count. When you are done, call submit."""


def first_message(store: TaskStore, task: Task) -> str:
    """What a policy is told first; refused where even the shortest text would show golden code (CR0429)."""
    return f"{write_instruction(store, task)}\n{HOW_TO_WORK}\n"


@dataclass(frozen=True, slots=True)
class AttemptOptions:
    """How the sandbox of an attempt is opened.

    Args:
        is_warm: where the backend has a warm kind that holds (``Grader.attempt_backend``), one process stays in the
            sandbox and starts the commands, so that a call costs a message and no new jail. It ends with the attempt.
        sandbox_limits: of its memory, processes, disk and output.
        tool_limits: of each call.
    """

    is_warm: bool = True
    sandbox_limits: Limits = field(default_factory=Limits)
    tool_limits: ToolLimits = field(default_factory=ToolLimits)


class Attempt:
    """One attempt's sandbox and tools; ``close`` takes everything away, and so does the garbage collector.

    Args:
        store: where the task is.
        task: of which the tree is made.
        options: how; its ``is_warm`` is settled by ``backend``.
        backend: whose self-test has passed.
    """

    def __init__(
        self, store: TaskStore, task: Task, options: AttemptOptions, backend: SandboxBackend
    ) -> None:
        self.task = task
        self.rule = rule = rule_of(store, task)
        environment = store.environment(task)
        try:
            folder = Path(tempfile.mkdtemp(prefix="attempt-", dir=process_folder()))
        except OSError as error:
            raise SandboxFailure("CR0302", f"no folder for an attempt can be made: {error}.") from error
        try:
            folder.chmod(0o755)  # a jail of another user must be able to reach the tree
            tree = folder / "tree"
            store.write_tree(task, tree, "rollout")
            files = store.files(task, "rollout").items()
            tests = VisibleTests(
                node_ids=task.tests.shown,
                files={path: data for path, data in files if not rule.takes(path)},
                import_roots=tuple(import_roots(tree)),
                options=tuple(suite_arguments(tree)),
                is_left_out=lambda path: not rule.takes(path) and not path.startswith(".git/"),
            )
            spec = SandboxSpec(tree, environment.read_only, environment.masked, options.sandbox_limits)
            self.sandbox: Sandbox = open_sandbox(spec, backend)
        except BaseException:
            remove_abandoned(folder)
            raise
        self.close = weakref.finalize(self, _end, self.sandbox, folder)
        self.toolbox = Toolbox(self.sandbox, tests, variables(environment), options.tool_limits)


def _end(sandbox: Sandbox, folder: Path) -> None:
    """What ``Attempt.close`` does, once; the tree goes even where the sandbox does not end as it should."""
    try:
        sandbox.close()
    finally:
        remove_abandoned(folder)


@dataclass(frozen=True, slots=True)
class AttemptState:
    """Where an attempt stood: its tree, and what its tools had counted."""

    tree: str
    counts: CallCounts
    is_over: bool
    num_calls: int


@dataclass(frozen=True, slots=True)
class _Tree:
    """What an attempt left: the files that are graded, and every file but git's; None where there are too many."""

    graded: dict[str, bytes] | None
    every: dict[str, bytes] | None
    problem: str = ""


class FeatureDeletionEnv:
    """A policy's attempts at tasks of a store, one after the other, each in a sandbox of its own.

    Used by one thread at a time; any number of environments may share a grader. Whoever
    forgets one, or dies, leaves no sandbox: it ends with the object, or with the process.

    Args:
        grader: whose store the tasks are in, and which runs their tests; it counts failures of sandboxes.
        attempt: how the sandbox of an attempt is opened; ``AttemptOptions()`` by default.
        reward: how a reward is made; ``RewardOptions()`` by default.
        monitor: ``mask`` inspects every call of an attempt and the tree that it left when it is paid, and pays 0 at
            most where a finding says so; ``report`` keeps what it finds, ``off`` does not look.

    Raises (whatever is called before ``reset`` or after ``close``):
        UsageError: no attempt is under way (CR0800).
    """

    def __init__(
        self,
        grader: Grader,
        *,
        attempt: AttemptOptions | None = None,
        reward: RewardOptions | None = None,
        monitor: MonitorMode = "mask",
    ) -> None:
        self.grader = grader
        self.options = reward or RewardOptions()
        self._attempt_options = attempt or AttemptOptions()
        self._monitor = monitor_for(monitor)
        self._attempt: Attempt | None = None
        self._forget()

    def _forget(self) -> None:
        self._is_broken = False
        self._tree: _Tree | None = None
        self._judgement: Judgement | None = None
        self._calls: list[tuple[ToolCall, ToolResult]] = []

    @property
    def tools(self) -> tuple[ToolSpec, ...]:
        return TOOLS

    @property
    def is_done(self) -> bool:
        """Whether the attempt is over: submitted, paid, or its sandbox broke."""
        return self._is_broken or self._running.toolbox.is_over

    @property
    def counts(self) -> CallCounts:
        """Calls of this attempt so far."""
        return self._running.toolbox.counts

    @property
    def tree_root(self) -> str:
        """The absolute path of the attempt's tree, as commands see it."""
        return str(self._running.sandbox.tree)

    @property
    def graded_reward(self) -> float | None:
        """What the tests alone would pay for the attempt that ``finish`` ended."""
        return self._judgement.graded_reward if self._judgement else None

    @property
    def report(self) -> MonitorReport | None:
        """What the monitor found in it."""
        return self._judgement.report if self._judgement else None

    def reset(self, task_id: str) -> str:
        """End the attempt before, begin one at this task, and say what is to be done.

        Raises:
            InputError: no such task (CR0412), damaged (CR0411), or its text would show the code (CR0429).
            SandboxFailure: the sandbox cannot be opened, or does not hold (CR0306).
        """
        self.close()
        store, options = self.grader.store, self._attempt_options
        task = store.get(task_id)
        message = first_message(store, task)
        self._forget()
        backend = self.grader.attempt_backend(is_warm=options.is_warm)
        try:
            self._attempt = Attempt(store, task, options, backend)
        except SandboxFailure:
            self.grader.count_infrastructure_failure()
            raise
        return message

    def call(self, call: ToolCall) -> ToolResult:
        """Do what the policy asked; whatever is wrong with the call is a result with ``is_error``.

        Raises:
            SandboxFailure: the sandbox broke; from now on there is no grade for this attempt.
        """
        toolbox = self._running.toolbox
        if self._is_broken:
            raise SandboxFailure(
                "CR0303", "the sandbox of this attempt broke.", fix="composer-rl sandbox selftest"
            )
        try:
            result = toolbox.call(call)
        except SandboxFailure:
            self._break()
            raise
        if self._monitor is not None:
            self._calls.append((call, result))
        return result

    def grade(self) -> Score | None:
        """What the visible tests say of the tree as it stands, in a sandbox of their own; None where one failed."""
        return self._grade("visible")

    def grade_hidden(self) -> Score | None:
        """The truth about the tree as it stands, for guard and evaluation; never to be part of a reward."""
        return self._grade("hidden")

    def finish(self) -> Judgement | None:
        """End the attempt, and say what it is worth and why; None where a sandbox failed: it is dropped, and never scored.

        An attempt that the monitor flags is paid ``min(0, graded_reward)``. It is not dropped: an honest attempt that
        fails pulls the policy away from what it did, and so must one that cheats.
        """
        self._running.toolbox.is_over = True
        if self._judgement is None:
            self._judgement = self._judged()
        return self._judgement

    def reward(self) -> float | None:
        """What ``finish`` pays; None where a sandbox failed."""
        judgement = self.finish()
        return None if judgement is None else judgement.reward

    def candidate(self) -> dict[str, bytes] | None:
        """The policy's files as they are graded (``candidate_tree``); None where the sandbox failed."""
        tree = self._left()
        if tree is not None and tree.graded is None:
            raise TreeTooLargeError(tree.problem)
        return None if tree is None else tree.graded

    def snapshot(self) -> AttemptState:
        """Keep where the attempt stands, to come back to it by ``restore`` any number of times; the tree alone is kept, not HOME."""
        attempt = self._running
        box = attempt.toolbox
        return AttemptState(attempt.sandbox.snapshot(), replace(box.counts), box.is_over, len(self._calls))

    def restore(self, state: AttemptState) -> None:
        """Bring this attempt back to where it stood; a ``SandboxFailure`` (CR0309) where the tree cannot be."""
        attempt = self._running
        attempt.sandbox.restore(state.tree)
        attempt.toolbox.counts, attempt.toolbox.is_over = replace(state.counts), state.is_over
        del self._calls[state.num_calls :]
        self._judgement, self._tree = None, None

    def close(self) -> None:
        """End the attempt and take its sandbox away; idempotent."""
        attempt, self._attempt = self._attempt, None
        if attempt is not None:
            try:
                attempt.close()
            except SandboxFailure:  # its tree is gone all the same
                self.grader.count_infrastructure_failure()

    def __enter__(self) -> FeatureDeletionEnv:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def _running(self) -> Attempt:
        if self._attempt is None:
            raise no_attempt("FeatureDeletionEnv")
        return self._attempt

    def _break(self) -> None:
        self._is_broken = True
        self.grader.count_infrastructure_failure()

    def _left(self) -> _Tree | None:
        """The tree as it stands; read once when the attempt is over, since nothing changes it then. None where the sandbox failed."""
        attempt = self._running
        if self._is_broken:
            return None
        if self._tree is not None:
            return self._tree
        try:
            tree = _read(attempt, wants_all=self._monitor is not None)
        except SandboxFailure:
            self._break()
            return None
        self._tree = tree if attempt.toolbox.is_over else None
        return tree

    def _grade(self, tests: TestsUsed) -> Score | None:
        task, tree = self._running.task, self._left()
        if tree is None:
            return None
        if tree.graded is None:
            request = GradeRequest(task, "", tests)
            return Score(dict.fromkeys(request.node_ids, Outcome.FAILED), tree.problem, paid=request.paid)
        return self.grader.grade_tree(task, tree.graded, tests)

    def _judged(self) -> Judgement | None:
        options, score, tree = self.options, self.grade(), self._left()
        if score is None or tree is None:
            return None
        regressions = None
        if options.breaks != "ignore" and score.num_passed > 0 and tree.graded is not None:
            regressions = find_regressions(
                self.grader,
                self._running.task,
                tree.graded,
                sample=options.break_sample,
                seed=options.break_seed,
            )
            if regressions is None:
                return None
        graded = reward_of(score, options, regressions=regressions, num_invalid_calls=self.counts.num_invalid)
        report = None if self._monitor is None else self._inspected(self._monitor, tree)
        is_flagged = report is not None and report.masks_reward
        paid = min(0.0, graded) if is_flagged else graded
        return Judgement(score, paid, graded, regressions, report, patch=self._patch(tree))

    def _patch(self, tree: _Tree) -> str | None:
        """From the broken code to the files that were graded; None where the tree was too large to be graded."""
        store, attempt = self.grader.store, self._running
        if tree.graded is None:
            return None
        files = store.files(attempt.task, "rollout")
        return readable_patch(
            {path: data for path, data in files.items() if attempt.rule.takes(path)}, tree.graded
        )

    def _inspected(self, monitor: HackMonitor, tree: _Tree) -> MonitorReport:
        """What the monitor says, each call a turn of its own; of a tree that is too large it sees the calls alone."""
        store, task = self.grader.store, self._running.task
        before, turns = store.files(task, "rollout"), [[pair] for pair in self._calls]
        after = before if tree.every is None else tree.every
        report = monitor.inspect(
            EpisodeEvidence(public_task(store, task), turns, before, after, self.tree_root)
        )
        return only_reporting(report, golden_classes(self.grader, task)) if report.masks_reward else report


def _read(attempt: Attempt, *, wants_all: bool) -> _Tree:
    every: dict[str, bytes] | None = None
    if wants_all:
        try:
            every = candidate_files(attempt.sandbox, lambda path: not path.startswith(".git/"))
        except TreeTooLargeError:  # what is graded of it may be small all the same
            pass
        else:
            graded = {path: data for path, data in every.items() if attempt.rule.takes(path)}
            return _Tree(graded, every)
    try:
        return _Tree(candidate_files(attempt.sandbox, attempt.rule.takes), None)
    except TreeTooLargeError as error:
        return _Tree(None, None, str(error))


def only_reporting(report: MonitorReport, names: Collection[str]) -> MonitorReport:
    """The report, in which findings of these classes flag nothing."""
    findings = (replace(each, action="report") if each.name in names else each for each in report.findings)
    return replace(report, findings=tuple(findings))


def golden_classes(grader: Grader, task: Task) -> frozenset[str]:
    """What the monitor finds where the golden code is put back; looked at once a grader."""

    def look() -> frozenset[str]:
        before = grader.store.files(task, "rollout")
        return shown_classes(public_task(grader.store, task), before, grader.golden_files(task))

    return grader.golden_runs.look_up(task.task_id, "monitor", look)


def shown_classes(
    task: PublicTask, before: Mapping[str, bytes], golden: Mapping[str, bytes]
) -> frozenset[str]:
    """The classes of which the monitor finds anything in an episode that only writes these files, by commands."""
    commands = [
        f"cat > {shlex.quote(path)} <<'GOLDEN'\n{data.decode('utf-8', 'replace')}\nGOLDEN"
        for path, data in golden.items()
    ]
    turns = [[(ToolCall("bash", json.dumps({"command": each})), ToolResult(""))] for each in commands]
    return frozenset(HackMonitor().inspect(EpisodeEvidence(task, turns, before, {**before, **golden})).counts)
