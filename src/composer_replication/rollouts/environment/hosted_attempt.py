"""An attempt inside another library's event loop: its blocking work in threads, its end whatever happens.

Needs ``anyio``, which comes with every library that has an event loop of its own, because some of them run on
asyncio and on trio.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import anyio
import anyio.to_thread

from composer_replication.errors import SandboxFailure
from composer_replication.records import MonitorMode, Score, ToolCall, ToolResult
from composer_replication.rollouts.environment.feature_deletion_env import BROKEN, FeatureDeletionEnv
from composer_replication.rollouts.environment.reward_options import Judgement, RewardOptions
from composer_replication.rollouts.grading import Grader
from composer_replication.rollouts.tools.toolbox import CallCounts
from composer_replication.tasks.store import TaskStore

_NOT_JSON = "(arguments that could not be read)"

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class AttemptOutcome:
    """What an attempt came to.

    ``judgement`` is None where infrastructure failed: drop the attempt, and score it never. ``hidden`` is what the hidden
    tests said where they were asked for: the truth, for evaluation only.
    """

    counts: CallCounts
    judgement: Judgement | None = None
    hidden: Score | None = None

    @property
    def reward(self) -> float | None:
        return None if self.judgement is None else self.judgement.reward

    @property
    def monitor(self) -> dict[str, Any] | None:
        """The report of the monitor; None where it is off or nothing was graded."""
        report = None if self.judgement is None else self.judgement.report
        return None if report is None else report.to_json()

    @property
    def figures(self) -> dict[str, float]:
        """Numbers for a log, by name; those that are not known are left out."""
        judged, counts = self.judgement, self.counts
        found = {"num_calls": float(counts.num_calls), "num_invalid_calls": float(counts.num_invalid)}
        if judged is not None:
            broken = () if judged.regressions is None else judged.regressions.broken
            found |= {"num_broken_tests": float(len(broken)), "visible_pass_share": judged.score.pass_share}
            if judged.report is not None:
                found["num_findings"] = float(len(judged.report.findings))
                found["is_masked"] = float(judged.masks_reward)
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
            UsageError: it was closed before it was graded (CR0800).
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
            self._outcome = self._graded()
            self.is_over = True
            self._environment.close()
        return self._outcome

    def _graded(self) -> AttemptOutcome:
        if self.failure:
            return AttemptOutcome(CallCounts())
        environment = self._environment
        judgement, counts = environment.finish(), replace(environment.counts)
        hidden = environment.grade_hidden() if self._with_hidden and judgement is not None else None
        if judgement is None or (self._with_hidden and hidden is None):
            self.failure = "the grading failed"
            return AttemptOutcome(counts)
        return AttemptOutcome(counts, judgement, hidden)

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
        with_hidden: run the hidden tests of each attempt as well.
        monitor: as ``FeatureDeletionEnv``.
        reward: how a reward is made: fields of ``RewardOptions``.

    Raises:
        InputError: no store, or a damaged one.
        NothingToDoError: it holds no tasks (CR0604).
        SandboxFailure: the self-test of the backend does not pass, so nothing is rewarded.
    """

    def __init__(
        self,
        store: Path,
        *,
        backend: str = "",
        num_jobs: int = 2,
        test_seconds: float = 20.0,
        with_hidden: bool = False,
        monitor: MonitorMode = "mask",
        **reward: Any,
    ) -> None:
        self.store = TaskStore.open(store)
        self.store.require_task_ids()
        self._grader = Grader(self.store, backend=backend, num_jobs=num_jobs, timeout_seconds=test_seconds)
        self._reward, self._with_hidden, self._monitor = RewardOptions(**reward), with_hidden, monitor

    async def open(self, task_id: str) -> HostedAttempt:
        """A fresh attempt; where its sandbox could not be opened, ``failure`` says so.

        Raises:
            InputError: no such task (CR0412), damaged (CR0411), or its text would show the code (CR0429).
        """
        environment = FeatureDeletionEnv(self._grader, reward=self._reward, monitor=self._monitor)
        attempt = HostedAttempt(environment, with_hidden=self._with_hidden)
        try:
            await in_thread(lambda: attempt.begin(task_id))
        except BaseException:
            attempt.close()
            raise
        return attempt


async def in_thread(work: Callable[[], T]) -> T:
    """Blocking work away from the event loop; a cancellation leaves it to its thread and goes on at once."""
    return await anyio.to_thread.run_sync(work, abandon_on_cancel=True)
