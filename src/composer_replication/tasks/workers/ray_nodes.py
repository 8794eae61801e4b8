"""A node of a Ray cluster at work for us: whether it may, what became of the work, and who clears up after its workers."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from composer_replication import __version__
from composer_replication.errors import ComposerError, MissingError, SandboxFailure
from composer_replication.sandbox import choose_backend, require_selftest
from composer_replication.tasks.twin.twin_run import pickler_fingerprint

NUM_RETRIES = 2
"""After a dead worker, a lost node or a broken sandbox; what the work itself answers is final."""
_WAIT_SECONDS = 1.0
INSTALL = f"pip install 'composer-replication[ray]=={__version__}' there, then composer-rl doctor."
NodeNeeds = tuple[str | None, str, str]
"""Sandbox backend, version of this program, fingerprint of cloudpickle."""
_PROGRAM = """\
import os, select, sys
if os.fork():
    os._exit(0)
end = select.poll()
end.register(int(sys.argv[1]), select.POLLIN)
end.poll()
from composer_replication.sandbox.process_folder import sweep
sweep()
"""


def needs_of(backend: str | None) -> NodeNeeds:
    """What a node must have in common with this process."""
    return backend, __version__, pickler_fingerprint()


@cache
def check_node(backend: str | None, version: str, pickler: str) -> None:
    """Refuse a node that would give other bytes, or whose sandbox does not hold; tried once a worker.

    Raises:
        MissingError: it names the node (CR0491); a ``SandboxFailure`` if the self-test failed.
    """
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


@cache
def sweep_after_this_process() -> None:
    """As soon as this process has ended, ``sweep`` its jails and folders; once a process, about 10 MB.

    Ray kills the workers of a driver that is gone, and nothing that they would do at their end is done. Whoever waits for
    that end is no child of the worker, for Ray kills those as well, and not of its session.

    Where it cannot be started, or the system tells nobody of such an end (no ``pidfd_open``), the next process of ours
    on this machine does it.
    """
    if not hasattr(os, "pidfd_open"):
        return
    with suppress(OSError):
        # Readable when our locks are gone, which a pipe would not tell.
        descriptor = os.pidfd_open(os.getpid())
        try:
            subprocess.run(
                [sys.executable, "-c", _PROGRAM, str(descriptor)],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                cwd="/", pass_fds=(descriptor,), start_new_session=True, check=False,
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            )  # fmt: skip
        finally:
            os.close(descriptor)


def wait_for(reference: Any, look: Callable[[], None]) -> Any:
    """What a reference stands for, as soon as it is there; ``look`` is called now and then and may raise.

    Raises:
        Exception: what the work or ``look`` raised, or an error of Ray's: see ``plain_cause``.
    """
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
