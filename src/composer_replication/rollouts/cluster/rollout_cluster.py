"""The actors of a cluster, lent to one attempt or one grading at a time, and what uses them here.

Ray places them, and keeps those waiting for which it has no room. One whose process or node dies is a failure of the
sandbox for whoever used it, and a new one takes its place. Each is lent once it is prepared.

``RayEnvironment`` is a ``FeatureDeletionEnv``, ``RayGrader`` a ``Grader``.

Ray: Moritz et al., OSDI 2018. This module needs the extra ``ray``.
"""

from __future__ import annotations

import queue
import threading
import time
import weakref
from contextlib import suppress
from functools import partial
from typing import Any

import ray
from ray.exceptions import RayError

from composer_replication.errors import MissingError, SandboxFailure
from composer_replication.records import Score, ToolCall, ToolResult
from composer_replication.rollouts.cluster.rollout_actor import ClusterOptions, RolloutActor, files_of, fitted
from composer_replication.rollouts.environment.feature_deletion_env import (
    FeatureDeletionEnv,
    Judgement,
    no_attempt,
)
from composer_replication.rollouts.grading import Grader, GradeRequest
from composer_replication.tasks.store import TaskStore
from composer_replication.tasks.workers.ray_cluster import (
    NUM_RETRIES,
    interruption,
    needs_of,
    one_line,
    raise_of_work,
    wait_for,
)

_LOOK_SECONDS = 1.0


class RolloutCluster:
    """Actors with a copy of a store each; safe to use from several threads. See ``open_cluster``.

    This process has joined the cluster; ``store`` is whole, and read once, here.
    """

    def __init__(self, store: TaskStore, options: ClusterOptions) -> None:
        nodes = ray.nodes()  # type: ignore[no-untyped-call]  # as Ray ships it
        self.store = store
        self.options = fitted(options, [node["Resources"] for node in nodes if node["Alive"]])
        self._closed = threading.Event()
        self._lock = threading.Lock()
        files = ray.put(files_of(store))  # a store travels as one object
        self._sent = (store.fingerprint, partial(ray.get, files))
        self._starting: dict[Any, Any] = {}  # by the reference that is done when it is prepared
        self._places: dict[Any, str] = {}  # where those are that are prepared
        self._free: queue.SimpleQueue[Any] = queue.SimpleQueue()  # safe in a finalizer
        for _ in range(self.options.num_actors):
            self._start()

    def lease(self) -> Any:
        """A prepared actor that nobody else uses until ``give_back``; waits for one.

        Raises:
            MissingError: a node cannot be used (CR0491).
            SandboxFailure: none was free in time (CR0490), or the cluster is closed (CR0302).
        """
        options = self.options
        ends = time.monotonic() + options.waiting_seconds
        while True:
            self.check()
            self._admit()
            with suppress(queue.Empty):
                return self._free.get(timeout=_LOOK_SECONDS)
            if time.monotonic() >= ends:
                break
        shares = {"CPU": options.num_cpus, **options.resources}
        asked = ", ".join(f"{name} {share:g}" for name, share in shares.items())
        raise SandboxFailure(
            "CR0490",
            f"no actor was free within {options.waiting_seconds:g} s: Ray has placed {len(self.places())} of "
            f"{options.num_actors}, and each asks for {asked}.",
            where="open_cluster",
            fix="ray status shows what is free; ask for less, add nodes, and run no more episodes at once than num_actors.",
        )

    def give_back(self, actor: Any) -> None:
        """Let it be lent again, unless it is lost; also from a finalizer."""
        if actor in self._places:
            self._free.put(actor)

    def ask(self, actor: Any, method: str, *asked: Any) -> Any:
        """Have an actor do something, once; raises what it raised, or a ``SandboxFailure`` where it is lost (CR0491)."""
        self.check()
        try:
            return wait_for(getattr(actor, method).remote(*asked), self.check)
        except (RayError, ConnectionError) as error:
            self.check()
            cause = raise_of_work(error)
            raise SandboxFailure(
                "CR0491",
                f"the worker of an attempt or a grading was lost: {one_line(str(cause))}.",
                where=self._replace(actor),
                fix="ray status shows the cluster, and the logs of that node why; the attempt is begun again.",
            ) from cause

    def wait_until_ready(self, num_actors: int = 1) -> None:
        """Wait until so many actors are ready at the same time; a ``MissingError`` where one was not placed in time (CR0490)."""
        leased: list[Any] = []
        try:
            while len(leased) < num_actors:
                leased.append(self.lease())
        except SandboxFailure as error:
            raise _final(error) from error
        finally:
            for actor in leased:
                self.give_back(actor)

    def places(self) -> list[str]:
        """Host and process of the actors that are prepared; fewer than ``num_actors`` while Ray starts one."""
        return list(self._places.values())

    def check(self) -> None:
        """Refuse to go on where nothing can follow: the cluster was closed (CR0302)."""
        if self._closed.is_set():
            raise interruption()

    def close(self) -> None:
        """Kill the actors with their sandboxes, and what is under way. Idempotent.

        What they leave on the disk of a node is removed by the next process of ours there.
        """
        if self._closed.is_set():
            return
        self._closed.set()
        with self._lock, suppress(RayError, ConnectionError):
            for actor in (*self._starting.values(), *self._places):
                ray.kill(actor)

    def _start(self) -> None:
        if self._closed.is_set():
            return
        options = self.options
        kind = ray.remote(RolloutActor).options(
            num_cpus=options.num_cpus, resources=dict(options.resources), scheduling_strategy="SPREAD"
        )
        needs = needs_of(options.grader.get("backend") or None)
        self._prepare(kind.remote(*self._sent, options, needs))

    def _prepare(self, actor: Any) -> None:
        tried = actor.prepare.options(max_task_retries=NUM_RETRIES, retry_exceptions=[SandboxFailure])
        self._starting[tried.remote()] = actor

    def _admit(self) -> None:
        """Let those be lent that are prepared by now; a new one takes the place of one that died."""
        with self._lock:
            waiting = list(self._starting)
            for done in ray.wait(waiting, num_returns=len(waiting), timeout=0)[0] if waiting else ():
                actor = self._starting.pop(done)
                try:
                    self._places[actor] = ray.get(done)
                except (RayError, ConnectionError) as error:
                    try:
                        raise_of_work(error)
                    except SandboxFailure as cause:
                        raise _final(cause) from error  # Ray tried it again: now it is the user's to know
                    self._start()
                else:
                    self._free.put(actor)

    def _replace(self, lost: Any) -> str:
        """Start another actor in the place of one that is lost; where that one was."""
        with self._lock:
            place = self._places.pop(lost, "")
            with suppress(RayError, ConnectionError):
                ray.kill(lost)
            self._start()
            # its node may have taken others: those that are free are lent again once they answer
            with suppress(queue.Empty):
                while True:
                    other = self._free.get_nowait()
                    del self._places[other]
                    self._prepare(other)
        return place


def _final(failure: SandboxFailure) -> MissingError:
    """What trying again does not cure."""
    return MissingError(failure.code, failure.message, where=failure.where, fix=failure.fix)


class RayEnvironment(FeatureDeletionEnv):
    """A policy's attempts at tasks, one after the other, each on some node of a cluster.

    Used in the place of ``FeatureDeletionEnv``, by one thread at a time; its methods do what they do there. From ``reset`` to
    ``close`` it has an actor for itself. An actor that dies is a ``SandboxFailure`` (CR0491), never a score: the attempt is
    lost, and its caller begins it again. The sandbox of an environment that is not closed stays until its actor is lent
    again, or the cluster is closed.
    """

    def __init__(self, cluster: RolloutCluster) -> None:
        self._cluster = cluster
        self._actor: Any = None
        self._is_over = self._is_broken = False

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
        self._give_back = weakref.finalize(self, self._cluster.give_back, self._actor)
        try:
            return str(self._ask("reset", task_id))
        except BaseException:
            self.close()
            raise

    def call(self, call: ToolCall) -> ToolResult:
        result: ToolResult = self._ask("call", call)
        return result

    def finish(self) -> Judgement | None:
        """None where a sandbox or the actor failed."""
        judgement: Judgement | None = self._ask_if_whole("finish")
        return judgement

    def candidate(self) -> dict[str, bytes] | None:
        """None where the sandbox or the actor failed."""
        files: dict[str, bytes] | None = self._ask_if_whole("candidate")
        return files

    def close(self) -> None:
        """End the attempt, take its sandbox away and let the actor be lent again; idempotent.

        Never raises a ``SandboxFailure``: where the actor is gone, its sandbox is as well.
        """
        if self._actor is None:
            return
        try:
            self._ask_if_whole("close")
        finally:
            self._actor, self._is_over, self._is_broken = None, False, False
            self._give_back()

    def _require_attempt(self) -> None:
        if self._actor is None:
            raise no_attempt("RayEnvironment")

    def _ask_if_whole(self, method: str) -> Any:
        with suppress(SandboxFailure):
            return self._ask(method)
        return None

    def _ask(self, method: str, *asked: Any) -> Any:
        self._require_attempt()
        if self._is_broken:
            raise SandboxFailure("CR0303", "the sandbox of this attempt broke.", fix="ray status")
        try:
            result, self._is_over = self._cluster.ask(self._actor, "attempt", method, *asked)
        except SandboxFailure:
            self._is_broken = True
            raise
        return result


class RayGrader(Grader):
    """Turns answers and trees into scores on the nodes of a cluster, whose actors attempts use as well; in the place of ``Grader``.

    What was graded is remembered here, and sentinels are drawn there: each actor tries the golden code of a task for itself. A
    grading whose actor dies is tried again like one whose sandbox broke. This machine needs no sandbox, so ``missing_guards``
    is empty: nodes have every guard, and an acceptance of this process does not travel. What a tree broke is not asked of it:
    the attempts on the nodes tell that.
    """

    def __init__(self, cluster: RolloutCluster) -> None:
        self._cluster = cluster
        options = cluster.options
        super().__init__(cluster.store, num_jobs=options.num_actors, **options.grader)

    @property
    def backend_name(self) -> str:
        """As asked for; the nodes choose where nothing was."""
        return self.backend or "the best of each node"

    def require_guards(self) -> tuple[str, ...]:
        """None is missing: an actor grades nothing before the self-test of its node has passed."""
        return ()

    def grade_once(self, request: GradeRequest) -> Score:
        """Run one request on some node, whatever was seen before."""
        actor = self._cluster.lease()
        try:
            score: Score = self._cluster.ask(actor, "grade", request)
            return score
        finally:
            self._cluster.give_back(actor)
