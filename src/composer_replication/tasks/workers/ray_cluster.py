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
from composer_replication.tasks.intake.environment import EnvironmentLock, lock_of, open_environment
from composer_replication.tasks.running.bench import Bench
from composer_replication.tasks.store import TaskStore
from composer_replication.tasks.twin.twin_run import pickler_fingerprint
from composer_replication.tasks.workers import Params, Result, Workers

_HOST = re.compile(r"\[[0-9a-fA-F:]+\]|[\w.-]+")
_ANSWER_SECONDS = 5.0


@contextmanager
def joined(address: str) -> Iterator[None]:
    """This process as a driver of a cluster, to the end of the block; the cluster forgets then all that was sent to it.

    Args:
        address: ``auto`` for the cluster that ``RAY_ADDRESS`` names or that runs on this machine,
            ``HOST:PORT`` of its head for one that this machine is a node of, ``ray://HOST:PORT`` of
            its client server for any other (needs ``ray[client]``).

    UsageError where this is no form of address, or this program has joined a cluster already; MissingError where nothing
    answers there, or not as Ray does, or with another version of Ray or Python (all CR0490).
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
            with suppress(ValueError, TypeError):  # outside the main thread Ray puts no handler of its own
                signal.signal(signal.SIGTERM, on_sigterm)
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
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not _HOST.fullmatch(host) or not re.fullmatch(r"\d{1,5}", port) or not 0 < int(port) < 1 << 16:
        problem = f"{address!r} is no address of a Ray cluster."
        fix = "--ray auto, --ray HOST:PORT or --ray ray://HOST:PORT"
        raise UsageError("CR0490", problem, where="--ray", fix=fix)
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER_SECONDS).close()
    except (OSError, UnicodeError) as error:  # a name of more than 63 signs between dots is no name
        raise _refusal(address, error) from error


def _refusal(address: str, error: Exception) -> ComposerError:
    """Ray's own words, and all that they may mean."""
    text = f"{error} {error.__cause__ or ''}"
    is_of_token = "uthentica" in text  # it says that in a traceback
    said = "it wants a token, which is missing here or another one" if is_of_token else one_line(text)
    fix = f"ray status on the head tells whether it runs; it needs Ray {ray.__version__}, this Python, and its RAY_AUTH_TOKEN here."
    problem = f"the Ray cluster cannot be joined: {said or type(error).__name__}."
    return MissingError("CR0490", problem, where=address, fix=fix)


def one_line(text: str) -> str:
    """What Ray says, without its traceback and its full stop, and at most 300 characters of it."""
    return " ".join(text.partition("Traceback")[0].split())[:300].rstrip(". ")


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
NodeNeeds = tuple[str | None, str]
"""Sandbox backend, and the programs that must be the same there."""


def needs_of(backend: str | None) -> NodeNeeds:
    """What a node must have in common with this process."""
    return backend, f"composer-replication {__version__} with cloudpickle {pickler_fingerprint()}"


@cache
def check_node(backend: str | None, programs: str) -> None:
    """Refuse a node that would give other bytes, or whose sandbox does not hold; tried once a worker."""
    _, own = needs_of(backend)
    if own != programs:
        raise unfit_node(f"has {own} and not {programs}")
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


def raise_of_work(error: Exception) -> Exception:
    """Raise what the work raised; Ray's own error, where nothing is known of the work: its process or its node is gone."""
    cause = error.cause if isinstance(error, RayTaskError) else error
    if isinstance(cause, RuntimeError) and "failed to import on the worker" in str(cause):
        problem = "a node of the cluster cannot import composer-replication."
        raise MissingError("CR0491", problem, where="--ray", fix=INSTALL) from error
    if isinstance(cause, Exception) and not isinstance(cause, RayError | ConnectionError):
        raise cause from error
    return cause if isinstance(cause, Exception) else error


def interruption() -> SandboxFailure:
    """What whoever still waits is told when the work is given up."""
    return SandboxFailure("CR0302", "the run was killed because the program was interrupted.")


# --- the heavy work of a build as Ray tasks ---


class _BenchParts(NamedTuple):
    """What a bench is made of again on another machine: itself without its environment, and a reference to wheels by hash."""

    bench: Bench
    lock: EnvironmentLock
    wheels: Any

    def made(self, backend: str | None) -> Bench:
        """The bench on this machine; its environment is made first where it is absent."""
        read = cache(lambda: ray.get(self.wheels))
        try:
            environment = open_environment(
                self.lock, backend=backend, read_wheel=lambda one: read()[one.sha256]
            )
        except InputError as error:
            raise unfit_node("cannot be used", error) from error
        return replace(self.bench, environment=environment, backend=backend)


class RayPool(Workers):
    """Work on a Ray cluster, which this process has ``joined``, for the time of one build; safe to use from several threads."""

    def __init__(self, store: TaskStore) -> None:
        self._store, self._needs = store, needs_of(store.backend)
        self._lock = threading.Lock()
        self._sent: dict[int, tuple[Bench, Any]] = {}  # with the bench, so that its id stays taken
        self._sent_wheels = cache(self._send_wheels)
        self._remote = ray.remote(do_work).options(
            num_cpus=1, max_retries=NUM_RETRIES, retry_exceptions=[SandboxFailure], name="composer-rl work"
        )

    def call(self, work: Callable[Params, Result], *args: Params.args, **options: Params.kwargs) -> Result:
        """Have work done by the cluster, and wait for it; a ``Bench`` is sent once.

        ``work`` is a function of a module that every node has. What it raises is raised after one try; SandboxFailure where
        the sandbox broke or Ray lost the worker every time (CR0491), or the work was interrupted (CR0302): its worker is
        killed, and its sandboxes die with it. MissingError where a node cannot do such work (CR0491).
        """
        reference = self._remote.remote(self._needs, work, options, *map(self._send, args))

        def look() -> None:
            if is_interrupted():
                with suppress(Exception):  # it ended in this moment: nothing to kill
                    ray.cancel(reference, force=True)
                raise interruption()

        try:
            result: Result = wait_for(reference, look)
        except (RayError, ConnectionError) as error:
            said = one_line(str(raise_of_work(error)))
            problem = f"Ray gave up a piece of work, after up to {NUM_RETRIES + 1} tries: {said}."
            fix = "the same command again goes on where it stopped; ray status shows the cluster."
            raise SandboxFailure("CR0491", problem, where="--ray", fix=fix) from error
        return result

    def _send(self, value: object) -> object:
        """A reference in place of a bench, which is large and given again and again; Ray puts its parts back."""
        if not isinstance(value, Bench):
            return value
        with self._lock:
            if id(value) not in self._sent:
                lock = lock_of(value.environment)
                bare = replace(value, original=dict(value.original), environment=None)  # type: ignore[arg-type]
                self._sent[id(value)] = value, ray.put(_BenchParts(bare, lock, self._sent_wheels(lock)))
            return self._sent[id(value)][1]

    def _send_wheels(self, lock: EnvironmentLock) -> Any:
        return ray.put({one.sha256: self._store.wheel(one) for one in (*lock.wheels, lock.installer)})


def do_work(needs: NodeNeeds, work: Callable[..., Any], options: dict[str, Any], *args: Any) -> Any:
    """Do one piece of work; runs in a worker."""
    check_node(*needs)
    return work(*[arg.made(needs[0]) if isinstance(arg, _BenchParts) else arg for arg in args], **options)
