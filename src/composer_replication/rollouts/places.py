"""Who waits for a place has done nothing yet: a few places for many jobs, and clocks that stand while one waits.

A clock belongs to the work of one caller, and follows it into the threads of the places. In a thread that nobody
measures all of this does nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from threading import Lock
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


class WorkClock:
    """When some work is late: it may run for ``seconds``, and wait for as long as what it waits for moves.

    Where nothing of that moves for ``seconds`` either, whoever has the places hangs, and the work is late as well. Runs from
    now on; any number of threads may ask it.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._ran, self._since = 0.0, time.monotonic()
        self._last_moved: Callable[[], float] | None = None
        self._lock = Lock()

    @property
    def is_waiting(self) -> bool:
        return self._last_moved is not None

    @property
    def seconds_left(self) -> float:
        """Until it is late, if nothing changes."""
        with self._lock:
            now, last_moved = time.monotonic(), self._last_moved
            if last_moved is None:
                return self.seconds - self._ran - (now - self._since)
            return self.seconds - (now - max(self._since, last_moved()))

    def wait(self, last_moved: Callable[[], float]) -> None:
        """From now on it waits for something that moved last at this time of ``time.monotonic``."""
        with self._lock:
            now = time.monotonic()
            if self._last_moved is None:
                self._ran += now - self._since
                self._since = now
            self._last_moved = last_moved

    def go_on(self) -> None:
        """From now on it runs; nothing where it does."""
        with self._lock:
            if self._last_moved is not None:
                self._since, self._last_moved = time.monotonic(), None


_CLOCK: ContextVar[WorkClock | None] = ContextVar("work_clock", default=None)


@contextmanager
def measured_by(clock: WorkClock | None) -> Iterator[None]:
    """What this thread does inside is the work of that clock."""
    token = _CLOCK.set(clock)
    try:
        yield
    finally:
        _CLOCK.reset(token)


@contextmanager
def waiting(last_moved: Callable[[], float] = time.monotonic) -> Iterator[None]:
    """This thread waits inside; without an argument its clock leaves the limit to whoever waits."""
    clock = _CLOCK.get()
    if clock is None:
        yield
        return
    clock.wait(last_moved)
    try:
        yield
    finally:
        clock.go_on()


class Places:
    """So many jobs run at a time, each in a thread; the others wait, in their order, and their clocks stand."""

    def __init__(self, num_places: int, name: str) -> None:
        self._threads = ThreadPoolExecutor(num_places, thread_name_prefix=name)
        self._moved = time.monotonic()

    def last_moved(self) -> float:
        """When a job began or ended last."""
        return self._moved

    def map(self, work: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
        """As that of an executor; nothing begins before the first result is asked for."""
        clock = _CLOCK.get()

        def job(item: T) -> R:
            self._moved = time.monotonic()
            if clock is not None:
                clock.go_on()
            try:
                with measured_by(clock):
                    return work(item)
            finally:
                self._moved = time.monotonic()

        with waiting(self.last_moved):
            yield from self._threads.map(job, items)

    def run(self, work: Callable[[], R]) -> R:
        """One job, and its result."""
        (result,) = self.map(lambda work: work(), [work])
        return result

    @contextmanager
    def turn_of(self, lock: Lock) -> Iterator[None]:
        """Inside the lock is ours; whoever had it may have waited for a place."""
        with waiting(self.last_moved):
            lock.acquire()
        try:
            yield
        finally:
            lock.release()

    def close(self) -> None:
        """Wait for what runs; what waits is not begun any more."""
        self._threads.shutdown(wait=True, cancel_futures=True)
