"""One bad call costs itself alone. Runs inside the sandbox; its text is sent along.

A signal reaches Python between two of its instructions, so a call that hangs or dies inside
C code takes its process along. The number of each step is kept in memory that parent and
child share: the parent knows which one it was, and starts another child that leaves it out.
"""

import math
import mmap
import os
import resource
import signal
import time

LOADING, DONE = -1, -2
MAX_LOST = 11  # calls that ran out of time or took their process along; past the 5 % of 200 that may be wrong
HARD_SECONDS = 0.5  # of processor time after a call's own limit: then it heard no signal


def shared_number(place):
    """An attribute whose value lies in the memory that parent and child share."""
    return property(
        lambda steps: steps.memory[place], lambda steps, value: steps.memory.__setitem__(place, value)
    )


class Steps:
    """Numbers what a job does. ``fatal`` are the steps of which earlier children died."""

    now = shared_number(0)  # the number of the step that is done now, or LOADING or DONE
    num_lost = shared_number(1)  # calls that cost a whole limit; children that come later go on counting
    num_told = shared_number(2)  # calls that were reported; children that come later begin behind them

    def __init__(self, fatal, cpu_seconds):
        self.memory = memoryview(mmap.mmap(-1, 24)).cast("q")
        self.fatal = fatal
        self.cpu_seconds = cpu_seconds

    @property
    def is_enough(self):
        """Whether so many calls were lost that the others are not made."""
        return self.num_lost >= MAX_LOST and self.now >= max(self.fatal, default=LOADING)

    def begin(self, seconds):
        """The next step, which may take so much processor time; False for one that is left out."""
        self.now += 1
        if self.now in self.fatal:
            return False
        # The kernel ends the process: no handler of Python's runs while C code does.
        end = min(self.cpu_seconds, time.process_time() + seconds + HARD_SECONDS)
        limit_processor_time(end)
        return True


def limit_processor_time(seconds):
    """Of this process; a part of a second counts as a whole one."""
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    wanted = max(1, math.ceil(seconds))
    resource.setrlimit(
        resource.RLIMIT_CPU, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard)
    )


def run_to_the_end(work, cpu_seconds, wall_seconds, stuck_seconds, *, is_retold):
    """Do ``work(steps)`` in children, one after the other until one comes to the end.

    Args:
        work: what a child does.
        cpu_seconds: of all children together.
        wall_seconds: the same by the clock.
        stuck_seconds: of one step by the clock.
        is_retold: each child begins at the beginning, so that after the last death one more can
            tell of what there was until then.

    Returns:
        Empty, or why it ended before its end: ``late`` or ``lost``.
    """
    fatal: list[int] = []
    before, deadline = _used_by_children(), time.monotonic() + wall_seconds
    lost = told = 0
    while True:
        left = cpu_seconds - (_used_by_children() - before)
        if left <= 0 or time.monotonic() > deadline:
            return "late"
        steps = Steps(frozenset(fatal), left)
        steps.now, steps.num_lost, steps.num_told = LOADING, lost, told
        _run_child(work, steps, deadline, stuck_seconds)
        if steps.now == DONE:
            return ""
        if cpu_seconds - (_used_by_children() - before) <= 0 or time.monotonic() > deadline:
            return "late"
        lost, told = steps.num_lost + 1, steps.num_told
        if steps.now < 0 or steps.now in fatal or len(fatal) >= MAX_LOST:
            return "lost"
        fatal.append(steps.now)
        if lost >= MAX_LOST and not is_retold:
            return "lost"


def _run_child(work, steps, deadline, stuck_seconds):
    child = os.fork()
    if child == 0:
        try:
            os.setsid()
            limit_processor_time(steps.cpu_seconds)
            work(steps)
            steps.now = DONE
        finally:
            os._exit(0)
    wait, seen, since = 0.001, LOADING, time.monotonic()
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        now = time.monotonic()
        if steps.now != seen:
            seen, since = steps.now, now
        if now > deadline or (seen >= 0 and now - since > stuck_seconds):
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return
        time.sleep(wait)
        wait = min(0.02, wait * 1.5)


def _used_by_children():
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
