"""Native threads are waited for by their state, whatever they do."""

from __future__ import annotations

import hashlib
import threading
from pathlib import Path

from composer_replication.trainer.process_exit import wait_for_idle_threads

NAME = "pt_gloo_test"


def test_threads_of_the_name_are_waited_for_until_they_sleep() -> None:
    has_begun, may_end, steps = threading.Event(), threading.Event(), []

    def work() -> None:
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text(NAME)
        has_begun.set()
        hashlib.sha256(bytes(300_000_000)).digest()  # without Python's lock, some tenths of a second
        steps.append("worked")
        may_end.wait()  # asleep, and not ended

    thread = threading.Thread(target=work)
    thread.start()
    has_begun.wait()
    wait_for_idle_threads("pt_gloo")
    assert steps == ["worked"]
    may_end.set()
    thread.join()
    wait_for_idle_threads("pt_gloo")
