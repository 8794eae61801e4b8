"""The process around one command that has no jail: limits it, waits, leaves nothing that it can find.

Run as a file, with its orders as JSON in the file descriptor that its argument names. It is a subreaper,
so that a daemon of the command becomes its child; it kills all of them before it ends, and at
once when the process that started it dies. A command that means harm can kill it first.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import select
import signal
import sys
import threading
from contextlib import suppress

from composer_replication.sandbox.process_tree import kill_descendants

_PR_SET_CHILD_SUBREAPER = 36
_EXIT_KILLED = 137
_EXIT_LEFTOVERS = 70
_EXIT_NOT_STARTED = 71


def main() -> None:
    """Run the command that the orders name and exit as it did (128 + N for signal N)."""
    with os.fdopen(int(sys.argv[1])) as handle:
        orders = json.load(handle)
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    _die_with(int(orders["parent"]))
    child = os.fork()
    if child == 0:
        _become(orders)
    for descriptor in (0, 1, 2):
        os.close(descriptor)
    code = _exit_code(child)
    is_clean = kill_descendants(os.getpid())
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    os._exit(code if is_clean else _EXIT_LEFTOVERS)


def _become(orders: dict[str, object]) -> None:
    try:
        os.setpgid(0, 0)
        argv, limits, env = orders["argv"], orders["limits"], orders["env"]
        assert isinstance(argv, list) and isinstance(limits, list) and isinstance(env, dict)
        os.chdir(str(orders["cwd"]))
        for kind, value in limits:
            _, hard = resource.getrlimit(kind)
            most = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(kind, (most, most))
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        os.execve(argv[0], argv, env)  # noqa: S606  it becomes the command
    except BaseException as error:  # noqa: BLE001  whatever it is, it must not go on as a copy of its parent
        os.write(2, f"{error}\n".encode())
        os._exit(_EXIT_NOT_STARTED)


def _exit_code(child: int) -> int:
    """Of the command, collecting the orphans that come to us meanwhile."""
    while True:
        pid, status = os.waitpid(-1, 0)
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            return 128 - code if code < 0 else code


def _die_with(parent: int) -> None:
    """Kill everything as soon as ``parent`` has died, even by SIGKILL."""
    descriptor = os.pidfd_open(parent)
    if os.getppid() != parent:
        os._exit(_EXIT_KILLED)

    def watch() -> None:
        select.select([descriptor], [], [])
        kill_descendants(os.getpid())
        os._exit(_EXIT_KILLED)

    threading.Thread(target=watch, daemon=True).start()


if __name__ == "__main__":
    main()
