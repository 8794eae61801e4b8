"""The filter is run here by a small interpreter of the same instruction set, for both machines."""

from __future__ import annotations

import errno
import struct
from collections.abc import Callable, Sequence

import pytest

from composer_replication.sandbox.syscall_filter import filter_among_equals, filter_program

ALLOW = 0x7FFF0000
ARCHITECTURE = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
# The number of each call on either machine; None where it has no such call.
NUMBERS: dict[str, tuple[int | None, int | None]] = {
    "read": (0, 63), "execve": (59, 221), "openat": (257, 56), "kill": (62, 129), "chmod": (90, None),
    "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452),
    "ptrace": (101, 117), "mount": (165, 40), "unshare": (272, 97), "keyctl": (250, 219), "shmget": (29, 194),
    "process_vm_readv": (310, 270), "bpf": (321, 280), "mq_open": (240, 180), "mq_unlink": (241, 181),
    "ioprio_set": (251, 30), "fanotify_init": (300, 262), "kcmp": (312, 272), "io_uring_setup": (425, 425),
    "open_tree": (428, 428), "fspick": (433, 433), "pidfd_getfd": (438, 438), "mount_setattr": (442, 442),
    "landlock_create_ruleset": (444, 444), "landlock_add_rule": (445, 445), "landlock_restrict_self": (446, 446),
    "sendfile": (40, 71), "splice": (275, 76), "vmsplice": (278, 75), "fcntl": (72, 25), "io_setup": (206, 0),
    "prlimit64": (302, 261), "sched_setaffinity": (203, 122), "sched_setscheduler": (144, 119),
    "sched_setparam": (142, 118), "sched_setattr": (314, 274), "setpriority": (141, 140), "getpriority": (140, 141),
    "setsockopt": (54, 208), "socket": (41, 198), "sendto": (44, 206), "sendmsg": (46, 211), "sendmmsg": (307, 269),
    "clone": (56, 220), "clone3": (435, 435), "close_range": (436, 436), "ioctl": (16, 29),
    "setxattr": (188, 5), "lsetxattr": (189, 6), "fsetxattr": (190, 7), "fremovexattr": (199, 16),
    "setxattrat": (463, 463), "utime": (132, None), "utimes": (235, None), "futimesat": (261, None),
}  # fmt: skip
SETTINGS = "prlimit64 sched_setaffinity sched_setscheduler"
VERSIONS, FLAGS, OTHER_REQUEST = (0x40087602, 0x40047602), (0x40086602, 0x40046602, 0x401C5820), 0x5401
THREAD, SHARED_FILES = 0x10900, 0x400
Row = tuple[str, Sequence[tuple[int, ...]], int]
"""Calls, arguments of each, and the error that they are refused with; 0 where they are allowed."""
IN_BOTH: list[Row] = [
    # no call waits with a file that another thread may close
    ("sendfile splice vmsplice", [()], errno.EINVAL),
    ("fcntl", [(3, 38)], errno.EINVAL),
    ("fcntl", [(3, command) for command in (1, 6, 7, 36, 37, 1030)], 0),
    # no memory is lent to a socket, and no place of the machine used up
    ("setsockopt", [(1, 1, 60)], errno.ENOPROTOOPT),
    ("setsockopt", [(1, 1, 7), (1, 6, 60), (60, 1, 1)], 0),
    ("io_setup", [(128,)], errno.ENOSYS),
    # a thread shares the files of its process, and takes no table of its own by closing some
    ("clone", [(THREAD | SHARED_FILES,)], 0),
    ("clone", [(THREAD,)], errno.EPERM),
    ("clone3", [()], errno.ENOSYS),
    ("close_range", [(3, 9, 4)], 0),
    ("close_range", [(3, 9, 2), (3, 9, 6)], errno.EPERM),
]
IN_A_JAIL: list[Row] = [
    *IN_BOTH,
    ("read execve openat", [()], 0),
    ("ptrace mount unshare keyctl shmget process_vm_readv bpf mq_open ioprio_set fanotify_init", [()], errno.EPERM),
    ("io_uring_setup open_tree fspick pidfd_getfd mount_setattr", [()], errno.EPERM),
    # rules of Landlock would keep files
    ("landlock_create_ruleset landlock_add_rule landlock_restrict_self", [()], errno.ENOSYS),
    # settings and the priority of any but the first process
    (f"{SETTINGS} sched_setparam sched_setattr", [(0,), (2,), (4242,)], 0),
    (f"{SETTINGS} sched_setparam sched_setattr", [(1,)], errno.EPERM),
    ("setpriority", [(0, 0), (0, 2)], 0),
    ("setpriority", [(0, 1), (1, 0), (1, 1), (2, 0)], errno.EPERM),
    ("getpriority", [(0, 0), (0, 2), (0, 1), (1, 0), (1, 1), (2, 0)], 0),
    ("ioctl", [(3, request) for request in VERSIONS], errno.ENOTSUP),
    ("ioctl", [(3, 0x80087601), (3, FLAGS[0]), (3, OTHER_REQUEST)], 0),
    # a process may be made but no user namespace
    ("clone", [(0x11,)], 0),
    ("clone", [(0x10000011,)], errno.EPERM),
    # families of sockets that stay in the network namespace
    ("socket", [(1,), (2,), (10,), (16,)], 0),
    ("socket", [(0,), (17,), (38,), (40,), (44,)], errno.EAFNOSUPPORT),
]  # fmt: skip
AMONG_EQUALS: list[Row] = [
    *IN_BOTH,
    ("kill chmod", [(4242,)], 0),
    ("mq_open mq_unlink ioprio_set fanotify_init kcmp", [()], errno.EPERM),
    # protocols of the internet; of other families the jail decides
    ("socket", [(family, 1, number) for family in (2, 10) for number in (0, 6, 17, 1, 58)], 0),
    ("socket", [(family, 1, number) for family in (2, 10) for number in (262, 132, 33)], errno.EPROTONOSUPPORT),
    ("socket", [(1, 1, 0), (16, 1, 4), (16, 1, 262)], 0),
    # no data goes with the opening of a connection
    ("sendto", [(5, 0, 1, 0x20000000)], errno.EPERM),
    ("sendmmsg", [(5, 0, 1, 0x20004000)], errno.EPERM),
    ("sendmsg", [(5, 0, 0x20000000)], errno.EPERM),
    ("sendto sendmmsg", [(5, 0, 1, 0x4000)], 0),
    ("sendmsg", [(5, 0, 0x4000)], 0),
    # no file gets the set-user-id bit, no time but by the newest call, no attribute and no flag
    ("fchmod", [(0o4000, 0o4755)], errno.EPERM),
    ("fchmod", [(0o4000, 0o2755)], 0),
    ("fchmodat fchmodat2", [(0o4000, 0o4000, 0o4755)], errno.EPERM),
    ("fchmodat fchmodat2", [(0o4000, 0o4000, 0o2755)], 0),
    ("utime utimes futimesat", [()], errno.ENOSYS),
    ("setxattr lsetxattr fsetxattr fremovexattr setxattrat", [()], errno.ENOTSUP),
    ("ioctl", [(3, request) for request in (*FLAGS, *VERSIONS)], errno.ENOTSUP),
    ("ioctl", [(3, 0x80086601), *((request, OTHER_REQUEST) for request in (*FLAGS, *VERSIONS))], 0),
    # settings and the priority of oneself alone
    (SETTINGS, [(0,)], 0),
    (SETTINGS, [(4242,)], errno.EPERM),
    ("setpriority", [(0, 0)], 0),
    ("setpriority", [(0, 4242), (1, 0), (2, 0), (2, 1000)], errno.EPERM),
]  # fmt: skip


def decide(program: bytes, number: int, architecture: int, *arguments: int) -> int:
    """Run the filter on one system call; the returned action."""
    given = (*arguments, *[0] * (6 - len(arguments)))
    data = struct.pack("<IIQ6Q", number & 0xFFFFFFFF, architecture, 0, *given)
    place, accumulator = 0, 0
    while True:
        code, if_true, if_false, value = struct.unpack_from("<HBBI", program, 8 * place)
        place += 1
        if code == 0x20:
            (accumulator,) = struct.unpack_from("<I", data, value)
        elif code == 0x06:
            return int(value)
        else:
            is_true = {
                0x15: accumulator == value,
                0x35: accumulator >= value,
                0x45: bool(accumulator & value),
            }[code]
            place += if_true if is_true else if_false


def action(error: int) -> int:
    return 0x00050000 | error if error else ALLOW


FILTERS = [pytest.param(filter_program, IN_A_JAIL, id="in a jail"), pytest.param(filter_among_equals, AMONG_EQUALS, id="among equals")]  # fmt: skip


@pytest.mark.parametrize("machine", ARCHITECTURE)
@pytest.mark.parametrize(("make", "rows"), FILTERS)
def test_each_call_is_allowed_or_refused_as_the_table_says(
    machine: str, make: Callable[[str], bytes], rows: list[Row]
) -> None:
    program, architecture, wrong = make(machine), ARCHITECTURE[machine], []
    for names, calls, error in rows:
        for name in names.split():
            number = NUMBERS[name][list(ARCHITECTURE).index(machine)]
            if number is not None:
                found = [decide(program, number, architecture, *arguments) for arguments in calls]
                wrong += [] if found == [action(error)] * len(calls) else [(name, calls, found)]
    assert wrong == []
    assert decide(program, 0, 0x40000003) == action(errno.ENOSYS)  # another architecture


@pytest.mark.parametrize("machine", ARCHITECTURE)
def test_the_x32_numbers_are_refused(machine: str) -> None:
    read = NUMBERS["read"][list(ARCHITECTURE).index(machine)] or 0
    found = decide(filter_program(machine), 0x40000000 | read, ARCHITECTURE[machine])
    assert found == action(errno.ENOSYS)


def test_an_unknown_machine_has_no_filter() -> None:
    assert filter_program("riscv64") == filter_among_equals("riscv64") == b""
