"""What waits is not begun after an error, and only a Ctrl-C tells jails to end."""

from __future__ import annotations

import threading
import time

import pytest

from composer_replication.sandbox.interruptible_pool import interruptible_pool
from composer_replication.sandbox.supervised_run import is_interrupted


@pytest.mark.parametrize(("error", "tells"), [(KeyboardInterrupt, True), (ValueError, False)])
def test_an_error_ends_the_pool(error: type[BaseException], tells: bool) -> None:
    begun, told, later = threading.Event(), [], []

    def first() -> None:
        begun.set()
        deadline = time.monotonic() + 1
        while not is_interrupted() and time.monotonic() < deadline:
            time.sleep(0.01)
        told.append(is_interrupted())

    def run() -> None:
        with interruptible_pool(0, "test") as pool:
            pool.submit(first)
            pool.submit(later.append, 1)
            begun.wait()
            raise error

    with pytest.raises(error):
        run()
    assert (told, later) == ([tells], [])
    assert not is_interrupted()
