"""The actors of a cluster, lent to one attempt or one grading at a time.

Ray places them, starts them anew when their process or node dies, and keeps those waiting for which it has no room. What
is done here is to lend those that are ready, and to say in one sentence what Ray says in many.

Ray: Moritz et al., OSDI 2018. This module needs the extra ``ray``.
"""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn

import ray
from ray.exceptions import ActorDiedError, RayError

from composer_replication.errors import ComposerError, MissingError, SandboxFailure
from composer_replication.rollouts.cluster.rollout_actor import (
    ClusterOptions,
    LostActor,
    Place,
    RolloutActor,
    fitted,
)
from composer_replication.rollouts.cluster.store_parcel import parcel_of
from composer_replication.tasks.store import TaskStore
from composer_replication.tasks.workers.node_check import needs_of
from composer_replication.tasks.workers.ray_answers import (
    NUM_RETRIES,
    interruption,
    is_of_ray,
    plain_cause,
    wait_for,
)
from composer_replication.tasks.workers.ray_connection import RayConnection, first_sentence

_LOOK_SECONDS = 1.0
_END_SECONDS = 30.0


@dataclass(eq=False, slots=True)
class LentActor:
    """An actor, a reference that is done when its process is prepared (``ready``), and where it is from then on."""

    handle: Any
    ready: Any = None
    place: Place | None = None

    def begin_anew(self) -> None:
        """Wait for its first or its next process, which knows nothing."""
        self.ready = self.handle.prepare.options(retry_exceptions=[SandboxFailure]).remote()
        self.place = None


class RolloutCluster:
    """Actors with a copy of a store each; safe to use from several threads. See ``open_cluster``.

    Args:
        connection: to the cluster; closed by its owner, after this.
        store: whole, and not written to meanwhile. It is read once, here.
        options: how many, and what for.

    ``counts``: ``lost`` (attempts and gradings whose process or node died), ``gone`` (actors that Ray does not start
    any more), ``infrastructure_failures`` (all attempts and gradings that a sandbox or Ray failed, lost ones included).

    Raises:
        MissingError: a node cannot be used (CR0491), the cluster is gone (CR0491), or it placed no actor in time (CR0864).
        InputError: a file of the store cannot be read (CR0411).
    """

    def __init__(self, connection: RayConnection, store: TaskStore, options: ClusterOptions) -> None:
        nodes = ray.nodes()  # type: ignore[no-untyped-call]  # as Ray ships it
        options = fitted(options, [node["Resources"] for node in nodes if node["Alive"]])
        self.store, self.options = store, options
        self.counts: Counter[str] = Counter()
        self._head = connection.head
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._returned: queue.SimpleQueue[LentActor] = queue.SimpleQueue()  # safe in a finalizer
        self._parcel = parcel_of(store, ray.put)
        kind = ray.remote(RolloutActor).options(
            num_cpus=options.num_cpus,
            resources=dict(options.resources),
            max_restarts=-1,
            max_task_retries=NUM_RETRIES,  # what prepares it; whatever belongs to an attempt is asked once
            scheduling_strategy="SPREAD",
        )
        needs = needs_of(options.backend or None)
        handles = [kind.remote(self._parcel, ray.get, options, needs) for _ in range(options.num_actors)]
        self._actors = [LentActor(handle) for handle in handles]
        for actor in self._actors:
            actor.begin_anew()
        self._idle = list(self._actors)

    def lease(self) -> Lease:
        """A ready actor that nobody else uses; waits for one.

        Raises:
            MissingError: a node cannot be used (CR0491), no actor is left (CR0491), the cluster is gone (CR0491).
            SandboxFailure: none was free in time (CR0864), or the cluster is closed (CR0302).
        """
        ends = time.monotonic() + self.options.waiting_seconds
        while True:
            self.check()
            actor = self._take()
            if actor is not None:
                return Lease(self, actor, next(self._numbers))
            if time.monotonic() >= ends:
                self.count_failure()
                raise self._no_room()
            with suppress(queue.Empty):
                back = self._returned.get(timeout=_LOOK_SECONDS)
                with self._lock:
                    self._idle.append(back)

    def wait_until_ready(self, num_actors: int = 1) -> None:
        """Wait until so many actors are ready at the same time.

        Raises:
            MissingError: as ``lease``; one was not placed in time (CR0864).
        """
        leases: list[Lease] = []
        try:
            while len(leases) < num_actors:
                leases.append(self.lease())
        except SandboxFailure as error:
            raise MissingError(error.code, error.message, where=error.where, fix=error.fix) from error
        finally:
            for lease in leases:
                lease.give_back()

    def places(self) -> list[Place]:
        """Where the actors are that have been ready."""
        with self._lock:
            return [actor.place for actor in self._actors if actor.place is not None]

    def num_places(self) -> int:
        """How many actors are there to attempt something; less than ``num_actors`` while Ray starts one anew."""
        return len(self.places())

    def count_failure(self, kind: str = "") -> None:
        """Count an attempt or a grading that a sandbox or Ray failed."""
        with self._lock:
            self.counts["infrastructure_failures"] += 1
            if kind:
                self.counts[kind] += 1

    def check(self) -> None:
        """Refuse to go on where nothing can follow.

        Raises:
            MissingError: the cluster is gone (CR0491).
            SandboxFailure: it was closed (CR0302).
        """
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
        with self._lock:
            self._collect()
            idle = [actor for actor in self._idle if actor.place is not None]
            others = [actor for actor in self._actors if actor not in idle]
        with suppress(RayError, ConnectionError):
            for actor in others:
                ray.kill(actor.handle)
            _end_all([actor.handle for actor in idle])

    def __enter__(self) -> RolloutCluster:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # --- for leases ---------------------------------------------------------------------

    def ask(self, actor: LentActor, method: str, *args: Any, **named: Any) -> Any:
        """Have an actor do something, once."""
        self.check()
        try:
            return wait_for(asked_once(actor.handle, method, *args, **named), self.check)
        except (RayError, ConnectionError) as error:
            self.check()
            cause = plain_cause(error)
            if is_of_ray(cause) or isinstance(cause, LostActor):
                self._lose(actor, cause)
            raise cause from error

    def take_back(self, actor: LentActor) -> None:
        """Lend it again; also from a finalizer."""
        self._returned.put(actor)

    def _lose(self, actor: LentActor, cause: Exception) -> NoReturn:
        told = cause.message.rstrip(".") if isinstance(cause, ComposerError) else first_sentence(str(cause))
        where = "" if actor.place is None else f"{actor.place.host}, process {actor.place.pid}"
        actor.begin_anew()
        with self._lock:  # its node may have taken others, which nobody is to be lent before they answer
            self._collect()
            for other in self._idle:
                other.begin_anew()
        self.count_failure("lost")
        raise LostActor(
            "CR0491",
            f"the worker of an attempt or a grading was lost: {told}.",
            where=where,
            fix="ray status shows the cluster, and the logs of that node why; the attempt is begun again.",
        ) from cause

    def _take(self) -> LentActor | None:
        with self._lock:
            self._collect()
            if not self._actors:
                raise MissingError(
                    "CR0491",
                    f"no actor is left: Ray has given up each of {self.options.num_actors}.",
                    where="open_cluster",
                    fix="look for the reason in the logs of the nodes.",
                )
            ready = [actor for actor in self._idle if actor.place is not None]
            asked = {actor.ready: actor for actor in self._idle if actor.place is None}
            if asked:
                done, _ = ray.wait(list(asked), num_returns=len(asked), timeout=0)
                ready += [asked[each] for each in done if self._is_prepared(asked[each])]
            if not ready:
                return None
            self._idle.remove(ready[0])
            return ready[0]

    def _collect(self) -> None:
        with suppress(queue.Empty):
            while True:
                self._idle.append(self._returned.get_nowait())

    def _is_prepared(self, actor: LentActor) -> bool:
        """Whether it can be lent; one that died is asked again, or forgotten where Ray has given it up."""
        try:
            actor.place = ray.get(actor.ready)
        except ActorDiedError:
            self.counts["gone"] += 1
            self._actors.remove(actor)
            self._idle.remove(actor)
        except (RayError, ConnectionError) as error:
            cause = plain_cause(error)
            if isinstance(cause, SandboxFailure):  # tried again by Ray already: now it is the user's to know
                cause = MissingError(cause.code, cause.message, where=cause.where, fix=cause.fix)
            if not is_of_ray(cause):
                raise cause from error
            actor.begin_anew()
        return actor.place is not None

    def _no_room(self) -> SandboxFailure:
        options = self.options
        asked = ", ".join(
            f"{name} {share:g}" for name, share in {"num_cpus": options.num_cpus, **options.resources}.items()
        )
        return SandboxFailure(
            "CR0864",
            f"no actor was free within {options.waiting_seconds:g} s: Ray has placed {len(self.places())} of "
            f"{options.num_actors}, and each asks for {asked}.",
            where="open_cluster",
            fix="ray status shows what is free; ask for less, add nodes, and run no more episodes at once than num_actors.",
        )


class Lease:
    """One actor for one attempt or one grading."""

    def __init__(self, cluster: RolloutCluster, actor: LentActor, number: int) -> None:
        self._cluster, self._actor, self._number = cluster, actor, number
        self._returns = itertools.count()

    def ask(self, method: str, *args: Any, **named: Any) -> Any:
        """Have the actor do something for this lease, once.

        Raises:
            SandboxFailure: the actor is lost (CR0491), or the cluster is closed (CR0302).
            MissingError: the cluster is gone (CR0491).
            Exception: what the method raised.
        """
        return self._cluster.ask(self._actor, method, self._number, *args, **named)

    def give_back(self) -> None:
        """Let it be lent again; idempotent."""
        if next(self._returns) == 0:
            self._cluster.take_back(self._actor)


def _end_all(handles: list[Any]) -> None:
    """End them as a process ends that is asked to; what one leaves behind all the same is removed beside it (``last_sweep``)."""
    if not handles:
        return
    ends = [asked_once(handle, "end") for handle in handles]
    exits = [asked_once(handle, "__ray_terminate__") for handle in handles]
    ray.wait(exits, num_returns=len(exits), timeout=_END_SECONDS)
    for handle in handles:
        ray.kill(handle)
    ray.wait(ends, num_returns=len(ends), timeout=_END_SECONDS)


def asked_once(handle: Any, method: str, *args: Any, **named: Any) -> Any:
    """Ask an actor, without Ray's asking again when it dies over it."""
    return getattr(handle, method).options(max_task_retries=0).remote(*args, **named)
