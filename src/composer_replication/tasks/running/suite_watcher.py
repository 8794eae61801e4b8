"""Runs inside the sandbox behind ``batch_server.py``: ends a run that waits for ever, from a process of its own.

A thread or an alarm inside the run could be held up, exchanged or seen by its tests. Not imported by the package and
never placed in a tree.
"""

import contextlib
import os
import select
import signal
import time

WATCH_SECONDS = 0.25


def start_watcher(send, seconds, idle_seconds):
    """Start it; the answer is what tells it that the run is at another test or file, by name.

    The run is killed once it was at one of them for ``seconds``, or all of it has waited for ``idle_seconds`` without
    a tick of processor time (where there is a ``/proc``); None: for ever.
    """
    told, tell = os.pipe()
    runner = os.getpid()
    child = os.fork()
    if child == 0:
        if os.fork() == 0:  # of nobody: a test may wait for all of its own children
            os.setsid()
            os.close(tell)
            try:
                watch(told, runner, send, seconds, idle_seconds)
            finally:
                os._exit(0)
        os._exit(0)
    os.close(told)
    os.waitpid(child, 0)

    def begins(name):
        data = name.encode("utf-8", "backslashreplace").replace(b"\n", b" ")[:2048]
        with contextlib.suppress(OSError):
            os.write(tell, data + b"\n")

    return begins


def watch(told, runner, send, seconds, idle_seconds):
    """Look until the run is over or has to be ended."""
    name, ticks = b"", None
    since = idle_since = time.monotonic()
    while True:
        is_told = bool(select.select([told], [], [], WATCH_SECONDS)[0])
        now = time.monotonic()
        if is_told:
            data = os.read(told, 1 << 16)
            if not data:
                return
            name, ticks, since, idle_since = data[:-1].rpartition(b"\n")[2], None, now, now
            continue
        if idle_seconds is not None:
            used = ticks_used([runner, *orphans(runner, set())])  # type: ignore[name-defined]  # noqa: F821  of batch_server
            if used is None or ticks is None or not 0 <= used - ticks <= 1:
                idle_since = now
            ticks = used
        if seconds is not None and now - since >= seconds:
            text = f"it ran longer than {seconds:g} s"
        elif idle_seconds is not None and now - idle_since >= idle_seconds:
            text = f"it waited {idle_seconds:g} s for something that did not come"
        else:
            continue
        send("stuck", id=name.decode("utf-8", "replace"), text=text)
        os.kill(runner, signal.SIGKILL)
        return
