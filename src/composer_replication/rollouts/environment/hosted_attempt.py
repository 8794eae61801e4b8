"""An attempt inside another library's event loop: its blocking work in threads, its end whatever happens.

Needs ``anyio``, which comes with every library that has an event loop of its own, because some of them run on
asyncio and on trio.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import anyio
import anyio.to_thread

from composer_replication.errors import SandboxFailure
from composer_replication.records import MonitorMode, Score, ToolCall, ToolResult
from composer_replication.rollouts.environment.feature_deletion_env import BROKEN, FeatureDeletionEnv
from composer_replication.rollouts.environment.lease import EnvironmentLease
from composer_replication.rollouts.environment.reward_options import Judgement, RewardOptions
from composer_replication.rollouts.grading import Grader
from composer_replication.rollouts.tools.toolbox import CallCounts
from composer_replication.tasks.store import TaskStore

T = TypeVar("T")
_CLOSING_SECONDS = 5.0


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

    Calls are made one after the other, in the thread of its lease. Who stops waiting, because of a limit or a cancellation,
    stops nothing in the sandbox: the next call waits until the one before it has ended.

    ``message`` says what is to be done; ``failure`` how the sandbox failed, empty as long as it did not. From then on calls
    answer ``BROKEN`` and there is no reward.
    """

    def __init__(
        self, open_environment: Callable[[], FeatureDeletionEnv], *, with_hidden: bool = False
    ) -> None:
        self.failure = self.message = ""
        self.is_over = False
        self._lease = EnvironmentLease(open_environment)
        self._with_hidden = with_hidden
        self._outcome: AttemptOutcome | None = None

    async def begin(self, task_id: str) -> None:
        """Open the sandbox. A failure of it is kept, for there is no reward then."""
        found = await self._do(lambda env: self._unless_broken(lambda: env.reset(task_id)))
        self.message = found or ""

    async def call(self, call: ToolCall) -> ToolResult:
        """Do what the policy asked; never raises for it, nor for a sandbox that broke (see ``failure``)."""
        return await self._do(lambda env: self._call(env, call))

    async def count_unreadable_call(self, name: str) -> None:
        """Count a call that the library itself refused, so that it costs what it costs elsewhere."""
        await self.call(ToolCall(name, "(arguments that could not be read)"))

    async def outcome(self) -> AttemptOutcome:
        """End the attempt, grade its tree as it stands, and take its sandbox away; asked again, the same answer.

        Closed before it was graded it has none (CR0800).
        """
        if self._outcome is not None:
            return self._outcome
        return await self._do(self._graded)

    async def end(self) -> None:
        """Close, and wait a little for it: to remove a tree takes time. Cancelled or not, it is closed."""
        self.close()
        with anyio.move_on_after(_CLOSING_SECONDS):
            await anyio.to_thread.run_sync(self._lease.closed.result, abandon_on_cancel=True)

    def close(self) -> None:
        """Take the sandbox away; idempotent, from any thread, without waiting for a call that runs there."""
        self._lease.release()

    async def _do(self, act: Callable[[FeatureDeletionEnv], T]) -> T:
        """In the thread of the lease; a cancellation leaves it there and goes on at once."""
        return await anyio.to_thread.run_sync(self._lease.submit(act).result, abandon_on_cancel=True)

    def _unless_broken(self, act: Callable[[], T]) -> T | None:
        """None where the sandbox fails, or has failed before."""
        if self.failure:
            return None
        try:
            return act()
        except SandboxFailure as error:
            self.failure, self.is_over = str(error), True
            return None

    def _call(self, environment: FeatureDeletionEnv, call: ToolCall) -> ToolResult:
        if self._outcome is not None and not self.failure:
            return ToolResult("the attempt is over. No tool can be used any more.", is_error=True)
        result = self._unless_broken(lambda: environment.call(call))
        if result is None:
            return ToolResult(BROKEN, is_error=True)
        self.is_over = environment.is_done
        return result

    def _graded(self, environment: FeatureDeletionEnv) -> AttemptOutcome:
        if self._outcome is None:
            counts, judgement, hidden = CallCounts(), None, None
            if not self.failure:
                judgement, counts = environment.finish(), replace(environment.counts)
                if self._with_hidden and judgement is not None:
                    hidden = environment.grade_hidden()
                if judgement is None or (self._with_hidden and hidden is None):
                    self.failure, judgement = "the grading failed", None
            self._outcome, self.is_over = AttemptOutcome(counts, judgement, hidden), True
            environment.close()
        return self._outcome


class AttemptHost:
    """Opens attempts over one store; the grader and what is known of the original code are shared.

    Args:
        store: its folder, with at least one task (CR0604).
        backend: sandbox backend; empty for the best of this machine.
        num_jobs: test runs at the same time.
        test_seconds: processor time of one test run.
        with_hidden: run the hidden tests of each attempt as well.
        monitor: as ``FeatureDeletionEnv``.
        reward: how a reward is made: fields of ``RewardOptions``.
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
        """A fresh attempt; where its sandbox could not be opened, ``failure`` says so."""
        options: dict[str, Any] = {"reward": self._reward, "monitor": self._monitor}
        attempt = HostedAttempt(
            lambda: FeatureDeletionEnv(self._grader, **options), with_hidden=self._with_hidden
        )
        try:
            await attempt.begin(task_id)
        except BaseException:
            attempt.close()
            raise
        return attempt
