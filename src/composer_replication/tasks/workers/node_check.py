"""May a node of a cluster do work for us? The same version, the same pickles, a sandbox that holds."""

from __future__ import annotations

import socket
from functools import cache

from composer_replication import __version__
from composer_replication.errors import ComposerError, MissingError, SandboxFailure
from composer_replication.sandbox import choose_backend, require_selftest
from composer_replication.tasks.twin.twin_run import pickler_fingerprint

INSTALL = f"pip install 'composer-replication[ray]=={__version__}' there, then composer-rl doctor."
NodeNeeds = tuple[str | None, str, str]
"""Sandbox backend, version of this program, fingerprint of cloudpickle."""


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
