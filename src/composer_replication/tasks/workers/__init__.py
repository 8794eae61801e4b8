"""Where is the heavy work of a build done? In its own process, or on the nodes of a Ray cluster."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

from composer_replication.tasks.intake.environment import LockedWheel, wheel_path
from composer_replication.tasks.store import TaskStore

Result = TypeVar("Result")
Params = ParamSpec("Params")


class Workers:
    """Does work that is a function of its arguments alone (it reads no store and writes none): each call where it is made.

    The threads of the build are the workers then; ``RayPool`` has the nodes of a cluster do it.
    """

    def call(self, work: Callable[Params, Result], *args: Params.args, **options: Params.kwargs) -> Result:
        """What ``work(*args, **options)`` gives or raises; waits for it, in any thread. ``runs_interrupted`` ends it."""
        return work(*args, **options)


OWN_THREADS = Workers()


_IMPATIENT = {"RAY_NUM_REDIS_GET_RETRIES": "2", "RAY_py_gcs_connect_timeout_s": "5"}
"""Where something other than Ray answers, Ray tries for ten minutes; with these for half a minute."""


@contextmanager
def open_workers(address: str | None, store: TaskStore) -> Iterator[Workers]:
    """The workers of one build: those of a Ray cluster, or for None the build's own threads."""
    if address is None:
        yield OWN_THREADS
        return
    make_ray_impatient()
    from composer_replication.tasks.workers.ray_cluster import RayPool, joined

    def read_wheel(wheel: LockedWheel) -> bytes:
        path = wheel_path(wheel)
        return path.read_bytes() if path.is_file() else store.blob(wheel.sha256)

    with joined(address) as head:
        yield RayPool(head, backend=store.backend, read_wheel=read_wheel)


def make_ray_impatient() -> None:
    """Before ray is imported: it reads then how long it tries to connect. What the user has set stays."""
    for name, value in _IMPATIENT.items():
        os.environ.setdefault(name, value)
