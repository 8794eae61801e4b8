"""The heavy work of a build on a Ray cluster, which schedules it and does it again when a worker dies.

    with RayPool("local", jobs=4, backend=None, read_wheel=read_wheel) as pool:
        subject = pool.call(judge_deletion, deletion, record, bench, hidden_share=0.5, seed=0)

The files of a repository and its wheels are put into Ray's object store once. A worker opens
the environment from its lock, from its machine's cache where it is there already. Only values
come back: the store and the journal are written by the one process that builds, so that a
build on a cluster gives the bytes of a local one.

Ray: Moritz et al., OSDI 2018. This module needs the extra ``ray``.
"""

from __future__ import annotations

import socket
import threading
import uuid
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any, ParamSpec, TypeVar

import ray
from ray.exceptions import RayError, RayTaskError

from composer_replication import __version__
from composer_replication.errors import ComposerError, MissingError, SandboxFailure
from composer_replication.sandbox import choose_backend, require_selftest
from composer_replication.tasks.gates import GateFailed
from composer_replication.tasks.intake.environment import lock_of, open_environment
from composer_replication.tasks.intake.lock import EnvironmentLock, LockedWheel, UnusableRepository
from composer_replication.tasks.ray_connection import RayConnection
from composer_replication.tasks.running.bench import Bench
from composer_replication.tasks.store_records import RepositoryRecord

NUM_RETRIES = 2
"""After a dead worker, a lost node or a broken sandbox; what the work itself answers is final."""
_KILL_SECONDS = 20.0
_MOST_KEPT = 8  # repositories in a worker's memory

Result = TypeVar("Result")
Params = ParamSpec("Params")


@dataclass(frozen=True, slots=True)
class _Sent:
    """Stands for a value in the object store; ``key`` is its name in the memory of a worker."""

    key: str
    reference: Any


@dataclass(frozen=True, slots=True)
class _BenchParts:
    """What a bench is made of again on another machine; wheels are references by sha256."""

    original: dict[str, bytes]
    lock: EnvironmentLock
    wheels: dict[str, Any]
    backend: str | None
    suite_seconds: float
    test_seconds: float


@dataclass(frozen=True, slots=True)
class _Call:
    """One piece of work on its way."""

    work: Callable[..., Any]
    args: tuple[Any, ...]
    options: dict[str, Any]
    backend: str | None
    version: str


@dataclass(frozen=True, slots=True)
class _Answer:
    """What came of it: a value, a refusal of the work's own as its two texts, or an error with a code."""

    value: Any = None
    refusal: tuple[str, str, str] | None = None
    error: ComposerError | None = None

    def get(self) -> Any:
        if self.error is not None:
            raise self.error
        if self.refusal is not None:
            kind, name, detail = self.refusal
            raise GateFailed(name, detail) if kind == "gate" else UnusableRepository(name, detail)
        return self.value


class RayPool:
    """A connection to a Ray cluster for the time of one build.

    Args:
        address: as ``RayConnection``.
        jobs: pieces of work at a time; the number of processors of a cluster that is started.
        backend: sandbox backend on every node, by name or dotted path; None for the best of each.
        read_wheel: gives the bytes of a wheel of a lock.

    Raises:
        UsageError, MissingError: as ``RayConnection``.
    """

    def __init__(
        self, address: str, *, jobs: int, backend: str | None, read_wheel: Callable[[LockedWheel], bytes]
    ) -> None:
        self._backend = backend
        self._read_wheel = read_wheel
        self._lock = threading.Lock()
        self._sent: dict[int, tuple[object, _Sent]] = {}
        self._wheels: dict[str, Any] = {}
        self._running: dict[Future[Any], Any] = {}
        self._interrupted = False
        self._connection = RayConnection(address, jobs)
        self._remote = ray.remote(work).options(
            num_cpus=1, max_retries=NUM_RETRIES, retry_exceptions=[SandboxFailure], name="composer-rl work"
        )

    def __enter__(self) -> RayPool:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def call(self, work: Callable[Params, Result], *args: Params.args, **options: Params.kwargs) -> Result:
        """As ``submit``, and wait."""
        return self.submit(work, *args, **options).result()

    def submit(
        self, work: Callable[Params, Result], *args: Params.args, **options: Params.kwargs
    ) -> Future[Result]:
        """Give work to the cluster.

        Args:
            work: a function of a module that every node has; it depends on its arguments alone.
            args: can be pickled. A ``Bench`` or a ``RepositoryRecord`` is sent once, however often it is given.
            options: can be pickled.

        Returns:
            Gives what ``work`` gave, or raises what it raised: ``GateFailed`` and
            ``UnusableRepository`` as they are, after one try; ``SandboxFailure`` when the
            sandbox broke every time, or the worker died every time (CR0492); ``MissingError``
            for a node that cannot do such work (CR0491).
        """
        call = _Call(
            work, tuple(self._replaced(value) for value in args), options, self._backend, __version__
        )
        answer: Future[Result] = Future()
        with self._lock:
            if self._interrupted:
                raise _interruption()
            reference = self._remote.remote(call)
            self._running[answer] = reference
        reference.future().add_done_callback(lambda theirs: self._settle(answer, theirs))
        return answer

    def _replaced(self, value: object) -> object:
        if not isinstance(value, Bench | RepositoryRecord):
            return value
        with self._lock:
            if id(value) not in self._sent:
                whole = self._parts(value) if isinstance(value, Bench) else value
                self._sent[id(value)] = (value, _Sent(uuid.uuid4().hex, ray.put(whole)))
            return self._sent[id(value)][1]

    def _parts(self, bench: Bench) -> _BenchParts:
        lock = lock_of(bench.environment)
        for wheel in (*lock.wheels, lock.installer):
            if wheel.sha256 not in self._wheels:
                self._wheels[wheel.sha256] = ray.put(self._read_wheel(wheel))
        wheels = {wheel.sha256: self._wheels[wheel.sha256] for wheel in (*lock.wheels, lock.installer)}
        return _BenchParts(
            dict(bench.original), lock, wheels, bench.backend, bench.suite_seconds, bench.test_seconds
        )

    def _settle(self, answer: Future[Any], theirs: Future[Any]) -> None:
        with self._lock:
            self._running.pop(answer, None)
        with suppress(InvalidStateError):  # it was interrupted, and the waiting thread has been told
            try:
                value = theirs.result().get()
            except BaseException as error:  # noqa: BLE001  handed to whoever waits, whatever it is
                answer.set_exception(_told(error))
            else:
                answer.set_result(value)

    def interrupt(self) -> None:
        """Kill the workers that are at work for us; their sandboxes die with them."""
        with self._lock:
            self._interrupted = True
            running = dict(self._running)
        for reference in running.values():
            with suppress(Exception):  # it ended in this moment, or the cluster is gone: nothing to kill
                ray.cancel(reference, force=True)
        for answer in running:
            with suppress(InvalidStateError):
                answer.set_exception(_interruption())
        if running:
            with suppress(Exception):
                ray.wait(list(running.values()), num_returns=len(running), timeout=_KILL_SECONDS)

    def close(self) -> None:
        """Leave the cluster; stop it if it was started for us."""
        if self._running:
            self.interrupt()
        self._sent.clear()
        self._wheels.clear()
        self._connection.close()


def work(call: _Call) -> _Answer:
    """Do one piece of work; runs in a worker.

    Raises:
        SandboxFailure: nothing is known of the work; the engine tries it again.
    """
    try:
        _check_node(call.backend, call.version)
        args = [_received(value) if isinstance(value, _Sent) else value for value in call.args]
        return _Answer(value=call.work(*args, **call.options))
    except GateFailed as error:
        return _Answer(refusal=("gate", error.gate, error.detail))
    except UnusableRepository as error:
        return _Answer(refusal=("repository", error.reason, error.detail))
    except SandboxFailure:
        raise
    except ComposerError as error:
        return _Answer(error=error)


@cache
def _check_node(backend: str | None, version: str) -> None:
    """Refuse a node that has another version, or a sandbox that does not hold; tried once a worker.

    Raises:
        MissingError: it names the node (CR0491).
    """
    problem = fix = ""
    if version != __version__:
        problem = f"has composer-replication {__version__} and not {version}"
        fix = f"pip install 'composer-replication[ray]=={version}' on every node of the cluster."
    else:
        try:
            require_selftest(choose_backend(backend))
        except MissingError as error:
            problem = f"cannot be used: {error.message.rstrip('.')}"
            fix = "composer-rl sandbox selftest on that node, or leave it out of the cluster."
    if problem:
        raise MissingError("CR0491", f"the node {socket.gethostname()} {problem}.", where="--ray", fix=fix)


_kept: dict[str, Any] = {}


def _received(sent: _Sent) -> Any:
    """The value itself; a worker keeps the last ones."""
    if sent.key not in _kept:
        whole = ray.get(sent.reference)
        if isinstance(whole, _BenchParts):
            whole = _bench(whole)
        while len(_kept) >= _MOST_KEPT:
            del _kept[next(iter(_kept))]
        _kept[sent.key] = whole
    return _kept[sent.key]


def _bench(parts: _BenchParts) -> Bench:
    def read_wheel(wheel: LockedWheel) -> bytes:
        return bytes(ray.get(parts.wheels[wheel.sha256]))

    environment = open_environment(parts.lock, backend=parts.backend, read_wheel=read_wheel)
    return Bench(parts.original, environment, parts.backend, parts.suite_seconds, parts.test_seconds)


def _interruption() -> SandboxFailure:
    return SandboxFailure("CR0302", "the run was killed because the program was interrupted.")


def _told(error: BaseException) -> BaseException:
    """What a waiting thread is told in place of an error of Ray's."""
    cause = getattr(error, "cause", None) if isinstance(error, RayTaskError) else None
    if isinstance(cause, ImportError) and (cause.name or "").startswith("composer_replication"):
        return MissingError(
            "CR0491",
            f"a node of the cluster cannot import {cause.name}.",
            where="--ray",
            fix=f"pip install 'composer-replication[ray]=={__version__}' on every node of the cluster.",
        )
    if isinstance(cause, Exception):
        return cause
    if isinstance(error, RayError) and not isinstance(error, RayTaskError):
        lines = str(error).strip().splitlines() or [type(error).__name__]
        return SandboxFailure(
            "CR0492",
            f"a worker was lost {NUM_RETRIES + 1} times at the same work: {lines[0].rstrip('.')[:200]}.",
            where="--ray",
            fix="the same command again goes on where it stopped; ray status shows the cluster.",
        )
    return error
