"""A Ray cluster: this process as its driver, its nodes, and builds on them.

Ray chooses the nodes, and does again what was lost with one. The files of a repository and its wheels are put into Ray's
object store once. A worker opens the environment from its lock, from its machine's cache where it is there already. Only
values come back: one process writes the store, so that a build on a cluster gives the bytes of a local one.

Ray: Moritz et al., OSDI 2018. This module needs the extra ``ray``.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import ray
from ray.exceptions import RayError, RayTaskError

from composer_replication import __version__
from composer_replication.errors import ComposerError, InputError, MissingError, SandboxFailure, UsageError
from composer_replication.sandbox import choose_backend, require_selftest
from composer_replication.sandbox.supervised_run import is_interrupted
from composer_replication.tasks.intake.environment import (
    EnvironmentLock,
    LockedWheel,
    lock_of,
    open_environment,
)
from composer_replication.tasks.running.bench import Bench
from composer_replication.tasks.store import TaskStore
from composer_replication.tasks.store_records import RepositoryRecord
from composer_replication.tasks.twin.twin_run import pickler_fingerprint
from composer_replication.tasks.workers import Params, Result, Workers

_ADDRESS = re.compile(r"(?:ray://)?(?P<host>\[[0-9a-fA-F:]+\]|[\w.-]+):(?P<port>\d{1,5})")
_ANSWER_SECONDS = 5.0


@contextmanager
def joined(address: str) -> Iterator[None]:
    """This process as a driver of a cluster, to the end of the block; the cluster forgets then all that was sent to it.

    Args:
        address: ``auto`` for the cluster that ``RAY_ADDRESS`` names or that runs on this machine,
            ``HOST:PORT`` of its head for one that this machine is a node of, ``ray://HOST:PORT`` of
            its client server for any other (needs ``ray[client]``).

    Raises:
        UsageError: no such form of address, or this program has joined a cluster already (CR0490).
        MissingError: nothing answers there, or not as Ray does (CR0490); it runs another
            version of Ray or Python (CR0490).
    """
    check_address(address)
    on_sigterm = signal.getsignal(signal.SIGTERM)
    try:
        try:
            with _silence():
                ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        except Exception as error:
            raise _refusal(address, error) from error
        finally:
            if on_sigterm is not None and threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, on_sigterm)  # Ray puts its own in the place of what we do then
        yield
    finally:
        with _silence():
            ray.shutdown()


def check_address(address: str) -> None:
    """Refuse what cannot be an address, and where nothing listens: Ray itself would wait for minutes."""
    if ray.is_initialized():
        fix = "leave it with ray.shutdown() first."
        raise UsageError("CR0490", "this program has joined a Ray cluster already.", where=address, fix=fix)
    if address == "auto":  # only Ray knows where it is
        return
    match = _ADDRESS.fullmatch(address)
    if match is None or not 0 < int(match["port"]) < 1 << 16:
        problem = f"{address!r} is no address of a Ray cluster."
        fix = "--ray auto, --ray HOST:PORT or --ray ray://HOST:PORT"
        raise UsageError("CR0490", problem, where="--ray", fix=fix)
    place = (match["host"].strip("[]"), int(match["port"]))
    try:
        socket.create_connection(place, timeout=_ANSWER_SECONDS).close()
    except OSError as error:
        raise _refusal(address, error) from error


def _refusal(address: str, error: Exception) -> ComposerError:
    """One sentence for what Ray says in many."""
    text = f"{error}\n{error.__cause__ or ''}".strip()
    if "ersion mismatch" in text or "versions don't match" in text:
        found = re.findall(r"(Ray|Python): ([\w.+-]+)", text)
        what = ", ".join(f"{name} {version}" for name, version in found[:4])
        reason = f"it runs another version of Ray or Python{f' ({what})' if what else ''}"
        fix = f"use Ray {ray.__version__} and this Python on every node, or those of the cluster here."
    elif "uthentica" in text:
        reason = "it wants a token, which is missing here or another one"
        fix = "RAY_AUTH_MODE=token, with the cluster's token in RAY_AUTH_TOKEN or ~/.ray/auth_token"
    else:
        reason = first_sentence(text) or type(error).__name__
        fix = "ray status on the head tells whether it runs; ray start --head starts one."
    return MissingError("CR0490", f"the Ray cluster cannot be joined: {reason}.", where=address, fix=fix)


def first_sentence(text: str) -> str:
    """What Ray says first, without its full stop and at most 200 characters of it."""
    line = (text.strip().splitlines() or [""])[0]
    return re.split(r"\.\s", line)[0].rstrip(".")[:200]


@contextmanager
def _silence() -> Iterator[None]:
    """Inside, nothing is written to standard error: what Ray's own parts write there is said in one sentence."""
    sys.stderr.flush()
    before, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(before, 2)
        os.close(before)
        os.close(nowhere)


# --- a node of a cluster at work for us ---

NUM_RETRIES = 2
"""After a dead worker, a lost node or a broken sandbox; what the work itself answers is final."""
_WAIT_SECONDS = 1.0
INSTALL = f"pip install 'composer-replication[ray]=={__version__}' there, then composer-rl doctor."
NodeNeeds = tuple[str | None, str, str]
"""Sandbox backend, version of this program, fingerprint of cloudpickle."""


def needs_of(backend: str | None) -> NodeNeeds:
    """What a node must have in common with this process."""
    return backend, __version__, pickler_fingerprint()


@cache
def check_node(backend: str | None, version: str, pickler: str) -> None:
    """Refuse a node that would give other bytes, or whose sandbox does not hold; tried once a worker."""
    if version != __version__:
        raise unfit_node(f"has composer-replication {__version__} and not {version}")
    if pickler != pickler_fingerprint():
        raise unfit_node("has another version of cloudpickle")
    try:
        require_selftest(choose_backend(backend))
    except MissingError as error:
        raise unfit_node("cannot be used", error) from error


def unfit_node(problem: str, cause: ComposerError | None = None) -> MissingError:
    """Ray tries again what a sandbox did not do, here or elsewhere: the node may have been busy."""
    kind = SandboxFailure if isinstance(cause, SandboxFailure) else MissingError
    told = f"{problem}: {cause.message.rstrip('.')}" if cause else problem
    return kind("CR0491", f"the node {socket.gethostname()} {told}.", where="--ray", fix=INSTALL)


def wait_for(reference: Any, look: Callable[[], None]) -> Any:
    """What a reference stands for, as soon as it is there; ``look`` is called now and then and may raise."""
    while not ray.wait([reference], timeout=_WAIT_SECONDS)[0]:
        look()
    return ray.get(reference)


def plain_cause(error: Exception) -> Exception:
    """What the work raised, a node without this program in one sentence, or the error of Ray's itself."""
    cause = error.cause if isinstance(error, RayTaskError) else error
    if isinstance(cause, RuntimeError) and "failed to import on the worker" in str(cause):
        return MissingError(
            "CR0491", "a node of the cluster cannot import composer-replication.", where="--ray", fix=INSTALL
        )
    return cause if isinstance(cause, Exception) else error


def is_of_ray(error: Exception) -> bool:
    """Whether nothing is known of the work: its process, its node or the way to it is gone."""
    return isinstance(error, RayError | ConnectionError)


def interruption() -> SandboxFailure:
    """What whoever still waits is told when the work is given up."""
    return SandboxFailure("CR0302", "the run was killed because the program was interrupted.")


# --- the heavy work of a build as Ray tasks ---


class _BenchParts(NamedTuple):
    """What a bench is made of again on another machine: all but its environment; wheels are references."""

    bench: Bench
    lock: EnvironmentLock
    wheels: dict[str, Any]


class RayPool(Workers):
    """Work on a Ray cluster, which this process has ``joined``, for the time of one build; safe to use from several threads."""

    def __init__(self, store: TaskStore) -> None:
        self._node_needs = needs_of(store.backend)
        self._lock = threading.Lock()
        self._sent: dict[int, tuple[object, Any]] = {}  # with the value, so that its id stays taken
        self._sent_wheel = cache(lambda wheel: ray.put(store.wheel(wheel)))
        self._remote = ray.remote(do_work).options(
            num_cpus=1, max_retries=NUM_RETRIES, retry_exceptions=[SandboxFailure], name="composer-rl work"
        )

    def call(self, work: Callable[Params, Result], *args: Params.args, **options: Params.kwargs) -> Result:
        """Have work done by the cluster, and wait for it; a ``Bench`` or a ``RepositoryRecord`` is sent once.

        ``work`` is a function of a module that every node has.

        Raises:
            Exception: what ``work`` raised, after one try.
            SandboxFailure: the sandbox broke every time or Ray lost the worker every time (CR0491), or the work was
                interrupted (CR0302).
            MissingError: a node cannot do such work (CR0491).
        """
        reference = self._remote.remote(self._node_needs, work, options, *map(self._send, args))
        try:
            result: Result = wait_for(reference, lambda: self._look(reference))
        except (RayError, ConnectionError) as error:
            raise _told(error) from error
        return result

    def _look(self, reference: Any) -> None:
        """Raise where work is given up; after an interruption its worker is killed, and its sandboxes die with it."""
        if is_interrupted():
            with suppress(Exception):  # it ended in this moment: nothing to kill
                ray.cancel(reference, force=True)
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
        wheels = {wheel.sha256: self._sent_wheel(wheel) for wheel in (*lock.wheels, lock.installer)}
        bare = replace(bench, original=dict(bench.original), environment=None)  # type: ignore[arg-type]
        return _BenchParts(bare, lock, wheels)


def do_work(node_needs: NodeNeeds, work: Callable[..., Any], options: dict[str, Any], *args: Any) -> Any:
    """Do one piece of work; runs in a worker."""
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
    said = f"Ray gave up a piece of work, after up to {NUM_RETRIES + 1} tries: {first_sentence(str(cause))}."
    fix = "the same command again goes on where it stopped; ray status shows the cluster."
    return SandboxFailure("CR0491", said, where="--ray", fix=fix)
