"""An attempt inside another library's event loop: its blocking work in threads, its end whatever happens.

Needs ``anyio``, which comes with every library that has an event loop of its own, because some of them run on
asyncio and on trio.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import anyio
import anyio.to_thread
from anyio.lowlevel import RunVar

from composer_replication.errors import SandboxFailure
from composer_replication.records import MonitorMode, Score, ToolCall, ToolResult
from composer_replication.rollouts.environment.feature_deletion_env import FeatureDeletionEnv
from composer_replication.rollouts.environment.reward_options import RewardOptions
from composer_replication.rollouts.grading import Grader
from composer_replication.rollouts.monitor import MonitorReport
from composer_replication.rollouts.regressions import RegressionCheck
from composer_replication.tasks.store import TaskStore

BROKEN = "The sandbox of this attempt broke. It is not your fault, and the attempt is not counted."
"""What a policy is told where nobody can end its attempt at once."""
NUM_THREADS = 64
"""Attempts at work at the same time in one event loop; they wait for processes nearly always."""
_NOT_JSON = "(arguments that could not be read)"
_THREADS: RunVar[anyio.CapacityLimiter] = RunVar("composer_replication.attempt_threads")

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class AttemptOutcome:
    """What an attempt came to.

    ``reward`` is None where infrastructure failed: drop the attempt, and score it never. ``score`` is
    what the visible tests said, ``hidden`` what the hidden ones did where they were asked for: the truth, for evaluation
    only. ``report`` is the monitor's, None where it is off.
    """

    reward: float | None
    score: Score | None = None
    hidden: Score | None = None
    num_calls: int = 0
    num_invalid: int = 0
    num_broken: int = 0
    report: MonitorReport | None = None

    @property
    def figures(self) -> dict[str, float]:
        """Numbers for a log, by name; those that are not known are left out."""
        found = {
            "num_calls": float(self.num_calls),
            "num_invalid_calls": float(self.num_invalid),
            "num_broken_tests": float(self.num_broken),
        }
        if self.report is not None:
            found["num_findings"] = float(len(self.report.findings))
            found["is_masked"] = float(self.report.masks_reward)
        if self.score is not None:
            found["visible_pass_share"] = self.score.pass_share
        if self.hidden is not None:
            found["hidden_pass_share"] = self.hidden.pass_share
        return found


class HostedAttempt:
    """One attempt, for any number of tasks of an event loop; made by ``AttemptHost.open``.

    Calls are made one after the other, each in a thread. Who stops waiting, because of a limit or a cancellation,
    stops nothing in the sandbox: the next call waits until the one before it has ended. ``close`` never waits for it:
    where a thread is at work, that thread ends the sandbox as soon as it comes back.

    ``failure`` says how the sandbox failed; empty as long as it did not. From then on calls answer ``BROKEN`` and
    there is no reward.
    """

    def __init__(self, environment: FeatureDeletionEnv, *, with_hidden: bool = False) -> None:
        self.failure = ""
        self.is_over = False
        self.message = ""
        self._environment = environment
        self._with_hidden = with_hidden
        self._outcome: AttemptOutcome | None = None
        self._is_ended = False
        self._turn = threading.Lock()

    async def call(self, call: ToolCall) -> ToolResult:
        """Do what the policy asked; never raises for it, nor for a sandbox that broke (see ``failure``)."""
        return await in_thread(lambda: self._use(lambda: self._call(call)))

    async def count_unreadable_call(self, name: str) -> None:
        """Count a call that the library itself refused, so that it costs what it costs elsewhere."""
        await self.call(ToolCall(name, _NOT_JSON))

    async def outcome(self) -> AttemptOutcome:
        """End the attempt, grade its tree as it stands, and take its sandbox away; asked again, the same answer.

        Raises:
            UsageError: it was closed before it was graded (CR0800), or every visible test weighs 0 (CR0204).
        """
        return await in_thread(lambda: self._use(self._grade))

    async def end(self) -> None:
        """Close, in a thread: to remove a tree takes time. Cancelled or not, it is closed."""
        try:
            await in_thread(self.close)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Take the sandbox away; idempotent, from any thread, without waiting for a call that runs there."""
        self._is_ended = True
        if self._turn.acquire(blocking=False):
            try:
                self._environment.close()
            finally:
                self._turn.release()

    def begin(self, task_id: str) -> None:
        """Open the sandbox; blocking. A failure of it is kept, for there is no reward then.

        Raises:
            InputError: as ``FeatureDeletionEnv.reset``.
        """
        self._use(lambda: self._begin(task_id))

    def _begin(self, task_id: str) -> None:
        try:
            self.message = self._environment.reset(task_id)
        except SandboxFailure as error:
            self._fail(error)

    def _call(self, call: ToolCall) -> ToolResult:
        if self.failure:
            return ToolResult(BROKEN, is_error=True)
        if self._outcome is not None:
            return ToolResult("the attempt is over. No tool can be used any more.", is_error=True)
        try:
            result = self._environment.call(call)
        except SandboxFailure as error:
            self._fail(error)
            return ToolResult(BROKEN, is_error=True)
        self.is_over = self._environment.is_done
        return result

    def _grade(self) -> AttemptOutcome:
        if self._outcome is None:
            self._outcome = AttemptOutcome(None) if self.failure else self._graded()
            self.is_over = True
            self._environment.close()
        return self._outcome

    def _graded(self) -> AttemptOutcome:
        environment = self._environment
        reward = environment.reward()
        hidden = environment.grade_hidden() if self._with_hidden and reward is not None else None
        if reward is None or (self._with_hidden and hidden is None):
            self.failure = "the grading failed"
            reward = None
        regressions = environment.regressions
        return AttemptOutcome(
            reward,
            None if reward is None else environment.grade(),
            hidden,
            num_calls=environment.counts.num_calls,
            num_invalid=environment.counts.num_invalid,
            num_broken=len(regressions.broken) if regressions is not None else 0,
            report=environment.report,
        )

    def _fail(self, error: SandboxFailure) -> None:
        self.failure = str(error)
        self.is_over = True

    def _use(self, act: Callable[[], T]) -> T:
        """Act when it is our turn; whoever closed meanwhile has left the sandbox to us."""
        try:
            with self._turn:
                if self._is_ended:
                    self._environment.close()  # what comes now finds no attempt under way
                return act()
        finally:
            if self._is_ended:
                self.close()


class AttemptHost:
    """Opens attempts over one store; the grader and what is known of the original code are shared.

    Args:
        store: its folder.
        backend: sandbox backend; empty for the best of this machine.
        num_jobs: test runs at the same time.
        test_seconds: processor time of one test run.
        reward: how a reward is made.
        with_hidden: run the hidden tests of each attempt as well.
        monitor: as ``FeatureDeletionEnv``.

    Raises:
        InputError: no store, or a damaged one.
        NothingToDoError: it holds no tasks (CR0604).
    """

    def __init__(
        self,
        store: Path,
        *,
        backend: str = "",
        num_jobs: int = 2,
        test_seconds: float = 20.0,
        reward: RewardOptions | None = None,
        with_hidden: bool = False,
        monitor: MonitorMode = "mask",
    ) -> None:
        self.store = TaskStore.open(store)
        self.store.require_task_ids()
        self._backend = backend
        self._num_jobs = num_jobs
        self._test_seconds = test_seconds
        self._reward = reward
        self._with_hidden = with_hidden
        self._monitor = monitor
        self._check: RegressionCheck | None = None
        self._lock = threading.Lock()

    async def open(self, task_id: str) -> HostedAttempt:
        """A fresh attempt; where its sandbox could not be opened, ``failure`` says so.

        Raises:
            InputError: no such task (CR0412), damaged (CR0411), or its text would show the code (CR0429).
            SandboxFailure: the self-test of the backend does not pass, so nothing is rewarded.
        """
        check = await in_thread(self._shared)
        environment = FeatureDeletionEnv(
            check.grader,
            reward=self._reward,
            regressions=check,
            monitor=self._monitor,
        )
        attempt = HostedAttempt(environment, with_hidden=self._with_hidden)
        try:
            await in_thread(lambda: attempt.begin(task_id))
        except BaseException:
            attempt.close()
            raise
        return attempt

    async def golden_passes(self, task_id: str) -> bool | None:
        """Whether the original code passes the visible tests of a task; None where the sandbox failed.

        Raises:
            InputError, SandboxFailure: as ``open``.
        """
        grader = (await in_thread(self._shared)).grader
        task = self.store.get(task_id)
        golden = self.store.files(task, "golden")
        score = await in_thread(lambda: grader.grade_tree(task, golden))
        return None if score is None else score.all_passed

    def _shared(self) -> RegressionCheck:
        with self._lock:
            if self._check is None:
                grader = Grader(
                    self.store,
                    backend=self._backend,
                    num_jobs=self._num_jobs,
                    timeout_seconds=self._test_seconds,
                )
                self._check = RegressionCheck(grader)
            return self._check


async def in_thread(work: Callable[[], T]) -> T:
    """Blocking work away from the event loop; a cancellation leaves it to its thread and goes on at once."""
    try:
        limiter = _THREADS.get()
    except LookupError:
        limiter = anyio.CapacityLimiter(NUM_THREADS)
        _THREADS.set(limiter)
    return await anyio.to_thread.run_sync(work, abandon_on_cancel=True, limiter=limiter)
