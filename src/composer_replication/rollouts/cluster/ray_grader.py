"""A ``Grader`` whose test runs are in actors: for single answers, held-out readings, and whoever has a tree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from composer_replication.records import Score, Task
from composer_replication.rollouts.cluster.rollout_cluster import RolloutCluster
from composer_replication.rollouts.grading import FORGED, Grader, GradeRequest
from composer_replication.tasks.running.watched_run import WatchedReport


class RayGrader(Grader):
    """Turns answers into scores on the nodes of a cluster; as ``Grader``, and used in its place.

    What was graded is remembered here, and sentinels are drawn there: an actor runs the golden code of a task once, for itself. A
    grading whose actor dies is tried again like one whose sandbox broke. This machine needs no sandbox.

    Args:
        cluster: whose actors are used, each for one grading at a time. Attempts use the same ones.

    ``missing_guards`` is empty: nodes have every guard, and an acceptance of this process does not travel.

    Raises (when it grades):
        MissingError: a node cannot be used (CR0491), the cluster is gone (CR0491).
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
        """Run one request on some node, whatever was seen before.

        Raises:
            SandboxFailure: the sandbox broke, the actor died (CR0491), or none was free in time (CR0490).
            MissingError: as the class.
        """
        score: Score = self._ask("grade_request", request)
        if score.error.startswith(FORGED):
            self.count_forgery()
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
        """As ``Grader.watched``, on some node. Raises as ``grade_once``."""
        asked = (task, dict(files), tuple(node_ids), seed)
        report: WatchedReport = self._ask("watched", *asked, timeout_seconds=timeout_seconds)
        return report

    def _ask(self, method: str, *args: Any, **named: Any) -> Any:
        actor = self._cluster.lease()
        try:
            return self._cluster.ask(actor, method, *args, **named)
        finally:
            self._cluster.give_back(actor)
