"""What became of work that was given to Ray: wait for it, and tell Ray's own errors from those of the work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from composer_replication.errors import MissingError, SandboxFailure
from composer_replication.tasks.workers.node_check import INSTALL

NUM_RETRIES = 2
"""After a dead worker, a lost node or a broken sandbox; what the work itself answers is final."""
_WAIT_SECONDS = 1.0


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
