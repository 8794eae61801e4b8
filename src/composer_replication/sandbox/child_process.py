"""What a process of ours around one command does: it dies with us, collects orphans, gives up privileges, leaves nothing.

It is started anew for each command, so this imports little. Its orders are JSON in the file descriptor that its argument
names. ``main`` is that of a command that has no jail, which can kill it first if it means harm.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import select
import signal
import struct
import sys
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

from composer_replication.sandbox.process_tree import kill_descendants

EXIT_KILLED, EXIT_LEFTOVERS = 137, 70
_PR_CAPBSET_DROP, _PR_SET_CHILD_SUBREAPER = 24, 36
PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 38, 22, 2
_STEP_BYTES = 8
_EXIT_NOT_STARTED = 71


def _begin(parent: int) -> None:
    """Become a subreaper, so that a daemon of the command becomes our child; kill all as soon as ``parent`` dies."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    descriptor = os.pidfd_open(parent)
    if os.getppid() != parent:
        os._exit(EXIT_KILLED)

    def watch() -> None:
        select.select([descriptor], [], [])
        kill_descendants(os.getpid())
        os._exit(EXIT_KILLED)

    threading.Thread(target=watch, daemon=True).start()


def allowed(kind: int, value: int) -> int:
    """A resource limit, or less where this process may have no more itself."""
    hard = resource.getrlimit(kind)[1]
    return value if hard == resource.RLIM_INFINITY else min(value, hard)


def limit(limits: Iterable[tuple[int, int]]) -> None:
    """Hold this process, and what it starts, to these limits."""
    for kind, value in limits:
        resource.setrlimit(kind, (allowed(kind, value),) * 2)


def drop_bounding_set() -> None:
    """No program that is started gets a capability from its file."""
    library = ctypes.CDLL(None)
    for number in range(64):
        if library.prctl(_PR_CAPBSET_DROP, number, 0, 0, 0) != 0:
            break


def refuse_calls(program: bytes) -> None:
    """Gain no privileges any more, and have system calls refused by a filter: this thread, and what it starts."""
    library = ctypes.CDLL(None, use_errno=True)
    checked(library.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs cannot be set")
    if not program:  # a machine whose numbers we do not know
        return
    steps = ctypes.create_string_buffer(program, len(program))
    whole = struct.pack("HxxxxxxP", len(program) // _STEP_BYTES, ctypes.addressof(steps))
    done = library.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.create_string_buffer(whole), 0, 0)
    checked(done, "system calls cannot be refused")


def checked(result: int, problem: str = "") -> int:
    """What a call of the C library returned; its error with ``problem``, or with the system's word for it, where it failed."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, problem or os.strerror(number))
    return result


def become_user(uid: int) -> None:
    """As root: another user for good, with no other group and no way back."""
    from composer_replication.sandbox.syscall_filter import filter_program

    drop_bounding_set()
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    refuse_calls(filter_program())


def keep(run: Callable[[dict[str, Any]], int]) -> None:
    """Begin, run the command that the orders name, leave nothing of it, and exit with the code that ``run`` has for it.

    What ``run`` raises is raised once nothing is left.
    """
    with os.fdopen(int(sys.argv[1])) as handle:
        orders = json.load(handle)
    code = EXIT_LEFTOVERS
    try:
        _begin(int(orders["parent"]))
        code = run(orders)
    finally:
        is_clean = kill_descendants(os.getpid())
        with suppress(ChildProcessError):  # no zombie goes to whoever comes after us
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if (
            sys.exc_info()[0] is None
        ):  # at once: threads may still run, and nothing of theirs is worth waiting for
            os._exit(code if is_clean else EXIT_LEFTOVERS)


def main() -> None:
    """Exit as the command did (128 + N for signal N)."""
    keep(_run)


def _run(orders: dict[str, Any]) -> int:
    child = os.fork()
    if child == 0:
        _become(orders)
    for descriptor in (0, 1, 2):
        os.close(descriptor)
    ended, status = os.waitpid(-1, 0)
    while ended != child:  # an orphan that came to us
        ended, status = os.waitpid(-1, 0)
    code = os.waitstatus_to_exitcode(status)
    return 128 - code if code < 0 else code


def _become(orders: dict[str, Any]) -> None:
    try:
        os.setpgid(0, 0)
        os.chdir(orders["cwd"])
        limit(orders["limits"])
        if "user" in orders:
            become_user(orders["user"])
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        os.execve(orders["argv"][0], orders["argv"], orders["env"])  # noqa: S606  it becomes the command
    except BaseException as error:  # noqa: BLE001  whatever it is, it must not go on as a copy of its parent
        os.write(2, f"{error}\n".encode())
        os._exit(_EXIT_NOT_STARTED)
