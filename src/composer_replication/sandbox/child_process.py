"""What a process around one command does for itself: it dies with us, collects orphans, gives up privileges.

It is started anew for each command, so this imports little.
"""

from __future__ import annotations

import ctypes
import os
import select
import struct
import threading
from contextlib import suppress

from composer_replication.sandbox.process_tree import kill_descendants

EXIT_KILLED, EXIT_LEFTOVERS = 137, 70
_PR_CAPBSET_DROP, _PR_SET_CHILD_SUBREAPER = 24, 36
_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 38, 22, 2
_STEP_BYTES = 8


def begin(parent: int) -> None:
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


def collect_ended() -> None:
    """Take the exit codes of what is dead, so that no zombie goes to whoever comes after us."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def drop_bounding_set() -> None:
    """No program that is started gets a capability from its file."""
    library = ctypes.CDLL(None)
    for number in range(64):
        if library.prctl(_PR_CAPBSET_DROP, number, 0, 0, 0) != 0:
            break


def refuse_calls(program: bytes) -> None:
    """Gain no privileges any more, and have system calls refused: this thread, and what it starts.

    Args:
        program: of ``syscall_filter``; empty on a machine whose numbers we do not know.

    Raises:
        OSError: the kernel does not take it.
    """
    library = ctypes.CDLL(None, use_errno=True)
    if library.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "no_new_privs cannot be set")
    if not program:
        return
    steps = ctypes.create_string_buffer(program, len(program))
    whole = struct.pack("HxxxxxxP", len(program) // _STEP_BYTES, ctypes.addressof(steps))
    if library.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.create_string_buffer(whole), 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "system calls cannot be refused")


def become_user(uid: int) -> None:
    """As root: another user for good, with no other group and no way back.

    Raises:
        OSError: the kernel does not allow it.
    """
    from composer_replication.sandbox.syscall_filter import filter_program

    drop_bounding_set()
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    refuse_calls(filter_program())
