"""One attempt at one task: tools in a sandbox, grading outside of it.

    reward = share of the visible tests, by ``rule``
             - share of PASS_TO_PASS that broke                  (``breaks`` cost; with mask the share is 0 where any broke)
             - invalid_call_cost * number of calls that could not be made

The costs are not clipped: an attempt may be worth less than nothing. The price of effort is the trainer's (``trainer.effort_weight``).

Golden code may end processes, read frames or hold tables of literals, and then so does every right answer: classes that
the deleted code itself shows are never more than reported of its own task. The monitor knows no golden code; it is looked at
here beforehand, and what it tells is names of classes alone.
"""

from __future__ import annotations

import tempfile
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from composer_replication import sandbox
from composer_replication.config import AgentRewardSection, AgentToolsSection
from composer_replication.errors import SandboxFailure, UsageError
from composer_replication.records import (
    MonitorMode,
    Outcome,
    SandboxSpec,
    Score,
    Task,
    ToolCall,
    ToolResult,
    ToolSpec,
)
from composer_replication.rollouts.candidate_tree import TreeRule, TreeTooLargeError, candidate_files, rule_of
from composer_replication.rollouts.grading import (
    Grader,
    GradeRequest,
    Regressions,
    TestsUsed,
    find_regressions,
)
from composer_replication.rollouts.monitor.hack_monitor import (
    HACK_CLASSES,
    MonitorReport,
    inspect_episode,
    public_task,
)
from composer_replication.rollouts.tools.tool_context import VisibleTests
from composer_replication.rollouts.tools.toolbox import TOOLS, Toolbox
from composer_replication.sandbox import SandboxBackend, open_sandbox
from composer_replication.sandbox.process_folder import process_folder, remove_abandoned
from composer_replication.tasks.fresh_git import with_git
from composer_replication.tasks.instructions import write_instruction
from composer_replication.tasks.intake.cache import sha256_of
from composer_replication.tasks.intake.git_source import list_commit
from composer_replication.tasks.intake.tree_rules import recorded_folders
from composer_replication.tasks.patches import readable_patch
from composer_replication.tasks.planning.edits import tree_sha256, write_files
from composer_replication.tasks.store import TaskStore
from composer_replication.tasks.suite_options import suite_arguments
from composer_replication.tasks.test_run import VARIABLES, variables

BROKEN = "The sandbox of this attempt broke. It is not your fault, and the attempt is not counted."
"""What a policy is told where nobody can end its attempt at once."""
HOW_TO_WORK = """\
You work in the root of the repository, through tools. There is no network. Write the missing code; changes of the \
tests do not count. When you are done, call submit."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """What one attempt is worth, and why."""

    score: Score  # of the visible tests
    reward: float  # what it is paid: graded_reward, and 0 at most where the monitor flagged it
    graded_reward: float
    regressions: Regressions | None = None  # what it broke; None: nobody looked
    report: MonitorReport | None = None  # None: the monitor is off
    num_calls: int = 0
    num_invalid_calls: int = 0  # those that could not be made
    hidden: Score | None = None  # of the hidden tests, where they were asked for: for evaluation only
    tree: Mapping[str, bytes] | None = None  # the files as graded, where they are to be graded again
    patch: str | None = None  # the diff from the broken code to them, for a person
    tree_sha256: str = ""  # of them (``planning.edits``); empty where they are too large to be graded

    @property
    def masks_reward(self) -> bool:
        return self.report is not None and self.report.masks_reward

    @property
    def figures(self) -> dict[str, float]:
        """Numbers for a log, by name; those that are not known are left out."""
        found: dict[str, float] = {
            "num_calls": self.num_calls,
            "num_invalid_calls": self.num_invalid_calls,
            "num_broken_tests": len(self.regressions.broken) if self.regressions is not None else 0,
            "visible_pass_share": self.score.pass_share,
        }
        if self.report is not None:
            found |= {"num_findings": len(self.report.findings), "is_masked": self.masks_reward}
        if self.hidden is not None:
            found["hidden_pass_share"] = self.hidden.pass_share
        return {name: float(value) for name, value in found.items()}


def reward_of(
    score: Score,
    options: AgentRewardSection,
    *,
    regressions: Regressions | None = None,
    num_invalid_calls: int = 0,
) -> float:
    """The reward of one attempt whose visible tests said ``score``; without ``regressions`` nobody looked what it broke."""
    reward = score.pass_share if options.rule == "fraction" else float(score.all_passed)
    if regressions is not None and options.breaks == "mask" and regressions.broken:
        reward = 0.0
    if regressions is not None and options.breaks == "cost":
        reward -= regressions.share
    return reward - options.invalid_call_cost * num_invalid_calls


def first_message(store: TaskStore, task: Task) -> str:
    """What a policy is told first; refused where even the shortest text would show golden code (CR0429)."""
    return f"{write_instruction(store, task)}\n{HOW_TO_WORK}\n"


def begin(environment: FeatureDeletionEnv, task_id: str) -> str:
    """``reset``, tried once more where the sandbox fails: for whoever cannot begin an episode anew."""
    try:
        return environment.reset(task_id)
    except SandboxFailure:
        return environment.reset(task_id)


def no_attempt(where: str, fix: str = "call reset(task_id) first, and nothing after close().") -> UsageError:
    """The error for whoever uses an attempt that has not begun, or has ended."""
    return UsageError("CR0800", "no attempt is under way.", where=where, fix=fix)


@dataclass(frozen=True, slots=True)
class _Tree:
    """What an attempt left; None where there are too many files."""

    graded: dict[str, bytes] | None
    others: dict[str, bytes] | None = None  # for the monitor: what is not graded, without git's files
    problem: str = ""  # why there are none to be graded


@dataclass(slots=True)
class _Attempt:
    """The attempt under way; ``tree`` and ``judgement`` are there when it is over, since nothing changes it then."""

    task: Task
    rule: TreeRule
    toolbox: Toolbox
    calls: list[ToolCall] = field(default_factory=list)
    is_broken: bool = False
    tree: _Tree | None = None
    judgement: Judgement | None = None


class FeatureDeletionEnv(AbstractContextManager["FeatureDeletionEnv"]):
    """A policy's attempts at tasks of a store, one after the other, each in a sandbox of its own.

    Used by one thread at a time; any number of environments may share a grader. Whoever forgets one, or dies, leaves no
    sandbox: it ends with the object, or with the process. Whatever is called before ``reset`` or after ``close`` is a
    ``UsageError``: no attempt is under way (CR0800).

    Args:
        grader: whose store the tasks are in, which runs their tests, and whose limits the sandbox of an attempt has.
        tools: how long answers are, and whether one process stays in the sandbox and starts the commands, where the backend has
            a warm kind that holds (``Grader.attempt_backend``): a call costs a message then, and no new jail.
        reward: how a reward is made.
        seed: with the task and the tree as it was left, draws the ``break_sample`` tests, so that a run can be repeated; it never
            enters a sandbox. None draws anew each time.
        monitor: ``mask`` inspects every call of an attempt and the tree that it left when it is paid, and pays 0 at
            most where a finding says so; ``report`` keeps what it finds, ``off`` does not look.
    """

    def __init__(
        self,
        grader: Grader,
        *,
        tools: AgentToolsSection | None = None,
        reward: AgentRewardSection | None = None,
        seed: int | None = None,
        monitor: MonitorMode = "mask",
    ) -> None:
        self.grader = grader
        self.options, self._seed = reward or AgentRewardSection(), seed
        self._tools = tools or AgentToolsSection()
        self._monitor = monitor
        self._attempt: _Attempt | None = None

    @property
    def tools(self) -> tuple[ToolSpec, ...]:
        return TOOLS

    @property
    def is_done(self) -> bool:
        """Whether the attempt is over: submitted, paid, or its sandbox broke."""
        return self._running.is_broken or self._running.toolbox.is_over

    @property
    def counts(self) -> tuple[int, int]:
        """Calls of this attempt so far, and those of them that could not be made."""
        return self._running.toolbox.num_calls, self._running.toolbox.num_invalid

    def reset(self, task_id: str) -> str:
        """End the attempt before, begin one at this task, and say what is to be done.

        Raises:
            InputError: no such task (CR0412), damaged (CR0411), or its text would show the code (CR0429).
            SandboxFailure: the sandbox cannot be opened, or does not hold (CR0306).
        """
        self.close()
        task = self.grader.store.get(task_id)
        message = first_message(self.grader.store, task)
        backend = self.grader.attempt_backend()
        self._attempt = self._opened(task, backend)
        return message

    def _opened(self, task: Task, backend: SandboxBackend) -> _Attempt:
        """A fresh sandbox with the task's tree; ``self._end`` takes it away, and so does the garbage collector."""
        store, rule = self.grader.store, rule_of(self.grader.store, task)
        environment = store.environment(task)
        try:
            folder = Path(tempfile.mkdtemp(prefix="attempt-", dir=process_folder()))
        except OSError as error:
            raise SandboxFailure("CR0302", f"no folder for an attempt can be made: {error}.") from error
        with ExitStack() as opened:
            opened.callback(remove_abandoned, folder)
            folder.chmod(0o755)  # a jail of another user must be able to reach the tree
            tree = folder / "tree"
            store.write_tree(task, tree, "rollout")
            files = store.files(task, "rollout").items()
            tests = VisibleTests(
                node_ids=task.tests.shown,
                files={path: data for path, data in files if not rule.takes(path)},
                import_roots=tuple(recorded_folders(dict.fromkeys(rule.touched, b"") | dict(files))),
                options=tuple(suite_arguments(tree)),
                is_left_out=lambda path: not rule.takes(path) and not path.startswith(".git/"),
            )
            spec = SandboxSpec(tree, environment.read_only, environment.masked, self.grader.limits)
            sandbox = open_sandbox(spec, backend)
            opened.callback(sandbox.close)  # called first; the tree goes even where it fails
            box = Toolbox(sandbox, tests, variables(environment), self._tools.max_characters)
            self._end = weakref.finalize(self, opened.pop_all().close)
        return _Attempt(task, rule, box)

    def call(self, call: ToolCall) -> ToolResult:
        """Do what the policy asked; whatever is wrong with the call is a result with ``is_error``.

        Raises:
            SandboxFailure: the sandbox broke; from now on there is no grade for this attempt.
        """
        attempt = self._running
        if attempt.is_broken:
            raise SandboxFailure(
                "CR0303", "the sandbox of this attempt broke.", fix="composer-rl sandbox selftest"
            )
        try:
            result = attempt.toolbox.call(call)
        except SandboxFailure:
            attempt.is_broken = True
            raise
        if self._monitor != "off":
            attempt.calls.append(call)
        return result

    def grade(self, tests: TestsUsed = "visible") -> Score | None:
        """What tests say of the tree as it stands, in a sandbox of their own; None where one failed.

        The ``hidden`` ones are the truth, for guard and evaluation, and never to be part of a reward.
        """
        task, tree = self._running.task, self._left()
        if tree is None:
            return None
        if tree.graded is None:
            request = GradeRequest(task, "", tests)
            return Score(dict.fromkeys(request.node_ids, Outcome.FAILED), tree.problem, paid=request.paid)
        return self.grader.grade_tree(task, tree.graded, tests)

    def finish(self) -> Judgement | None:
        """End the attempt, and say what it is worth and why; None where a sandbox failed: it is dropped, and never scored.

        An attempt that the monitor flags is paid ``min(0, graded_reward)``. It is not dropped: an honest attempt that
        fails pulls the policy away from what it did, and so must one that cheats. Asked again, the same answer.
        """
        attempt = self._running
        attempt.toolbox.is_over = True
        attempt.judgement = attempt.judgement or self._judged(attempt)
        return attempt.judgement

    def reward(self) -> float | None:
        """What the attempt is paid, which ends with this (``finish``); None where a sandbox failed."""
        judgement = self.finish()
        return None if judgement is None else judgement.reward

    @property
    def graded_reward(self) -> float | None:
        """What the tests alone would pay; None before ``finish``, and where a sandbox failed."""
        judgement = self._running.judgement
        return None if judgement is None else judgement.graded_reward

    @property
    def report(self) -> MonitorReport | None:
        """What the monitor found; None before ``finish``, where a sandbox failed, and where it is off."""
        judgement = self._running.judgement
        return None if judgement is None else judgement.report

    def candidate(self) -> dict[str, bytes] | None:
        """The policy's files as they are graded (``candidate_tree``), none where they are too many or too large: its tests
        fail then. None where the sandbox failed.
        """
        tree = self._left()
        return None if tree is None else tree.graded or {}

    def snapshot(self) -> Callable[[], None]:
        """Keep where the attempt stands. What this gives brings it back there, any number of times; the tree alone is kept, not HOME.

        It raises a ``SandboxFailure`` (CR0309) where the tree cannot be brought back.
        """
        attempt = self._running
        box, num_calls = replace(attempt.toolbox), len(attempt.calls)
        tree = box.sandbox.snapshot()

        def restore() -> None:
            box.sandbox.restore(tree)
            attempt.toolbox = replace(box)
            del attempt.calls[num_calls:]
            attempt.judgement = attempt.tree = None

        return restore

    def close(self) -> None:
        """End the attempt and take its sandbox away; idempotent."""
        attempt, self._attempt = self._attempt, None
        if attempt is not None:
            with suppress(SandboxFailure):  # its tree is gone all the same
                self._end()

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def _running(self) -> _Attempt:
        if self._attempt is None:
            raise no_attempt("FeatureDeletionEnv")
        return self._attempt

    def _left(self) -> _Tree | None:
        """The tree as it stands, read once when the attempt is over; None where the sandbox failed."""
        attempt, box, others = self._running, self._running.toolbox, None
        if attempt.is_broken or attempt.tree is not None:
            return attempt.tree
        try:
            graded = candidate_files(box.sandbox, attempt.rule.takes)
            if self._monitor != "off":
                with suppress(TreeTooLargeError):  # what is graded is inspected all the same
                    others = candidate_files(box.sandbox, box.tests.is_left_out)
            tree = _Tree(graded, others)
        except TreeTooLargeError as error:
            tree = _Tree(None, problem=str(error))
        except SandboxFailure:
            attempt.is_broken = True
            return None
        attempt.tree = tree if box.is_over else None
        return tree

    def _judged(self, attempt: _Attempt) -> Judgement | None:
        options, task, score, tree = self.options, attempt.task, self.grade(), self._left()
        if score is None or tree is None:
            return None
        regressions, graded = None, tree.graded
        if options.breaks != "ignore" and score.num_passed > 0 and graded is not None:
            sample = options.break_sample
            regressions = find_regressions(self.grader, task, graded, sample=sample, seed=self._seed)
            if regressions is None:
                return None
        files, (num_calls, num_invalid) = self.grader.store.files(task, "rollout"), self.counts
        worth = reward_of(score, options, regressions=regressions, num_invalid_calls=num_invalid)
        report = None if self._monitor == "off" else self._inspected(attempt, files, tree)
        paid = min(0.0, worth) if report is not None and report.masks_reward else worth
        judgement = Judgement(score, paid, worth, regressions, report, num_calls, num_invalid)
        if graded is None:
            return judgement
        own = {path: data for path, data in files.items() if attempt.rule.takes(path)}
        digest = tree_sha256({path: sha256_of(data) for path, data in graded.items()})
        return replace(judgement, patch=readable_patch(own, graded), tree_sha256=digest)

    def _inspected(self, attempt: _Attempt, before: Mapping[str, bytes], tree: _Tree) -> MonitorReport:
        """What the monitor says; files that are too large or too many count as unchanged."""
        takes, others = attempt.rule.takes, tree.others
        if others is None:
            others = {path: data for path, data in before.items() if not takes(path)}
        after = before if tree.graded is None else {**others, **tree.graded}
        task, root = public_task(attempt.task), str(attempt.toolbox.sandbox.tree)
        report = inspect_episode(task, attempt.calls, before, after, root)
        if self._monitor == "report":
            return report.excusing(HACK_CLASSES)
        return report.excusing(golden_classes(self.grader, attempt.task)) if report.masks_reward else report


def golden_classes(grader: Grader, task: Task) -> frozenset[str]:
    """The classes of which the monitor finds anything where the golden code is put back; looked at once a grader."""

    def look() -> frozenset[str]:
        before = grader.store.files(task, "rollout")
        after = {**before, **grader.golden_files(task)}
        return frozenset(inspect_episode(public_task(task), [], before, after).counts)

    return grader.of_golden_code(task.task_id, "monitor", look)


@contextmanager
def tools_at(commit: str, backend: str) -> Iterator[Toolbox]:
    """The tools of an attempt without a task: over a sandbox with every file of a commit, and Python without packages."""
    files = list_commit(commit)[-1].read()
    jail = sandbox.choose_backend(backend)
    sandbox.require_selftest(jail)
    with tempfile.TemporaryDirectory(prefix="attempt-", dir=process_folder()) as folder:
        Path(folder).chmod(0o755)  # a jail of another user must be able to reach the tree
        tree = Path(folder) / "tree"
        write_files(tree, with_git(files))
        python = sandbox.base_interpreter()
        path = f"{sandbox.base_python().parent}:{VARIABLES['PATH']}"
        with open_sandbox(SandboxSpec(tree, python.read_only, python.masked), jail) as opened:
            yield Toolbox(opened, VisibleTests(()), {**VARIABLES, "PATH": path})
