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
from collections.abc import Sequence

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

_MACHINES = ("x86_64", "aarch64")
_ARCHITECTURES = (0xC000003E, 0xC00000B7)  # of the kernel's audit
# By name: the number on each machine; None where it has no such call.
_Calls = dict[str, tuple[int | None, int | None]]
_REFUSED: _Calls = {
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272),
    "pivot_root": (155, 41), "mount": (165, 40), "umount2": (166, 39), "swapon": (167, 224), "swapoff": (168, 225),
    "unshare": (272, 97), "setns": (308, 268), "acct": (163, 89), "reboot": (169, 142), "iopl": (172, None),
    "ioperm": (173, None), "init_module": (175, 105), "delete_module": (176, 106), "quotactl": (179, 60),
    "kexec_load": (246, 104), "finit_module": (313, 273), "kexec_file_load": (320, 294), "add_key": (248, 217),
    "request_key": (249, 218), "keyctl": (250, 219), "perf_event_open": (298, 241), "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265), "bpf": (321, 280), "userfaultfd": (323, 282), "shmget": (29, 194),
    "shmat": (30, 196), "shmctl": (31, 195), "semget": (64, 190), "semop": (65, 193), "semctl": (66, 191),
    "msgget": (68, 186), "msgsnd": (69, 189), "msgrcv": (70, 188), "msgctl": (71, 187), "semtimedop": (220, 192),
    "mq_open": (240, 180), "ioprio_set": (251, 30), "fanotify_init": (300, 262),  # what the first two leave outlives the process
}  # fmt: skip
# io_uring_*, open_tree … fspick, pidfd_getfd, mount_setattr, memfd_secret: one number everywhere
_REFUSED_EVERYWHERE = (425, 426, 427, 428, 429, 430, 431, 432, 433, 438, 442, 447)
# A set of rules keeps every file that it names, deleted or not, and shows none of them; programs do without.
_LANDLOCK = (444, 445, 446)  # landlock_create_ruleset, _add_rule, _restrict_self: one number everywhere
# A thread that waits in one of these keeps a file that nobody shows once another thread has closed it. Whoever
# calls them does without where they do not fit. With vmsplice each piece of a pipe keeps a whole huge page.
_COPIES: _Calls = {"sendfile": (40, 71), "splice": (275, 76), "vmsplice": (278, 75)}
_WAIT_FOR_LOCK_OF_DESCRIPTION = 38  # F_OFD_SETLKW: two can do so for each other
# Data sent without a copy keep whole huge pages, too, of which the queue of the socket counts the bytes sent.
_OF_ANY_SOCKET, _WITHOUT_COPY = 1, 60  # SOL_SOCKET, SO_ZEROCOPY
_CLONE3 = 435  # its flags are behind a pointer; the C library falls back to clone
_OTHERS: _Calls = {
    "clone": (56, 220), "socket": (41, 198), "fcntl": (72, 25), "setsockopt": (54, 208), "ioctl": (16, 29),
    "setpriority": (141, 140), "sendto": (44, 206), "sendmmsg": (307, 269), "sendmsg": (46, 211),
    "chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452),
    "io_setup": (206, 0),  # its places are the machine's, for all users together; programs do without
}  # fmt: skip
# Their first argument says whose settings they change.
_OF_A_PROCESS: _Calls = {
    "prlimit64": (302, 261), "sched_setaffinity": (203, 122), "sched_setscheduler": (144, 119),
    "sched_setparam": (142, 118), "sched_setattr": (314, 274),
}  # fmt: skip
# What a jail without namespaces shares with every process of its user.
_REFUSED_AMONG_EQUALS: _Calls = {
    "mq_open": (240, 180), "mq_unlink": (241, 181), "ioprio_set": (251, 30), "migrate_pages": (256, 238),
    "move_pages": (279, 239), "fanotify_init": (300, 262), "kcmp": (312, 272), "open_tree": (428, 428),
    "process_madvise": (440, 440), "mount_setattr": (442, 442), "memfd_secret": (447, 447),
}  # fmt: skip
# Of files outside, too.
_SET_ATTRIBUTE: _Calls = {
    "setxattr": (188, 5), "lsetxattr": (189, 6), "fsetxattr": (190, 7), "removexattr": (197, 14),
    "lremovexattr": (198, 15), "fremovexattr": (199, 16), "setxattrat": (463, 463), "removexattrat": (466, 466),
    "file_setattr": (469, 469),
}  # fmt: skip
# C libraries use utimensat, which is answered for the command (``file_changes``).
_SET_TIMES: _Calls = {"utime": (132, None), "utimes": (235, None), "futimesat": (261, None)}
_SET_USER_ID = 0o4000
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
    """Steps of which one part runs where an argument (its lower half) is one of ``values``, else the other; both end in a return."""
    over = len(values) - 1 + len(if_none) // _STEP_BYTES
    tests = [_step(test, value, over - place) for place, value in enumerate(values)]
    return (
        _step(_LOAD, _OFFSET_FIRST_ARGUMENT + _ARGUMENT_BYTES * argument) + b"".join(tests) + if_none + if_one
    )


def _bits(argument: int, bits: int, if_any: bytes, if_none: bytes) -> bytes:
    return _when(argument, [bits], if_any, if_none, _JUMP_ANY_BIT)


class _Rules:
    """The rules of one machine, in the order in which they are asked."""

    def __init__(self, machine: str | None) -> None:
        self._at = _MACHINES.index(machine or os.uname().machine)
        self.steps = (
            _step(_LOAD, _OFFSET_ARCH)
            + _step(_JUMP_EQUAL, _ARCHITECTURES[self._at], 1, 0)
            + _fail(errno.ENOSYS)  # 32-bit programs have other numbers
            + _step(_LOAD, _OFFSET_NUMBER)
            + _step(_JUMP_AT_LEAST, _X32_BIT, 0, 1)
            + _fail(errno.ENOSYS)
        )

    def add(self, calls: str | _Calls | Sequence[int], steps: bytes) -> None:
        """For these calls alone (by names with spaces between, by a table, by number), steps that end in a return."""
        table = {name: _OTHERS[name] for name in calls.split()} if isinstance(calls, str) else calls
        numbers = [each[self._at] for each in table.values()] if isinstance(table, dict) else list(table)
        for number in numbers:
            if number is not None:
                self.steps += _step(_JUMP_EQUAL, number, 0, len(steps) // _STEP_BYTES) + steps

    def add_of_every_jail(self) -> None:
        """User namespaces, and what hides files or memory from the watch: copies, locks, lent memory, threads with own files."""
        own_files = _bits(0, _CLONE_FILES, _ALLOW, _fail())
        lent = _when(2, [_WITHOUT_COPY], _fail(errno.ENOPROTOOPT), _ALLOW)  # what a kernel without it says
        new_thread = _bits(0, _CLONE_THREAD, own_files, _ALLOW)
        self.add("io_setup", _fail(errno.ENOSYS))
        self.add([_CLONE3], _fail(errno.ENOSYS))
        self.add(_COPIES, _fail(errno.EINVAL))
        self.add("fcntl", _when(1, [_WAIT_FOR_LOCK_OF_DESCRIPTION], _fail(errno.EINVAL), _ALLOW))
        self.add("setsockopt", _when(1, [_OF_ANY_SOCKET], lent, _ALLOW))
        self.add("clone", _bits(0, _CLONE_NEW_USER, _fail(), new_thread))
        self.add([_CLOSE_RANGE], _bits(2, _CLOSE_RANGE_UNSHARE, _fail(), _ALLOW))


def filter_program(machine: str | None = None) -> bytes:
    """The filter for ``machine`` (default: this one); empty for a machine we do not know."""
    if (machine or os.uname().machine) not in _MACHINES:
        return b""
    rules = _Rules(machine)
    rules.add(_REFUSED, _fail())
    rules.add(_REFUSED_EVERYWHERE, _fail())
    rules.add(_LANDLOCK, _fail(errno.ENOSYS))
    rules.add("ioctl", _when(1, _SET_VERSION, _fail(errno.ENOTSUP), _ALLOW))
    rules.add_of_every_jail()
    # What keeps the jail must get a processor when it is to end it. All of a group or of a user may be it, too.
    rules.add(_OF_A_PROCESS, _when(0, [_FIRST_PROCESS], _fail(), _ALLOW))
    others = _when(1, [_FIRST_PROCESS], _fail(), _ALLOW)
    rules.add("setpriority", _when(0, [_PRIO_PROCESS], others, _fail()))
    rules.add("socket", _when(0, _ALLOWED_FAMILIES, _ALLOW, _fail(errno.EAFNOSUPPORT)))
    return rules.steps + _ALLOW


def filter_among_equals(machine: str | None = None) -> bytes:
    """A filter for a jail that keeps its user id and has no namespaces; empty for a machine we do not know.

    It refuses to set the limits, priority, scheduler or processors of any process but the caller;
    message queues, which such a jail would share with the host and with the next command; and ways to connect
    that are no ``connect`` of TCP or UDP: other protocols (multipath TCP, SCTP), and data sent with the opening;
    threads whose open files their process does not show; memory lent to pipes and sockets. Extended attributes are not
    supported, as on many file systems, and neither are inode flags: Landlock would not keep them to the tree. No file
    gets the set-user-id bit: it might be anybody's who we are.
    """
    if (machine or os.uname().machine) not in _MACHINES:
        return b""
    rules = _Rules(machine)
    rules.add(_REFUSED_AMONG_EQUALS, _fail())
    rules.add(_SET_ATTRIBUTE, _fail(errno.ENOTSUP))
    rules.add(_SET_TIMES, _fail(errno.ENOSYS))
    rules.add("chmod fchmod", _bits(1, _SET_USER_ID, _fail(), _ALLOW))
    rules.add("fchmodat fchmodat2", _bits(2, _SET_USER_ID, _fail(), _ALLOW))
    rules.add("ioctl", _when(1, _SET_FLAGS, _fail(errno.ENOTSUP), _ALLOW))
    rules.add_of_every_jail()
    oneself = _when(1, [0], _ALLOW, _fail())
    rules.add(_OF_A_PROCESS, _when(0, [0], _ALLOW, _fail()))
    rules.add("setpriority", _when(0, [_PRIO_PROCESS], oneself, _fail()))
    rules.add("sendto sendmmsg", _bits(3, _MSG_FASTOPEN, _fail(), _ALLOW))
    rules.add("sendmsg", _bits(2, _MSG_FASTOPEN, _fail(), _ALLOW))
    # Of other families the jail itself decides.
    usual = _when(2, _PROTOCOLS, _ALLOW, _fail(errno.EPROTONOSUPPORT))
    rules.add("socket", _when(0, _INTERNET, usual, _ALLOW))
    return rules.steps + _ALLOW
