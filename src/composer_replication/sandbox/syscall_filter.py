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

_LOAD, _JUMP_EQUAL, _JUMP_AT_LEAST, _JUMP_ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW = 0x7FFF0000
_FAIL = 0x00050000
_OFFSET_NUMBER, _OFFSET_ARCH, _OFFSET_FIRST_ARGUMENT = 0, 4, 16
_OFFSET_SECOND_ARGUMENT, _OFFSET_THIRD_ARGUMENT, _OFFSET_FOURTH_ARGUMENT = 24, 32, 40
_CLONE_NEW_USER = 0x10000000
_CLONE_FILES, _CLONE_THREAD = 0x400, 0x10000
_CLOSE_RANGE, _CLOSE_RANGE_UNSHARE = 436, 2  # one number everywhere
_X32_BIT = 0x40000000
_ALLOWED_FAMILIES = (1, 2, 10, 16)  # unix, inet, inet6, netlink
_INET, _INET6 = 2, 10
_PROTOCOLS = (
    0,
    6,
    17,
    1,
    58,
)  # the usual one, TCP, UDP, ICMP; a network that is closed by hand knows no others
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
_SET_ATTRIBUTE_EVERYWHERE = (463, 466, 469)  # setxattrat, removexattrat, file_setattr
# Those whose second argument is a mode (chmod, fchmod), and whose third is (fchmodat, fchmodat2).
_SET_MODE = {"x86_64": ((90, 91), (268, 452)), "aarch64": ((52,), (53, 452))}
_SET_USER_ID = 0o4000
_IOCTL = {"x86_64": 16, "aarch64": 29}
# FS_IOC_SETFLAGS, FS_IOC32_SETFLAGS, FS_IOC_FSSETXATTR, FS_IOC_SETVERSION, FS_IOC32_SETVERSION
_SET_FLAGS = (0x40086602, 0x40046602, 0x401C5820, 0x40087602, 0x40047602)
_SET_VERSION = (0x40087602, 0x40047602)
_FIRST_PROCESS = 1


def _step(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("<HBBI", code, if_true, if_false, value)


def _refuse(number: int, why: int = errno.EPERM) -> bytes:
    return _step(_JUMP_EQUAL, number, 0, 1) + _step(_RETURN, _FAIL | why)


def filter_program(machine: str | None = None) -> bytes:
    """The filter for ``machine`` (default: this one); empty for a machine we do not know."""
    known = _MACHINES.get(machine or os.uname().machine)
    if known is None:
        return b""
    architecture, clone, socket, refused = known
    set_priority, _, _, of_one_process, _ = _AMONG_EQUALS[machine or os.uname().machine]
    program = [
        _step(_LOAD, _OFFSET_ARCH),
        _step(_JUMP_EQUAL, architecture, 1, 0),
        _step(_RETURN, _FAIL | errno.ENOSYS),  # 32-bit programs have other numbers
        _step(_LOAD, _OFFSET_NUMBER),
        _step(_JUMP_AT_LEAST, _X32_BIT, 0, 1),
        _step(_RETURN, _FAIL | errno.ENOSYS),
        *(_refuse(number) for number in (*refused, *_REFUSED_EVERYWHERE)),
        *(_refuse(number, errno.ENOSYS) for number in _LANDLOCK),
        _refuse(_ASYNCHRONOUS_IO[machine or os.uname().machine], errno.ENOSYS),
        _without_requests(_IOCTL[machine or os.uname().machine], _SET_VERSION),
        _without_waits_that_keep_files(machine),
        _without_memory_that_is_lent(machine),
        _without_own_tables(clone),
        # What keeps the jail must get a processor when it is to end it. All of a group or of a user may be it, too.
        *(_only_others(number) for number in of_one_process),
        _of_one_process(set_priority, _step(_JUMP_EQUAL, _FIRST_PROCESS, 0, 1)),
        _step(_JUMP_EQUAL, socket, 0, 3 + len(_ALLOWED_FAMILIES)),
        _step(_LOAD, _OFFSET_FIRST_ARGUMENT),
        *(
            _step(_JUMP_EQUAL, family, len(_ALLOWED_FAMILIES) - place)
            for place, family in enumerate(_ALLOWED_FAMILIES)
        ),
        _step(_RETURN, _FAIL | errno.EAFNOSUPPORT),
        _step(_RETURN, _ALLOW),
        _step(_RETURN, _ALLOW),
    ]
    return b"".join(program)


def filter_among_equals(machine: str | None = None) -> bytes:
    """A filter for a jail that keeps its user id and has no namespaces; empty for a machine we do not know.

    It refuses to set the limits, priority, scheduler or processors of any process but the caller;
    message queues, which such a jail would share with the host and with the next command; and ways to connect
    that are no ``connect`` of TCP or UDP: other protocols (multipath TCP, SCTP), and data sent with the opening;
    threads whose open files their process does not show; memory lent to pipes and sockets. Extended attributes are not supported, as on many file
    systems, and neither are inode flags: Landlock would not keep them to the tree. No file gets the set-user-id bit: it might be anybody's who we are.
    """
    known = _AMONG_EQUALS.get(machine or os.uname().machine)
    if known is None:
        return b""
    set_priority, (send_to, send_many), send_message, of_oneself, refused = known
    architecture, clone, socket, _ = _MACHINES[machine or os.uname().machine]
    by_second, by_third = _SET_MODE[machine or os.uname().machine]
    program = [
        _step(_LOAD, _OFFSET_ARCH),
        _step(_JUMP_EQUAL, architecture, 1, 0),
        _step(_RETURN, _FAIL | errno.ENOSYS),
        _step(_LOAD, _OFFSET_NUMBER),
        _step(_JUMP_AT_LEAST, _X32_BIT, 0, 1),
        _step(_RETURN, _FAIL | errno.ENOSYS),
        *(_refuse(number) for number in (*refused, *_REFUSED_AMONG_EQUALS)),
        *(_refuse(number, errno.ENOTSUP) for number in _SET_ATTRIBUTE[machine or os.uname().machine]),
        *(_refuse(number, errno.ENOTSUP) for number in _SET_ATTRIBUTE_EVERYWHERE),
        *(_without_bits(number, _OFFSET_SECOND_ARGUMENT, _SET_USER_ID) for number in by_second),
        *(_without_bits(number, _OFFSET_THIRD_ARGUMENT, _SET_USER_ID) for number in by_third),
        _refuse(_ASYNCHRONOUS_IO[machine or os.uname().machine], errno.ENOSYS),
        _without_requests(_IOCTL[machine or os.uname().machine], _SET_FLAGS),
        *(_only_oneself(number) for number in of_oneself),
        _without_bits(send_to, _OFFSET_FOURTH_ARGUMENT, _MSG_FASTOPEN),
        _without_bits(send_many, _OFFSET_FOURTH_ARGUMENT, _MSG_FASTOPEN),
        _without_bits(send_message, _OFFSET_THIRD_ARGUMENT, _MSG_FASTOPEN),
        _without_waits_that_keep_files(machine),
        _without_memory_that_is_lent(machine),
        _without_own_tables(clone),
        _of_one_process(set_priority, _step(_JUMP_EQUAL, 0, 1, 0)),
        # socket(AF_INET or AF_INET6, …, a usual protocol); of other families the jail itself decides
        _step(_JUMP_EQUAL, socket, 0, 5 + len(_PROTOCOLS)),
        _step(_LOAD, _OFFSET_FIRST_ARGUMENT),
        _step(_JUMP_EQUAL, _INET, 1, 0),
        _step(_JUMP_EQUAL, _INET6, 0, 2 + len(_PROTOCOLS)),
        _step(_LOAD, _OFFSET_THIRD_ARGUMENT),
        *(_step(_JUMP_EQUAL, protocol, len(_PROTOCOLS) - place) for place, protocol in enumerate(_PROTOCOLS)),
        _step(_RETURN, _FAIL | errno.EPROTONOSUPPORT),
        _step(_RETURN, _ALLOW),
    ]
    return b"".join(program)


def _without_own_tables(clone: int) -> bytes:
    """No user namespace by ``clone``, and no thread with open files of its own: those of its process are counted."""
    return (
        _refuse(_CLONE3, errno.ENOSYS)
        + _step(_JUMP_EQUAL, clone, 0, 6)
        + _step(_LOAD, _OFFSET_FIRST_ARGUMENT)
        + _step(_JUMP_ANY_BIT, _CLONE_NEW_USER, 2, 0)
        + _step(_JUMP_ANY_BIT, _CLONE_THREAD, 0, 2)
        + _step(_JUMP_ANY_BIT, _CLONE_FILES, 1, 0)
        + _step(_RETURN, _FAIL | errno.EPERM)
        + _step(_RETURN, _ALLOW)
        + _step(_JUMP_EQUAL, _CLOSE_RANGE, 0, 4)
        + _step(_LOAD, _OFFSET_THIRD_ARGUMENT)
        + _step(_JUMP_ANY_BIT, _CLOSE_RANGE_UNSHARE, 0, 1)
        + _step(_RETURN, _FAIL | errno.EPERM)
        + _step(_RETURN, _ALLOW)
    )


def _without_waits_that_keep_files(machine: str | None) -> bytes:
    name = machine or os.uname().machine
    return b"".join(_refuse(number, errno.EINVAL) for number in _COPIES[name]) + _without_requests(
        _FCNTL[name], (_WAIT_FOR_LOCK_OF_DESCRIPTION,), errno.EINVAL
    )


def _without_memory_that_is_lent(machine: str | None) -> bytes:
    return (
        _step(_JUMP_EQUAL, _SET_SOCKET_OPTION[machine or os.uname().machine], 0, 6)
        + _step(_LOAD, _OFFSET_SECOND_ARGUMENT)
        + _step(_JUMP_EQUAL, _OF_ANY_SOCKET, 0, 3)
        + _step(_LOAD, _OFFSET_THIRD_ARGUMENT)
        + _step(_JUMP_EQUAL, _WITHOUT_COPY, 0, 1)
        + _step(_RETURN, _FAIL | errno.ENOPROTOOPT)  # what a kernel without it says
        + _step(_RETURN, _ALLOW)
    )


def _of_one_process(set_priority: int, decide: bytes) -> bytes:
    """``setpriority(PRIO_PROCESS, who, …)`` alone; ``decide`` jumps over the next step where ``who`` is allowed."""
    return (
        _step(_JUMP_EQUAL, set_priority, 0, 6)
        + _step(_LOAD, _OFFSET_FIRST_ARGUMENT)
        + _step(_JUMP_EQUAL, 0, 0, 2)
        + _step(_LOAD, _OFFSET_SECOND_ARGUMENT)
        + decide
        + _step(_RETURN, _FAIL | errno.EPERM)
        + _step(_RETURN, _ALLOW)
    )


def _only_others(number: int) -> bytes:
    """Of a call whose first argument is a process: any but the first."""
    return (
        _step(_JUMP_EQUAL, number, 0, 4)
        + _step(_LOAD, _OFFSET_FIRST_ARGUMENT)
        + _step(_JUMP_EQUAL, _FIRST_PROCESS, 0, 1)
        + _step(_RETURN, _FAIL | errno.EPERM)
        + _step(_RETURN, _ALLOW)
    )


def _only_oneself(number: int) -> bytes:
    return (
        _step(_JUMP_EQUAL, number, 0, 4)
        + _step(_LOAD, _OFFSET_FIRST_ARGUMENT)
        + _step(_JUMP_EQUAL, 0, 1, 0)
        + _step(_RETURN, _FAIL | errno.EPERM)
        + _step(_RETURN, _ALLOW)
    )


def _without_bits(number: int, offset_of_argument: int, bits: int) -> bytes:
    return (
        _step(_JUMP_EQUAL, number, 0, 4)
        + _step(_LOAD, offset_of_argument)
        + _step(_JUMP_ANY_BIT, bits, 0, 1)
        + _step(_RETURN, _FAIL | errno.EPERM)
        + _step(_RETURN, _ALLOW)
    )


def _without_requests(number: int, refused: tuple[int, ...], why: int = errno.ENOTSUP) -> bytes:
    """Of a call whose second argument says what is asked."""
    return (
        _step(_JUMP_EQUAL, number, 0, 3 + len(refused))
        + _step(_LOAD, _OFFSET_SECOND_ARGUMENT)
        + b"".join(_step(_JUMP_EQUAL, request, len(refused) - place) for place, request in enumerate(refused))
        + _step(_RETURN, _ALLOW)
        + _step(_RETURN, _FAIL | why)
    )
