"""The end of one of several trainer processes, which must not look like a failure.

Gloo's threads let go of the tensors of a collective on their own time. The last reference to one that Python has known
needs Python's lock, and a thread that asks for it while the interpreter ends is ended amid C++: the process aborts with
"terminate called without an active exception", and the launcher reports a finished run as failed (exit code -6).
Destroying the group would join these threads only where nothing else holds it, as FSDP2 and DistributedDataParallel do, and
might wait for a process that has failed. So they are given the time that they need.
"""

from __future__ import annotations

import atexit
import time
from contextlib import suppress
from functools import cache
from pathlib import Path

_THREADS = Path("/proc/self/task")
_GLOO = "pt_gloo"
_POLL_SECONDS, _NUM_CALM_POLLS, _NUM_POLLS = 0.005, 3, 1000


@cache
def wait_for_gloo_at_exit() -> None:
    """Have gloo's threads waited for before the interpreter ends."""
    atexit.register(wait_for_idle_threads, _GLOO)


def wait_for_idle_threads(name: str) -> None:
    """Wait, five seconds at most, until this process's native threads of such a name sleep.

    Args:
        name: how their names begin.
    """
    num_calm = 0
    for _ in range(_NUM_POLLS):
        time.sleep(_POLL_SECONDS)  # without Python's lock: who waits for it gets it
        num_calm = 0 if _some_run(name) else num_calm + 1
        if num_calm == _NUM_CALM_POLLS:
            return


def _some_run(name: str) -> bool:
    for thread in _THREADS.glob("*"):
        with suppress(OSError):  # it has ended
            _, _, rest = (thread / "stat").read_text().partition("(")
            own_name, _, state = rest.rpartition(") ")
            if own_name.startswith(name) and not state.startswith("S"):
                return True
    return False
