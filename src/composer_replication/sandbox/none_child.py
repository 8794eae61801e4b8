"""The process around one command that has no jail: limits it, waits, leaves nothing that it can find.

Run as a file, with its orders as JSON in the file descriptor that its argument names. It is a subreaper,
so that a daemon of the command becomes its child; it kills all of them before it ends, and at
once when the process that started it dies. A command that means harm can kill it first.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys

from composer_replication.sandbox.child_process import EXIT_LEFTOVERS, become_user, begin, collect_ended
from composer_replication.sandbox.process_tree import kill_descendants

_EXIT_NOT_STARTED = 71


def main() -> None:
    """Run the command that the orders name and exit as it did (128 + N for signal N)."""
    with os.fdopen(int(sys.argv[1])) as handle:
        orders = json.load(handle)
    begin(int(orders["parent"]))
    child = os.fork()
    if child == 0:
        _become(orders)
    for descriptor in (0, 1, 2):
        os.close(descriptor)
    code = _exit_code(child)
    is_clean = kill_descendants(os.getpid())
    collect_ended()
    os._exit(code if is_clean else EXIT_LEFTOVERS)


def _become(orders: dict[str, object]) -> None:
    try:
        os.setpgid(0, 0)
        argv, limits, env = orders["argv"], orders["limits"], orders["env"]
        assert isinstance(argv, list) and isinstance(limits, list) and isinstance(env, dict)
        os.chdir(str(orders["cwd"]))
        user = orders.get("user")
        for kind, value in limits:
            _, hard = resource.getrlimit(kind)
            most = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(kind, (most, most))
        if isinstance(user, int):
            become_user(user)
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


if __name__ == "__main__":
    main()
