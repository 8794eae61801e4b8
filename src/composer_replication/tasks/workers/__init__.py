"""Where is the heavy work of a build done? In its own process, or on the nodes of a Ray cluster."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

from composer_replication.tasks.store import TaskStore

# Before ray is imported: where something other than Ray answers, it tries for ten minutes, with these for half a minute.
os.environ.setdefault("RAY_NUM_REDIS_GET_RETRIES", "2")
os.environ.setdefault("RAY_py_gcs_connect_timeout_s", "5")

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


@contextmanager
def open_workers(address: str | None, store: TaskStore) -> Iterator[Workers]:
    """The workers of one build: those of a Ray cluster, or for None the build's own threads."""
    if address is None:
        yield OWN_THREADS
        return
    from composer_replication.tasks.workers.ray_cluster import RayPool, joined

    with joined(address):
        yield RayPool(store)
