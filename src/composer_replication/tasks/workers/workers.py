"""The workers of a build: the threads of this process, or a Ray cluster that is asked for."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from composer_replication.tasks.intake.lock import LockedWheel, wheel_path
from composer_replication.tasks.store import TaskStore
from composer_replication.tasks.workers import OWN_THREADS, Workers

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
        pool = RayPool(head, backend=store.backend, read_wheel=read_wheel)
        try:
            yield pool
        finally:
            pool.interrupt()


def make_ray_impatient() -> None:
    """Before ray is imported: it reads then how long it tries to connect. What the user has set stays."""
    for name, value in _IMPATIENT.items():
        os.environ.setdefault(name, value)
