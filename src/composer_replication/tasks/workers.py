"""Where the heavy work of a build is done: in the calling thread, or somewhere that is asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ParamSpec, Protocol, TypeVar

from composer_replication.errors import MissingError
from composer_replication.tasks.intake.lock import LockedWheel, wheel_path
from composer_replication.tasks.store import TaskStore

Result = TypeVar("Result")
Params = ParamSpec("Params")


class Workers(Protocol):
    """Does work that is a function of its arguments alone: it reads no store and writes none."""

    def call(self, work: Callable[Params, Result], *args: Params.args, **options: Params.kwargs) -> Result:
        """What ``work(*args, **options)`` gives or raises; waits for it, in any thread."""
        ...

    def interrupt(self) -> None:
        """Kill what is under way; every waiting ``call`` raises ``SandboxFailure``."""
        ...


class OwnThreads:
    """Each call is done where it is made: the threads of the build are the workers."""

    def call(self, work: Callable[Params, Result], *args: Params.args, **options: Params.kwargs) -> Result:
        return work(*args, **options)

    def interrupt(self) -> None:
        """Nothing is done elsewhere; ``runs_interrupted`` kills the sandboxes of this process."""


OWN_THREADS = OwnThreads()


@contextmanager
def open_workers(address: str | None, jobs: int, store: TaskStore) -> Iterator[Workers]:
    """The workers of one build: those of a Ray cluster, or for None the build's own threads.

    Raises:
        MissingError: ray is not installed (CR0101), or as ``RayPool``.
        UsageError: as ``RayPool``.
    """
    if address is None:
        yield OWN_THREADS
        return
    try:
        from composer_replication.tasks.ray_pool import RayPool
    except ImportError as error:
        raise MissingError(
            "CR0101",
            "a build on Ray needs ray, which is not installed.",
            where="ray",
            fix="pip install 'composer-replication[ray]'",
        ) from error

    def read_wheel(wheel: LockedWheel) -> bytes:
        path = wheel_path(wheel)
        return path.read_bytes() if path.is_file() else store.blob(wheel.sha256)

    with RayPool(address, jobs=jobs, backend=store.backend, read_wheel=read_wheel) as pool:
        yield pool
