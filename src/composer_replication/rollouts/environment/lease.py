"""A blocking environment for whoever has an event loop: a thread of its own, and its end whatever happens."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Generic, TypeVar

from composer_replication.errors import SandboxFailure, UsageError
from composer_replication.interfaces import AgentEnvironment

T = TypeVar("T")
Leased = TypeVar("Leased", bound=AgentEnvironment)


class EnvironmentLease(Generic[Leased]):
    """An environment with a thread of its own, which opens it for the first job and closes it after the last one.

    ``closed`` is done when nothing is open any more.
    """

    def __init__(self, open_environment: Callable[[], Leased]) -> None:
        self.closed: Future[None] = Future()
        self._open = open_environment
        self._thread = ThreadPoolExecutor(1, "environment")
        self._environment: Leased | None = None
        self._is_released, self._lock = False, threading.Lock()

    async def do(self, act: Callable[[Leased], T], *, seconds: float | None = None) -> T:
        """Run ``act`` on the environment, after whatever runs there. None waits for as long as it takes.

        Raises:
            UsageError: after ``release`` (CR0800).
            SandboxFailure: it did not come back in time (CR0302), and only ``release`` may follow; or its own.
        """
        self._require_lease()
        job: asyncio.Future[T] = asyncio.wrap_future(self._thread.submit(self._work, act))
        job.add_done_callback(lambda done: done.cancelled() or done.exception())  # somebody has looked
        done, _ = await asyncio.wait({job}, timeout=None if seconds is None else max(0.0, seconds))
        if not done:
            raise SandboxFailure(
                "CR0302",
                f"an environment did not come back within {seconds:.0f} s.",
                fix="give each of its tools a time-out of at most EpisodeOptions.call_seconds.",
            )
        return job.result()

    def release(self) -> None:
        """End the lease without waiting, from any thread, any number of times: the environment is closed as soon as the job
        that runs there has ended. A job that has not begun is not begun any more.
        """
        with self._lock:
            if self._is_released:
                return
            self._is_released = True
        try:
            self._thread.submit(self._close)
        except RuntimeError:  # the interpreter ends, and takes no more
            self._close()
        self._thread.shutdown(wait=False)

    def _work(self, act: Callable[[Leased], T]) -> T:
        self._require_lease()
        if self._environment is None:
            self._environment = self._open()
        return act(self._environment)

    def _require_lease(self) -> None:
        if self._is_released:
            raise no_attempt("EnvironmentLease")

    def _close(self) -> None:
        environment, self._environment = self._environment, None
        try:
            with suppress(Exception):  # the attempt is over, whatever its close says
                if environment is not None:
                    environment.close()
        finally:
            self.closed.set_result(None)


def no_attempt(where: str, fix: str = "call reset(task_id) first, and nothing after close().") -> UsageError:
    """The error for whoever uses an attempt that has not begun, or has ended."""
    return UsageError("CR0800", "no attempt is under way.", where=where, fix=fix)
