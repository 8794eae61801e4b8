"""Attempts and gradings in actors: ``RayEnvironment`` fulfils ``interfaces.AgentEnvironment``, ``RayGrader`` is a ``Grader``."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from composer_replication.errors import SandboxFailure
from composer_replication.records import Score, Task, ToolCall, ToolResult, ToolSpec
from composer_replication.rollouts.cluster.rollout_cluster import RolloutCluster
from composer_replication.rollouts.environment.lease import no_attempt
from composer_replication.rollouts.environment.reward_options import Judgement
from composer_replication.rollouts.grading import Grader, GradeRequest
from composer_replication.rollouts.tools.toolbox import TOOLS
from composer_replication.tasks.running.watched_run import WatchedReport


class RayEnvironment:
    """A policy's attempts at tasks, one after the other, each on some node of a cluster.

    As ``FeatureDeletionEnv``, and used in its place: by one thread at a time. From ``reset`` to ``close`` it has an
    actor for itself. An actor that dies is a ``SandboxFailure`` (CR0491), never a score: the attempt is lost, and whoever
    drives it begins anew. Whoever forgets an environment leaves its sandbox until its actor is lent again, or the cluster
    is closed.
    """

    def __init__(self, cluster: RolloutCluster) -> None:
        self._cluster = cluster
        self._actor: Any = None
        self._is_over = self._is_broken = False

    @property
    def tools(self) -> tuple[ToolSpec, ...]:
        return TOOLS

    @property
    def is_done(self) -> bool:
        """Whether the attempt is over: submitted, judged, or its sandbox or actor is gone."""
        self._require_attempt()
        return self._is_over or self._is_broken

    def reset(self, task_id: str) -> str:
        """End the attempt before, begin one at this task on a free actor, and say what is to be done."""
        self.close()
        self._cluster.store.get(task_id)
        self._actor = self._cluster.lease()
        self._end = weakref.finalize(self, self._cluster.give_back, self._actor)
        try:
            return str(self._ask("begin", task_id))
        except BaseException:
            self.close()
            raise

    def call(self, call: ToolCall) -> ToolResult:
        """As ``FeatureDeletionEnv.call``."""
        result: ToolResult
        result, self._is_over = self._ask("call", call)
        return result

    def finish(self) -> Judgement | None:
        """As ``FeatureDeletionEnv.finish``; None where a sandbox or the actor failed."""
        judgement: Judgement | None = self._ask_for("finish")
        self._is_over = True
        return judgement

    def candidate(self) -> dict[str, bytes] | None:
        """As ``FeatureDeletionEnv``; None where the sandbox or the actor failed."""
        files: dict[str, bytes] | None = self._ask_for("candidate")
        return files

    def close(self) -> None:
        """End the attempt, take its sandbox away and let the actor be lent again; idempotent.

        Never raises a ``SandboxFailure``: where the actor is gone, its sandbox is as well.
        """
        if self._actor is None:
            return
        try:
            self._ask_for("close")
        finally:
            self._actor, self._is_over, self._is_broken = None, False, False
            self._end()

    def _require_attempt(self) -> None:
        if self._actor is None:
            raise no_attempt("RayEnvironment")

    def _ask_for(self, method: str) -> Any:
        """What this method of the attempt gives; None where a sandbox or the actor failed."""
        with suppress(SandboxFailure):
            return self._ask("attempt", method)
        return None

    def _ask(self, method: str, *args: Any) -> Any:
        self._require_attempt()
        if self._is_broken:
            raise SandboxFailure("CR0303", "the sandbox of this attempt broke.", fix="ray status")
        try:
            return self._cluster.ask(self._actor, method, *args)
        except SandboxFailure:
            self._is_broken = True
            raise


class RayGrader(Grader):
    """Turns answers into scores on the nodes of a cluster; as ``Grader``, and used in its place.

    What was graded is remembered here, and sentinels are drawn there: an actor runs the golden code of a task once, for itself. A
    grading whose actor dies is tried again like one whose sandbox broke. This machine needs no sandbox, so ``missing_guards``
    is empty: nodes have every guard, and an acceptance of this process does not travel.

    Args:
        cluster: whose actors are used, each for one grading at a time. Attempts use the same ones.
    """

    def __init__(self, cluster: RolloutCluster) -> None:
        self._cluster = cluster
        options = cluster.options
        super().__init__(
            cluster.store,
            backend=options.backend,
            limits=options.limits,
            timeout_seconds=options.timeout_seconds,
            num_jobs=options.num_actors,
        )

    @property
    def backend_name(self) -> str:
        """As asked for; the nodes choose where nothing was."""
        return self.backend or "the best of each node"

    def require_guards(self) -> tuple[str, ...]:
        """None is missing: an actor grades nothing before the self-test of its node has passed."""
        return ()

    def grade_once(self, request: GradeRequest) -> Score:
        """Run one request on some node, whatever was seen before."""
        score: Score = self._ask("grade_once", request.task, request)
        return score

    def watched(
        self,
        task: Task,
        files: Mapping[str, bytes],
        node_ids: Sequence[str],
        seed: int | None = None,
        *,
        timeout_seconds: float | None = None,
    ) -> WatchedReport:
        """As ``Grader.watched``, on some node."""
        asked = (task, dict(files), tuple(node_ids), seed)
        report: WatchedReport = self._ask("watched", task, *asked, timeout_seconds=timeout_seconds)
        return report

    def _ask(self, *asked: Any, **named: Any) -> Any:
        actor = self._cluster.lease()
        try:
            return self._cluster.ask(actor, "grade", *asked, **named)
        finally:
            self._cluster.give_back(actor)
