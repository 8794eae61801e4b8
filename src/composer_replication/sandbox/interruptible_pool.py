"""Threads that run sandboxes and end at once when they are interrupted."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from composer_replication.sandbox.supervised_run import runs_interrupted


@contextmanager
def interruptible_pool(num_threads: int, name: str) -> Iterator[ThreadPoolExecutor]:
    """At least one thread; after an error nothing new begins, and a Ctrl-C kills what runs in jails too."""
    with ThreadPoolExecutor(max(1, num_threads), thread_name_prefix=name) as pool:
        try:
            yield pool
        except KeyboardInterrupt:
            with runs_interrupted():
                pool.shutdown(cancel_futures=True)
            raise
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
