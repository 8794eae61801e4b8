"""One attempt at one task, its sandbox, tools and grading in an actor. Fulfils ``interfaces.AgentEnvironment``."""

from __future__ import annotations

import weakref
from typing import Any

from composer_replication.errors import SandboxFailure
from composer_replication.records import ToolCall, ToolResult, ToolSpec
from composer_replication.rollouts.cluster.rollout_actor import Called
from composer_replication.rollouts.cluster.rollout_cluster import LostActor, RolloutCluster
from composer_replication.rollouts.environment.feature_deletion_env import no_attempt
from composer_replication.rollouts.environment.reward_options import Judgement
from composer_replication.rollouts.tools.toolbox import TOOLS, CallCounts


class RayEnvironment:
    """A policy's attempts at tasks, one after the other, each on some node of a cluster.

    As ``FeatureDeletionEnv``, and used in its place: by one thread at a time. From ``reset`` to ``close`` it has an
    actor for itself. An actor that dies is a ``SandboxFailure``, never a score: the attempt is lost, and whoever drives it begins anew.
    Whoever forgets an environment leaves its sandbox until its actor is lent again, or the cluster is closed.

    Args:
        cluster: whose actors it uses.

    Raises (whatever is called before ``reset`` or after ``close``):
        UsageError: no attempt is under way (CR0800).
    """

    def __init__(self, cluster: RolloutCluster) -> None:
        self._cluster = cluster
        self._actor: Any = None
        self._forget()

    def _forget(self) -> None:
        self._counts = CallCounts()
        self._is_over = self._is_broken = False

    @property
    def tools(self) -> tuple[ToolSpec, ...]:
        return TOOLS

    @property
    def is_done(self) -> bool:
        """Whether the attempt is over: submitted, judged, or its sandbox or actor is gone."""
        self._running()
        return self._is_over or self._is_broken

    @property
    def counts(self) -> CallCounts:
        """Calls of this attempt so far."""
        self._running()
        return self._counts

    def reset(self, task_id: str) -> str:
        """End the attempt before, begin one at this task on a free actor, and say what is to be done.

        Raises:
            InputError: no such task (CR0412), damaged (CR0411), or its text would show the code (CR0429).
            SandboxFailure: the sandbox cannot be opened, the actor died (CR0491), or none was free in time (CR0490).
            MissingError: the node cannot be used (CR0491), the cluster is gone (CR0491).
        """
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
        """Do what the policy asked; whatever is wrong with the call is a result with ``is_error``.

        Raises:
            SandboxFailure: the sandbox broke or the actor died; from now on there is no grade for this attempt.
            MissingError: the cluster is gone (CR0491).
        """
        self._running()
        if self._is_broken:
            raise SandboxFailure("CR0303", "the sandbox of this attempt broke.", fix="ray status")
        called: Called = self._ask("call", call)
        self._is_over, self._counts = called.is_done, called.counts
        return called.result

    def finish(self) -> Judgement | None:
        """As ``FeatureDeletionEnv.finish``; None where a sandbox or the actor failed."""
        judgement: Judgement | None = self._ask_and_count("finish")
        self._is_over = True
        return judgement

    def candidate(self) -> dict[str, bytes] | None:
        """As ``FeatureDeletionEnv``; None where the sandbox or the actor failed.

        Raises:
            TreeTooLargeError: more than is graded.
        """
        files: dict[str, bytes] | None = self._ask_and_count("candidate")
        return files

    def close(self) -> None:
        """End the attempt, take its sandbox away and let the actor be lent again; idempotent.

        Never raises a ``SandboxFailure``: where the actor is gone, its sandbox is as well.

        Raises:
            MissingError: the cluster is gone (CR0491).
        """
        actor, self._actor = self._actor, None
        if actor is None:
            return
        try:
            if not self._is_broken:
                self._cluster.ask(actor, "leave")
        except SandboxFailure:
            pass  # counted where it was met
        finally:
            self._forget()
            self._end()

    def __enter__(self) -> RayEnvironment:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _running(self) -> Any:
        if self._actor is None:
            raise no_attempt("RayEnvironment")
        return self._actor

    def _ask(self, method: str, *args: Any) -> Any:
        try:
            return self._cluster.ask(self._running(), method, *args)
        except SandboxFailure as failure:
            if not isinstance(failure, LostActor) and not self._is_broken:
                self._cluster.count_failure()
            self._is_broken = True
            raise

    def _ask_and_count(self, method: str) -> Any:
        """None where a sandbox failed, there or with the actor, and counted once."""
        self._running()
        if self._is_broken:
            return None
        try:
            found = self._ask(method)
        except SandboxFailure:
            return None
        if found is None:
            self._cluster.count_failure()
        return found
