"""The heavy work of a build as Ray tasks: Ray chooses the nodes, and does again what was lost with one.

    with joined("auto") as head:
        pool = RayPool(head, backend=None, read_wheel=read_wheel)
        subject = pool.call(judge_deletion, deletion, record, bench, hidden_share=0.5, seed=0)

The files of a repository and its wheels are put into Ray's object store once. A worker opens
the environment from its lock, from its machine's cache where it is there already. Only values
come back: the store and the journal are written by the one process that builds, so that a
build on a cluster gives the bytes of a local one.

Ray: Moritz et al., OSDI 2018. This module needs the extra ``ray``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.exceptions import RayError

from composer_replication.errors import InputError, SandboxFailure
from composer_replication.tasks.intake.environment import lock_of, open_environment
from composer_replication.tasks.intake.lock import EnvironmentLock, LockedWheel
from composer_replication.tasks.running.bench import Bench
from composer_replication.tasks.store_records import RepositoryRecord
from composer_replication.tasks.workers.ray_connection import (
    NUM_RETRIES,
    Head,
    NodeNeeds,
    check_node,
    first_sentence,
    interruption,
    is_of_ray,
    needs_of,
    plain_cause,
    sweep_after_this_process,
    unfit_node,
    wait_for,
)
from composer_replication.tasks.workers.workers import Params, Result, Workers


@dataclass(frozen=True, slots=True)
class _BenchParts:
    """What a bench is made of again on another machine: all but its environment; wheels are references."""

    bench: Bench
    lock: EnvironmentLock
    wheels: dict[str, Any]


class RayPool(Workers):
    """Work on a Ray cluster, which this process has ``joined``, for the time of one build; safe to use from several threads."""

    def __init__(
        self, head: Head, *, backend: str | None, read_wheel: Callable[[LockedWheel], bytes]
    ) -> None:
        self._head = head
        self._node_needs = needs_of(backend)
        self._read_wheel = read_wheel
        self._lock = threading.Lock()
        self._sent: dict[int, tuple[object, Any]] = {}  # with the value, so that its id stays taken
        self._wheels: dict[str, Any] = {}
        self._running: set[Any] = set()
        self._interrupted = threading.Event()
        self._remote = ray.remote(do_work).options(
            num_cpus=1, max_retries=NUM_RETRIES, retry_exceptions=[SandboxFailure], name="composer-rl work"
        )

    def call(self, work: Callable[Params, Result], *args: Params.args, **options: Params.kwargs) -> Result:
        """Have work done by the cluster, and wait for it; a ``Bench`` or a ``RepositoryRecord`` is sent once.

        ``work`` is a function of a module that every node has.

        Raises:
            Exception: what ``work`` raised, after one try.
            SandboxFailure: the sandbox broke every time, Ray lost the worker every time or the
                cluster went away (CR0491), or ``interrupt`` was called (CR0302).
            MissingError: a node cannot do such work (CR0491).
        """
        sent = [self._send(value) for value in args]
        with self._lock:
            if self._interrupted.is_set():
                raise interruption()
            reference = self._remote.remote(self._node_needs, work, options, *sent)
            self._running.add(reference)
        try:
            result: Result = wait_for(reference, self._look)
        except (RayError, ConnectionError) as error:
            raise interruption() if self._interrupted.is_set() else _told(error) from error
        else:
            return result
        finally:
            with self._lock:
                self._running.discard(reference)

    def _look(self) -> None:
        self._head.check()
        if self._interrupted.is_set():
            raise interruption()

    def _send(self, value: object) -> object:
        """A reference in place of what is large and given again and again; Ray puts the value back."""
        if not isinstance(value, Bench | RepositoryRecord):
            return value
        with self._lock:
            if id(value) not in self._sent:
                whole = self._parts(value) if isinstance(value, Bench) else value
                self._sent[id(value)] = (value, ray.put(whole))
            return self._sent[id(value)][1]

    def _parts(self, bench: Bench) -> _BenchParts:
        lock = lock_of(bench.environment)
        wheels = {}
        for wheel in (*lock.wheels, lock.installer):
            if wheel.sha256 not in self._wheels:
                self._wheels[wheel.sha256] = ray.put(self._read_wheel(wheel))
            wheels[wheel.sha256] = self._wheels[wheel.sha256]
        return _BenchParts(replace(bench, original=dict(bench.original), environment=None), lock, wheels)  # type: ignore[arg-type]

    def interrupt(self) -> None:
        """Kill the workers that are at work for us; their sandboxes die with them."""
        with self._lock:
            self._interrupted.set()
            running = list(self._running)
        for reference in running:
            with suppress(Exception):  # it ended in this moment, or the cluster is gone: nothing to kill
                ray.cancel(reference, force=True)


def do_work(node_needs: NodeNeeds, work: Callable[..., Any], options: dict[str, Any], *args: Any) -> Any:
    """Do one piece of work; runs in a worker."""
    sweep_after_this_process()
    check_node(*node_needs)
    backend = node_needs[0]
    return work(*[_bench(arg, backend) if isinstance(arg, _BenchParts) else arg for arg in args], **options)


def _bench(parts: _BenchParts, backend: str | None) -> Bench:
    """The bench on this machine; its environment is made first where it is absent."""

    def read_wheel(wheel: LockedWheel) -> bytes:
        return bytes(ray.get(parts.wheels[wheel.sha256]))

    try:
        environment = open_environment(parts.lock, backend=backend, read_wheel=read_wheel)
    except InputError as error:
        raise unfit_node("cannot be used", error) from error
    return replace(parts.bench, environment=environment, backend=backend)


def _told(error: Exception) -> Exception:
    """What a waiting thread is told in place of an error of Ray's."""
    cause = plain_cause(error)
    if not is_of_ray(cause):
        return cause
    return SandboxFailure(
        "CR0491",
        f"Ray gave up a piece of work, after up to {NUM_RETRIES + 1} tries: {first_sentence(str(cause))}.",
        where="--ray",
        fix="the same command again goes on where it stopped; ray status shows the cluster.",
    )
