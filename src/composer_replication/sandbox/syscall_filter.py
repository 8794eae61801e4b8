"""A seccomp filter as bytes, for a jail that is made of namespaces.

It refuses what could undo the jail or hide use of memory from it: new user
namespaces, mounts, tracing a neighbour, kernel keys, io_uring, System V memory,
message queues, Landlock's rules, copies between descriptors by the kernel, memory lent to pipes and sockets,
asynchronous input and output of the kernel, inode versions, settings of the first process, and address families
that network namespaces do not cover (vsock, kernel crypto).

Reference: Linux ``Documentation/userspace-api/seccomp_filter.rst``.
"""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Iterable, Sequence

_LOAD, _JUMP_EQUAL, _JUMP_AT_LEAST, _JUMP_ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_STEP_BYTES = 8
_OFFSET_NUMBER, _OFFSET_ARCH, _OFFSET_FIRST_ARGUMENT, _ARGUMENT_BYTES = 0, 4, 16, 8
_FAIL = 0x00050000
_CLONE_NEW_USER = 0x10000000
_CLONE_FILES, _CLONE_THREAD = 0x400, 0x10000
_CLOSE_RANGE, _CLOSE_RANGE_UNSHARE = 436, 2  # one number everywhere
_X32_BIT = 0x40000000
_ALLOWED_FAMILIES = (1, 2, 10, 16)  # unix, inet, inet6, netlink
_INTERNET = (2, 10)  # inet, inet6
_PROTOCOLS = (0, 6, 17, 1, 58)  # the usual one, TCP, UDP, ICMP; a network closed by hand knows no others
_MSG_FASTOPEN = 0x20000000

# io_uring_*, open_tree … fspick, pidfd_getfd, mount_setattr, memfd_secret: one number everywhere
_REFUSED_EVERYWHERE = (425, 426, 427, 428, 429, 430, 431, 432, 433, 438, 442, 447)
# A thread that waits in one of these keeps a file that nobody shows once another thread has closed it. Whoever
# calls them does without where they do not fit. With vmsplice each piece of a pipe keeps a whole huge page. The
# last waits for a lock, which two can do for each other.
_COPIES = {"x86_64": (40, 275, 278), "aarch64": (71, 76, 75)}  # sendfile, splice, vmsplice
_FCNTL = {"x86_64": 72, "aarch64": 25}
_WAIT_FOR_LOCK_OF_DESCRIPTION = 38  # F_OFD_SETLKW
# A set of rules keeps every file that it names, deleted or not, and shows none of them; programs do without.
_LANDLOCK = (444, 445, 446)  # landlock_create_ruleset, _add_rule, _restrict_self: one number everywhere
# Data sent without a copy keep whole huge pages, too, of which the queue of the socket counts the bytes sent.
_SET_SOCKET_OPTION = {"x86_64": 54, "aarch64": 208}
_OF_ANY_SOCKET, _WITHOUT_COPY = 1, 60  # SOL_SOCKET, SO_ZEROCOPY
# Its places are the machine's, for all users together; programs do without.
_ASYNCHRONOUS_IO = {"x86_64": 206, "aarch64": 0}  # io_setup
_CLONE3 = 435  # its flags are behind a pointer; the C library falls back to clone

# machine -> (audit architecture, clone, socket, refused numbers)
_MACHINES: dict[str, tuple[int, int, int, tuple[int, ...]]] = {
    "x86_64": (
        0xC000003E,
        56,
        41,
        (
            101, 310, 311, 312,  # ptrace, process_vm_readv, process_vm_writev, kcmp
            155, 165, 166, 167, 168, 272, 308,  # pivot_root, mount, umount2, swap*, unshare, setns
            163, 169, 172, 173, 175, 176, 179, 246, 313, 320,  # acct, reboot, io*, modules, quotactl, kexec
            248, 249, 250, 298, 303, 304, 321, 323,  # keys, perf, file handles, bpf, userfaultfd
            29, 30, 31, 64, 65, 66, 68, 69, 70, 71, 220,  # System V memory, semaphores, messages
            240, 251, 300,  # mq_open, ioprio_set: what they leave outlives the process; fanotify_init
        ),
    ),
    "aarch64": (
        0xC00000B7,
        220,
        198,
        (
            117, 270, 271, 272,
            41, 40, 39, 224, 225, 97, 268,
            89, 142, 105, 106, 60, 104, 273, 294,
            217, 218, 219, 241, 264, 265, 280, 282,
            186, 187, 188, 189, 190, 191, 192, 193, 194, 195, 196,
            180, 30, 262,
        ),
    ),
}  # fmt: skip


# What a jail without namespaces shares with every process of its user.
# machine -> (setpriority, (sendto, sendmmsg), sendmsg, those whose first argument must be 0 (oneself), refused)
_AMONG_EQUALS: dict[str, tuple[int, tuple[int, int], int, tuple[int, ...], tuple[int, ...]]] = {
    "x86_64": (
        141,
        (44, 307),
        46,
        (302, 203, 144, 142, 314),  # prlimit64, sched_setaffinity, _setscheduler, _setparam, _setattr
        # mq_open, mq_unlink, ioprio_set, migrate_pages, move_pages, fanotify_init, kcmp
        (240, 241, 251, 256, 279, 300, 312),
    ),
    "aarch64": (140, (206, 269), 211, (261, 122, 119, 118, 274), (180, 181, 30, 238, 239, 262, 272)),
}
_REFUSED_AMONG_EQUALS = (428, 440, 442, 447)
# open_tree, process_madvise, mount_setattr, memfd_secret: one number everywhere
# setxattr, lsetxattr, fsetxattr, removexattr, lremovexattr, fremovexattr: attributes of files outside, too
_SET_ATTRIBUTE = {"x86_64": (188, 189, 190, 197, 198, 199), "aarch64": (5, 6, 7, 14, 15, 16)}
# utime, utimes, futimesat: C libraries use utimensat, which is answered for the command (``file_changes``)
_SET_TIMES = {"x86_64": (132, 235, 261), "aarch64": ()}
_SET_ATTRIBUTE_EVERYWHERE = (463, 466, 469)  # setxattrat, removexattrat, file_setattr
# Those whose second argument is a mode (chmod, fchmod), and whose third is (fchmodat, fchmodat2).
_SET_MODE = {"x86_64": ((90, 91), (268, 452)), "aarch64": ((52,), (53, 452))}
_SET_USER_ID = 0o4000
_IOCTL = {"x86_64": 16, "aarch64": 29}
# FS_IOC_SETFLAGS, FS_IOC32_SETFLAGS, FS_IOC_FSSETXATTR, FS_IOC_SETVERSION, FS_IOC32_SETVERSION
_SET_FLAGS = (0x40086602, 0x40046602, 0x401C5820, 0x40087602, 0x40047602)
_SET_VERSION = (0x40087602, 0x40047602)
_FIRST_PROCESS, _PRIO_PROCESS = 1, 0


def _step(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("<HBBI", code, if_true, if_false, value)


def _fail(why: int = errno.EPERM) -> bytes:
    return _step(_RETURN, _FAIL | why)


_ALLOW = _step(_RETURN, 0x7FFF0000)


def _when(
    argument: int, values: Sequence[int], if_one: bytes, if_none: bytes, test: int = _JUMP_EQUAL
) -> bytes:
    """Steps of which one part runs where an argument (its lower half) is one of ``values``, else the other.

    Args:
        argument: from 0 on.
        values: that it is compared with.
        if_one: steps that end in a return.
        if_none: too.
        test: ``_JUMP_ANY_BIT`` for one that has a bit of a value.
    """
    over = len(values) - 1 + len(if_none) // _STEP_BYTES
    tests = [_step(test, value, over - place) for place, value in enumerate(values)]
    return (
        _step(_LOAD, _OFFSET_FIRST_ARGUMENT + _ARGUMENT_BYTES * argument) + b"".join(tests) + if_none + if_one
    )


def _bits(argument: int, bits: int, if_any: bytes, if_none: bytes) -> bytes:
    return _when(argument, [bits], if_any, if_none, _JUMP_ANY_BIT)


def _of(numbers: Iterable[int], steps: bytes) -> bytes:
    """Steps for these calls alone, which end in a return; any other call goes on behind them."""
    return b"".join(_step(_JUMP_EQUAL, number, 0, len(steps) // _STEP_BYTES) + steps for number in numbers)


def _start(name: str) -> bytes:
    """32-bit programs have other numbers (ENOSYS); then the number of the call is loaded."""
    return (
        _step(_LOAD, _OFFSET_ARCH)
        + _step(_JUMP_EQUAL, _MACHINES[name][0], 1, 0)
        + _fail(errno.ENOSYS)
        + _step(_LOAD, _OFFSET_NUMBER)
        + _step(_JUMP_AT_LEAST, _X32_BIT, 0, 1)
        + _fail(errno.ENOSYS)
    )


def _of_every_jail(name: str) -> bytes:
    """User namespaces, and what hides files or memory from the watch: copies, locks, lent memory, threads with own files."""
    own_files = _bits(0, _CLONE_FILES, _ALLOW, _fail())
    lent = _when(2, [_WITHOUT_COPY], _fail(errno.ENOPROTOOPT), _ALLOW)  # what a kernel without it says
    return (
        _of([_ASYNCHRONOUS_IO[name], _CLONE3], _fail(errno.ENOSYS))
        + _of(_COPIES[name], _fail(errno.EINVAL))
        + _of([_FCNTL[name]], _when(1, [_WAIT_FOR_LOCK_OF_DESCRIPTION], _fail(errno.EINVAL), _ALLOW))
        + _of([_SET_SOCKET_OPTION[name]], _when(1, [_OF_ANY_SOCKET], lent, _ALLOW))
        + _of(
            [_MACHINES[name][1]],
            _bits(0, _CLONE_NEW_USER, _fail(), _bits(0, _CLONE_THREAD, own_files, _ALLOW)),
        )
        + _of([_CLOSE_RANGE], _bits(2, _CLOSE_RANGE_UNSHARE, _fail(), _ALLOW))
    )


def filter_program(machine: str | None = None) -> bytes:
    """The filter for ``machine`` (default: this one); empty for a machine we do not know."""
    name = machine or os.uname().machine
    if name not in _MACHINES:
        return b""
    _, _, socket, refused = _MACHINES[name]
    set_priority, _, _, of_one_process, _ = _AMONG_EQUALS[name]
    # What keeps the jail must get a processor when it is to end it. All of a group or of a user may be it, too.
    others = _when(1, [_FIRST_PROCESS], _fail(), _ALLOW)
    return (
        _start(name)
        + _of((*refused, *_REFUSED_EVERYWHERE), _fail())
        + _of(_LANDLOCK, _fail(errno.ENOSYS))
        + _of([_IOCTL[name]], _when(1, _SET_VERSION, _fail(errno.ENOTSUP), _ALLOW))
        + _of_every_jail(name)
        + _of(of_one_process, _when(0, [_FIRST_PROCESS], _fail(), _ALLOW))
        + _of([set_priority], _when(0, [_PRIO_PROCESS], others, _fail()))
        + _of([socket], _when(0, _ALLOWED_FAMILIES, _ALLOW, _fail(errno.EAFNOSUPPORT)))
        + _ALLOW
    )


def filter_among_equals(machine: str | None = None) -> bytes:
    """A filter for a jail that keeps its user id and has no namespaces; empty for a machine we do not know.

    It refuses to set the limits, priority, scheduler or processors of any process but the caller;
    message queues, which such a jail would share with the host and with the next command; and ways to connect
    that are no ``connect`` of TCP or UDP: other protocols (multipath TCP, SCTP), and data sent with the opening;
    threads whose open files their process does not show; memory lent to pipes and sockets. Extended attributes are not
    supported, as on many file systems, and neither are inode flags: Landlock would not keep them to the tree. No file
    gets the set-user-id bit: it might be anybody's who we are.
    """
    name = machine or os.uname().machine
    if name not in _MACHINES:
        return b""
    set_priority, send, send_message, of_oneself, refused = _AMONG_EQUALS[name]
    by_second, by_third = _SET_MODE[name]
    oneself = _when(1, [0], _ALLOW, _fail())
    usual = _when(2, _PROTOCOLS, _ALLOW, _fail(errno.EPROTONOSUPPORT))
    return (
        _start(name)
        + _of((*refused, *_REFUSED_AMONG_EQUALS), _fail())
        + _of((*_SET_ATTRIBUTE[name], *_SET_ATTRIBUTE_EVERYWHERE), _fail(errno.ENOTSUP))
        + _of(_SET_TIMES[name], _fail(errno.ENOSYS))
        + _of(by_second, _bits(1, _SET_USER_ID, _fail(), _ALLOW))
        + _of(by_third, _bits(2, _SET_USER_ID, _fail(), _ALLOW))
        + _of([_IOCTL[name]], _when(1, _SET_FLAGS, _fail(errno.ENOTSUP), _ALLOW))
        + _of_every_jail(name)
        + _of(of_oneself, _when(0, [0], _ALLOW, _fail()))
        + _of([set_priority], _when(0, [_PRIO_PROCESS], oneself, _fail()))
        + _of(send, _bits(3, _MSG_FASTOPEN, _fail(), _ALLOW))
        + _of([send_message], _bits(2, _MSG_FASTOPEN, _fail(), _ALLOW))
        # Of other families the jail itself decides.
        + _of([_MACHINES[name][2]], _when(0, _INTERNET, usual, _ALLOW))
        + _ALLOW
    )
