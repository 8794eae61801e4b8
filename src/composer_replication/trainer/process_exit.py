"""The end of one of several trainer processes, which must not look like a failure.

Gloo's threads let go of the tensors of a collective on their own time. The last reference to one that Python has known
needs Python's lock, and a thread that asks for it while the interpreter ends is ended amid C++: the process aborts with
"terminate called without an active exception", and the launcher reports a finished run as failed (exit code -6).
Destroying the group joins these threads only where nothing else holds it, as FSDP2 and DistributedDataParallel do.
"""

from __future__ import annotations

import atexit
import time
from contextlib import suppress
from functools import cache
from pathlib import Path

import torch.distributed as dist

_THREADS = Path("/proc/self/task")
_GLOO = "pt_gloo"
_POLL_SECONDS, _NUM_CALM_POLLS, _NUM_POLLS = 0.005, 3, 1000


@cache
def leave_group_at_exit() -> None:
    """Have a process group over gloo left in good order before the interpreter ends."""
    atexit.register(_leave_gloo)


def _leave_gloo() -> None:
    # Others are left alone: destroying NCCL's may wait for a process that has failed.
    is_member = dist.is_available() and dist.is_initialized()
    if is_member and all(part.endswith("gloo") for part in dist.get_backend_config().split(",")):
        dist.destroy_process_group()
    wait_for_idle_threads(_GLOO)  # of a group that the user has destroyed, too


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
