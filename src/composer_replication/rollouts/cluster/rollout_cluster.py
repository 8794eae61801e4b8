"""The actors of a cluster, lent to one attempt or one grading at a time.

Ray places them, and keeps those waiting for which it has no room. One whose process or node dies is a failure of the
sandbox for whoever used it, and a new one takes its place. Each is lent once it is prepared.

Ray: Moritz et al., OSDI 2018. This module needs the extra ``ray``.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import Counter
from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import RayError

from composer_replication.errors import MissingError, SandboxFailure
from composer_replication.rollouts.cluster.rollout_actor import (
    ClusterOptions,
    Place,
    RolloutActor,
    fitted,
    parcel_of,
)
from composer_replication.tasks.store import TaskStore
from composer_replication.tasks.workers.ray_connection import (
    NUM_RETRIES,
    RayConnection,
    first_sentence,
    interruption,
    is_of_ray,
    needs_of,
    plain_cause,
    wait_for,
)

_LOOK_SECONDS = 1.0
_END_SECONDS = 30.0


class RolloutCluster:
    """Actors with a copy of a store each; safe to use from several threads. See ``open_cluster``.

    ``connection`` is closed by its owner, after this; ``store`` is whole, and read once, here. ``counts`` has ``lost``:
    attempts and gradings whose process or node died.
    """

    def __init__(self, connection: RayConnection, store: TaskStore, options: ClusterOptions) -> None:
        nodes = ray.nodes()  # type: ignore[no-untyped-call]  # as Ray ships it
        self.store = store
        self.options = fitted(options, [node["Resources"] for node in nodes if node["Alive"]])
        self.counts: Counter[str] = Counter()
        self._head = connection.head
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._parcel = parcel_of(store, ray.put)
        self._starting: dict[Any, Any] = {}  # by the reference that is done when it is prepared
        self._places: dict[Any, Place] = {}  # of those that are prepared
        self._free: queue.SimpleQueue[Any] = queue.SimpleQueue()  # safe in a finalizer
        for _ in range(self.options.num_actors):
            self._start()

    def lease(self) -> Any:
        """A prepared actor that nobody else uses until ``give_back``; waits for one.

        Raises:
            MissingError: a node cannot be used, or the cluster is gone (CR0491).
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
        shares = {"num_cpus": options.num_cpus, **options.resources}
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

    def ask(self, actor: Any, method: str, *args: Any, **named: Any) -> Any:
        """Have an actor do something, once; raises what it raised, or a ``SandboxFailure`` where it is lost (CR0491)."""
        self.check()
        try:
            return wait_for(getattr(actor, method).remote(*args, **named), self.check)
        except (RayError, ConnectionError) as error:
            self.check()
            cause = plain_cause(error)
            if not is_of_ray(cause):
                raise cause from error
            place = self._replace(actor)
            raise SandboxFailure(
                "CR0491",
                f"the worker of an attempt or a grading was lost: {first_sentence(str(cause))}.",
                where="" if place is None else f"{place.host}, process {place.pid}",
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

    def places(self) -> list[Place]:
        """Where the actors are that are prepared; fewer than ``num_actors`` while Ray starts one."""
        return list(self._places.values())

    def check(self) -> None:
        """Refuse to go on where nothing can follow: the cluster is gone (CR0491), or was closed (CR0302)."""
        if self._closed.is_set():
            raise interruption()
        if self._head.is_gone():
            raise MissingError(
                "CR0491",
                f"the head of the Ray cluster at {self._head} is gone, and the rollouts on it are lost.",
                where="open_cluster",
                fix="start the cluster again, then the run: it goes on from its last checkpoint.",
            )

    def close(self) -> None:
        """End the actors with their sandboxes; what is under way is killed. Idempotent."""
        if self._closed.is_set():
            return
        self._closed.set()
        idle = self._take_free()
        with self._lock:
            others = {*self._starting.values(), *self._places} - {*idle}
        with suppress(RayError, ConnectionError):
            for actor in others:
                ray.kill(actor)
            if not idle:
                return
            # As a process ends that is asked to; what one leaves behind all the same is removed beside it (``sweep_after_this_process``).
            ends = [actor.end.remote() for actor in idle]
            exits = [actor.__ray_terminate__.remote() for actor in idle]
            ray.wait(exits, num_returns=len(exits), timeout=_END_SECONDS)
            for actor in idle:
                ray.kill(actor)
            ray.wait(ends, num_returns=len(ends), timeout=_END_SECONDS)

    def __enter__(self) -> RolloutCluster:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _start(self) -> None:
        if self._closed.is_set():
            return
        options = self.options
        kind = ray.remote(RolloutActor).options(
            num_cpus=options.num_cpus, resources=dict(options.resources), scheduling_strategy="SPREAD"
        )
        self._prepare(kind.remote(self._parcel, ray.get, options, needs_of(options.backend or None)))

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
                    cause = plain_cause(error)
                    if not is_of_ray(cause):
                        # a sandbox's failure was tried again by Ray already: now it is the user's to know
                        raise (_final(cause) if isinstance(cause, SandboxFailure) else cause) from error
                    self._start()
                else:
                    self._free.put(actor)

    def _take_free(self) -> list[Any]:
        found = []
        with suppress(queue.Empty):
            while True:
                found.append(self._free.get_nowait())
        return found

    def _replace(self, lost: Any) -> Place | None:
        """Start another actor in the place of one that is lost; where that one was."""
        with self._lock:
            self.counts["lost"] += 1
            place = self._places.pop(lost, None)
            with suppress(RayError, ConnectionError):
                ray.kill(lost)
            self._start()
            for other in self._take_free():  # its node may have taken others: they are lent once they answer
                del self._places[other]
                self._prepare(other)
        return place


def _final(failure: SandboxFailure) -> MissingError:
    """What trying again does not cure."""
    return MissingError(failure.code, failure.message, where=failure.where, fix=failure.fix)
