"""Several trainer processes that must decide the same, when to stop among it: small exchanges over torch.distributed.

The rank comes from torch.distributed alone, so that these work before an accelerator exists.
In a lone process each of them is a plain call.
"""

from __future__ import annotations

import atexit
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import FrameType
from typing import TypeVar, cast

import torch.distributed as dist

T = TypeVar("T")


def num_processes() -> int:
    """How many trainer processes there are."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def process_rank() -> int:
    """Which of them this is, from 0."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def gathered(value: T) -> list[T]:
    """One value from each process, in rank order, on every process. A collective call."""
    if num_processes() == 1:
        return [value]
    values: list[T] = [value] * num_processes()
    dist.all_gather_object(values, value)
    return values


def from_first(value: T) -> T:
    """The first process's value on every process. A collective call."""
    return gathered(value)[0]


def together(work: Callable[[], T]) -> T:
    """Each process runs ``work`` and gets its own result; an exception on one stops all. A collective call.

    What ``work`` raised here is raised; what it raised elsewhere, with a note that says on which process.
    """
    if num_processes() == 1:
        return work()
    result, own_error = None, None
    try:
        result = work()
    except BaseException as error:  # noqa: BLE001 - raised below, once the others know
        own_error = error
    errors = gathered(portable(own_error))
    if own_error is not None:
        raise own_error
    for rank, foreign_error in enumerate(errors):
        if isinstance(foreign_error, BaseException):
            foreign_error.add_note(f"raised on process {rank}")
            raise foreign_error
        if foreign_error is not None:
            raise RuntimeError(f"process {rank} sent something else than its error: it went another way.")
    return cast("T", result)


def once(work: Callable[[], T], *, every_process_joins: bool = False) -> T:
    """The first process's result of ``work``, on every process; an exception on one stops all.

    With ``every_process_joins`` it runs on all, as each has to take part in a forward of sharded weights.
    """
    runs_here = every_process_joins or process_rank() == 0
    return cast("T", from_first(together(work if runs_here else lambda: None)))


def portable(error: BaseException | None) -> BaseException | None:
    """The error itself where it survives pickling, else one that says the same."""
    try:
        restored: BaseException | None = pickle.loads(pickle.dumps(error))  # noqa: S301 - our own bytes
    except Exception:  # noqa: BLE001 - any failure to pickle has the same answer
        return RuntimeError(f"{type(error).__name__}: {error}")
    return restored


@cache
def wait_for_gloo_at_exit() -> None:
    """Have gloo's threads waited for before the interpreter ends.

    They let go of a collective's tensors on their own time, under Python's lock; a thread that asks for it while the interpreter
    ends is ended amid C++, and a finished run aborts (exit code -6). Destroying the group joins them only where nothing else
    holds it, and might wait for a process that has failed.
    """
    atexit.register(wait_for_idle_threads, "pt_gloo")


def wait_for_idle_threads(name: str) -> None:
    """Wait, five seconds at most, for all native threads of this process whose names begin with ``name`` to sleep."""
    num_calm, tasks = 0, Path("/proc/self/task")
    for _ in range(1000):
        time.sleep(0.005)  # without Python's lock: who waits for it gets it
        num_calm = 0 if any(_runs(name, task) for task in tasks.glob("*")) else num_calm + 1
        if num_calm == 3:
            return


def _runs(name: str, thread: Path) -> bool:
    with suppress(OSError):  # it has ended
        _, _, rest = (thread / "stat").read_text().partition("(")
        own_name, _, state = rest.rpartition(") ")
        return own_name.startswith(name) and not state.startswith("S")
    return False


class InterruptOnce:
    """Inside, Ctrl-C, or a scheduler's order to end, asks for a checkpoint at the end of the step.

    A second Ctrl-C stops at once. Further orders to end (SIGTERM) change nothing: schedulers and launchers send several.
    Nothing is installed outside the main thread or under another program's handler. With several processes only the order to
    end is heard: each of them gets a Ctrl-C twice, which leaves the last whole checkpoint.
    """

    def __init__(self) -> None:
        self.is_requested = False
        self._taken: list[signal.Signals] = []

    def __enter__(self) -> InterruptOnce:
        self.is_requested, self._taken = False, []
        if threading.current_thread() is not threading.main_thread():
            return self
        heard = [signal.SIGTERM] if num_processes() > 1 else [signal.SIGINT, signal.SIGTERM]
        self._taken = [n for n in heard if signal.getsignal(n) is signal.default_int_handler]
        for number in self._taken:
            signal.signal(number, self._ask)
        return self

    def __exit__(self, *error: object) -> None:
        for number in self._taken:
            signal.signal(number, signal.default_int_handler)

    def is_agreed(self) -> bool:
        """Whether any process was asked to end: all stop at the same step. A collective call."""
        self.is_requested = any(gathered(self.is_requested))
        return self.is_requested

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if not self.is_requested:
            again = " Ctrl-C again stops at once." if number == signal.SIGINT else ""
            sys.stderr.write(f"\nInterrupted: finishing this step and saving it.{again}\n")
        self.is_requested = True
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)
