"""One environment, used by one thread at a time, and closed exactly once whatever happens to its episode."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import TypeVar

from composer_replication.errors import SandboxFailure
from composer_replication.interfaces import AgentEnvironment

T = TypeVar("T")


class EnvironmentLease:
    """An environment that is opened by its first job, in a thread of a pool, and closed by ``release``.

    ``release`` never blocks, may be called at any time, from any thread, more than once. Where a job runs, its own
    thread closes the environment as soon as the job has ended; else the pool does. ``closed`` is done when nothing
    is open any more. A job that has not begun is not begun any more.

    Args:
        open_environment: makes the environment; blocking.
        threads: where jobs run.

    ``was_opened`` and ``close_failure`` (the kind of error that ``close`` raised, or empty) are for counting.
    """

    def __init__(self, open_environment: Callable[[], AgentEnvironment], threads: Executor) -> None:
        self.closed: Future[None] = Future()
        self.was_opened = False
        self.close_failure = ""
        self._open = open_environment
        self._threads = threads
        self._lock = threading.Lock()
        self._environment: AgentEnvironment | None = None
        self._job: Future[object] | None = None
        self._is_busy = False
        self._is_released = False

    async def do(self, act: Callable[[AgentEnvironment], T], *, seconds: float | None) -> T:
        """Run ``act`` on the environment in a thread; afterwards nothing runs there. None waits for as long as it takes.

        Raises:
            SandboxFailure: it did not come back in time (CR0302), and only ``release`` may follow; or its own.
        """
        job: asyncio.Future[T] = asyncio.wrap_future(self._begin(act))
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
        """End the lease: nothing new begins, and the environment is closed as soon as it is idle."""
        with self._lock:
            if self._is_released:
                return
            self._is_released = True
            is_running = self._is_busy and self._job is not None and not self._job.cancel()
        if is_running:
            return
        if self._environment is None:
            self.closed.set_result(None)
            return
        try:
            self._threads.submit(self._close)
        except RuntimeError:  # the pool takes no more
            self._close()

    def _begin(self, act: Callable[[AgentEnvironment], T]) -> Future[T]:
        with self._lock:
            if self._is_released or self._is_busy:
                raise RuntimeError("an environment is used by one thread at a time, and not after its end")
            self._is_busy = True
            job = self._threads.submit(self._work, act)
            self._job = job  # type: ignore[assignment]  # only cancelled, never asked for its result
        return job

    def _work(self, act: Callable[[AgentEnvironment], T]) -> T:
        try:
            if self._environment is None:
                self._environment = self._open()
                self.was_opened = True
            return act(self._environment)
        finally:
            with self._lock:
                self._is_busy = False
                must_close = self._is_released
            if must_close:
                self._close()

    def _close(self) -> None:
        try:
            if self._environment is not None:
                self._environment.close()
        except Exception as error:  # noqa: BLE001  counted; the episode is over, whatever its close says
            self.close_failure = type(error).__name__
        finally:
            self._environment = None
            self.closed.set_result(None)
