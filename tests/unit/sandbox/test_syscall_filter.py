"""The filter is run here by a small interpreter of the same instruction set, for both machines."""

from __future__ import annotations

import errno
import struct
from functools import partial

import pytest

from composer_replication.sandbox.syscall_filter import filter_among_equals, filter_program

ALLOW = 0x7FFF0000
ARCHITECTURE = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
NUMBERS = {
    "x86_64": {"read": 0, "fork": 57, "clone": 56, "socket": 41, "ptrace": 101, "mount": 165, "unshare": 272,
               "keyctl": 250, "shmget": 29, "process_vm_readv": 310, "bpf": 321, "execve": 59, "openat": 257,
               "mq_open": 240, "ioprio_set": 251, "fanotify_init": 300},
    "aarch64": {"read": 63, "clone": 220, "socket": 198, "ptrace": 117, "mount": 40, "unshare": 97,
                "keyctl": 219, "shmget": 194, "process_vm_readv": 270, "bpf": 280, "execve": 221, "openat": 56,
                "mq_open": 180, "ioprio_set": 30, "fanotify_init": 262},
}  # fmt: skip
EVERYWHERE = {
    "io_uring_setup": 425,
    "open_tree": 428,
    "fspick": 433,
    "pidfd_getfd": 438,
    "mount_setattr": 442,
}


def decide(
    program: bytes,
    number: int,
    architecture: int,
    first: int = 0,
    second: int = 0,
    third: int = 0,
    fourth: int = 0,
) -> int:
    """Run the filter on one system call; the returned action."""
    data = struct.pack("<IIQ6Q", number & 0xFFFFFFFF, architecture, 0, first, second, third, fourth, 0, 0)
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


def refusal(number: int) -> int:
    return 0x00050000 | number


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
class TestFilter:
    def ask(self, machine: str, number: int, *arguments: int) -> int:
        return decide(filter_program(machine), number, ARCHITECTURE[machine], *arguments)

    @pytest.mark.parametrize("name", ["read", "execve", "openat"])
    def test_ordinary_calls_are_allowed(self, machine: str, name: str) -> None:
        assert self.ask(machine, NUMBERS[machine][name]) == ALLOW

    @pytest.mark.parametrize(
        "name",
        "ptrace mount unshare keyctl shmget process_vm_readv bpf mq_open ioprio_set fanotify_init".split(),
    )
    def test_dangerous_calls_are_refused(self, machine: str, name: str) -> None:
        assert self.ask(machine, NUMBERS[machine][name]) == refusal(errno.EPERM)

    @pytest.mark.parametrize("number", sorted(EVERYWHERE.values()))
    def test_calls_with_one_number_everywhere(self, machine: str, number: int) -> None:
        assert self.ask(machine, number) == refusal(errno.EPERM)

    @pytest.mark.parametrize("number", [444, 445, 446])
    def test_there_is_no_landlock_whose_rules_would_keep_files(self, machine: str, number: int) -> None:
        assert self.ask(machine, number) == refusal(errno.ENOSYS)

    def test_no_call_waits_with_a_file_that_another_thread_may_close(self, machine: str) -> None:
        copies, fcntl = {"x86_64": ((40, 275, 278), 72), "aarch64": ((71, 76, 75), 25)}[machine]
        for program in (filter_program(machine), filter_among_equals(machine)):
            for number in copies:
                assert decide(program, number, ARCHITECTURE[machine]) == refusal(errno.EINVAL)
            assert decide(program, fcntl, ARCHITECTURE[machine], 3, 38) == refusal(errno.EINVAL)
            for command in (1, 6, 7, 36, 37, 1030):
                assert decide(program, fcntl, ARCHITECTURE[machine], 3, command) == ALLOW

    @pytest.mark.parametrize(
        "name", ["prlimit64", "sched_setaffinity", "sched_setscheduler", "sched_setparam", "sched_setattr"]
    )
    def test_settings_of_any_but_the_first_process(self, machine: str, name: str) -> None:
        number = AMONG_EQUALS[machine][name]
        assert self.ask(machine, number, 1) == refusal(errno.EPERM)
        assert [self.ask(machine, number, pid) for pid in (0, 2, 4242)] == [ALLOW] * 3

    @pytest.mark.parametrize(
        ("which", "who", "is_allowed"),
        [(0, 0, True), (0, 2, True), (0, 1, False), (1, 0, False), (1, 1, False), (2, 0, False)],
    )
    def test_the_priority_of_any_but_the_first_process(
        self, machine: str, which: int, who: int, *, is_allowed: bool
    ) -> None:
        expected = ALLOW if is_allowed else refusal(errno.EPERM)
        assert self.ask(machine, AMONG_EQUALS[machine]["setpriority"], which, who) == expected
        assert self.ask(machine, AMONG_EQUALS[machine]["getpriority"], which, who) == ALLOW

    def test_no_memory_is_lent_to_a_socket(self, machine: str) -> None:
        number = {"x86_64": 54, "aarch64": 208}[machine]
        for program in (filter_program(machine), filter_among_equals(machine)):
            ask = partial(decide, program, number, ARCHITECTURE[machine])
            assert ask(1, 1, 60) == refusal(errno.ENOPROTOOPT)
            assert [ask(1, 1, 7), ask(1, 6, 60), ask(60, 1, 1)] == [ALLOW] * 3

    def test_places_of_the_machine_are_not_used_up(self, machine: str) -> None:
        io_setup = {"x86_64": 206, "aarch64": 0}[machine]
        for program in (filter_program(machine), filter_among_equals(machine)):
            assert decide(program, io_setup, ARCHITECTURE[machine], 128) == refusal(errno.ENOSYS)

    def test_inode_versions_are_not_supported(self, machine: str) -> None:
        number = AMONG_EQUALS[machine]["ioctl"]
        for request in (0x40087602, 0x40047602):
            assert self.ask(machine, number, 3, request) == refusal(errno.ENOTSUP)
        for request in (0x80087601, 0x40086602, 0x5401):
            assert self.ask(machine, number, 3, request) == ALLOW

    def test_a_process_may_be_made_but_no_user_namespace(self, machine: str) -> None:
        clone = NUMBERS[machine]["clone"]
        assert self.ask(machine, clone, 0x11) == ALLOW
        assert self.ask(machine, clone, 0x10000011) == refusal(errno.EPERM)

    def test_a_thread_shares_the_files_of_its_process(self, machine: str) -> None:
        clone, thread, files = NUMBERS[machine]["clone"], 0x10900, 0x400
        for program in (filter_program(machine), filter_among_equals(machine)):
            assert decide(program, clone, ARCHITECTURE[machine], thread | files) == ALLOW
            assert decide(program, clone, ARCHITECTURE[machine], thread) == refusal(errno.EPERM)
            assert decide(program, 435, ARCHITECTURE[machine]) == refusal(errno.ENOSYS)

    def test_a_thread_cannot_take_a_table_of_files_by_closing_some(self, machine: str) -> None:
        for program in (filter_program(machine), filter_among_equals(machine)):
            assert decide(program, 436, ARCHITECTURE[machine], 3, 9, 4) == ALLOW
            for flags in (2, 6):
                assert decide(program, 436, ARCHITECTURE[machine], 3, 9, flags) == refusal(errno.EPERM)

    def test_clone3_does_not_exist(self, machine: str) -> None:
        assert self.ask(machine, 435) == refusal(errno.ENOSYS)

    @pytest.mark.parametrize("family", [1, 2, 10, 16])
    def test_ordinary_sockets(self, machine: str, family: int) -> None:
        assert self.ask(machine, NUMBERS[machine]["socket"], family) == ALLOW

    @pytest.mark.parametrize("family", [0, 17, 38, 40, 44])
    def test_families_that_leave_the_network_namespace(self, machine: str, family: int) -> None:
        assert self.ask(machine, NUMBERS[machine]["socket"], family) == refusal(errno.EAFNOSUPPORT)

    def test_other_architectures(self, machine: str) -> None:
        assert decide(filter_program(machine), 0, 0x40000003) == refusal(errno.ENOSYS)

    def test_the_x32_numbers(self, machine: str) -> None:
        assert self.ask(machine, 0x40000000 | NUMBERS[machine]["read"]) == refusal(errno.ENOSYS)


AMONG_EQUALS = {
    "x86_64": {"prlimit64": 302, "sched_setaffinity": 203, "sched_setscheduler": 144, "setpriority": 141,
               "sched_setparam": 142, "sched_setattr": 314, "getpriority": 140,
               "mq_open": 240, "mq_unlink": 241, "ioprio_set": 251, "fanotify_init": 300, "kcmp": 312, "kill": 62, "chmod": 90,
               "setxattr": 188, "lsetxattr": 189, "fsetxattr": 190, "fremovexattr": 199, "fchmod": 91, "fchmodat": 268, "setxattrat": 463, "fchmodat2": 452,
               "socket": 41, "sendto": 44, "sendmsg": 46, "sendmmsg": 307, "connect": 42, "ioctl": 16},
    "aarch64": {"prlimit64": 261, "sched_setaffinity": 122, "sched_setscheduler": 119, "setpriority": 140,
                "sched_setparam": 118, "sched_setattr": 274, "getpriority": 141,
                "mq_open": 180, "mq_unlink": 181, "ioprio_set": 30, "fanotify_init": 262, "kcmp": 272, "kill": 129, "chmod": 52,
                "setxattr": 5, "lsetxattr": 6, "fsetxattr": 7, "fremovexattr": 16, "fchmod": 52, "fchmodat": 53, "setxattrat": 463, "fchmodat2": 452,
                "socket": 198, "sendto": 206, "sendmsg": 211, "sendmmsg": 269, "connect": 203, "ioctl": 29},
}  # fmt: skip


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
class TestFilterAmongEquals:
    def ask(self, machine: str, name: str, *arguments: int) -> int:
        number = AMONG_EQUALS[machine][name]
        return decide(filter_among_equals(machine), number, ARCHITECTURE[machine], *arguments)

    @pytest.mark.parametrize("family", [2, 10])
    @pytest.mark.parametrize(
        ("protocol", "is_allowed"),
        [(0, True), (6, True), (17, True), (1, True), (58, True), (262, False), (132, False), (33, False)],
    )
    def test_protocols_of_the_internet(
        self, machine: str, family: int, protocol: int, *, is_allowed: bool
    ) -> None:
        expected = ALLOW if is_allowed else refusal(errno.EPROTONOSUPPORT)
        assert self.ask(machine, "socket", family, 1, protocol) == expected

    @pytest.mark.parametrize(("family", "protocol"), [(1, 0), (16, 4), (16, 262)])
    def test_of_other_families_the_jail_decides(self, machine: str, family: int, protocol: int) -> None:
        assert self.ask(machine, "socket", family, 1, protocol) == ALLOW

    @pytest.mark.parametrize(
        ("name", "arguments"),
        [
            ("sendto", (5, 0, 1, 0x20000000)),
            ("sendmmsg", (5, 0, 1, 0x20004000)),
            ("sendmsg", (5, 0, 0x20000000)),
        ],
    )
    def test_no_data_goes_with_the_opening_of_a_connection(
        self, machine: str, name: str, arguments: tuple[int, ...]
    ) -> None:
        assert self.ask(machine, name, *arguments) == refusal(errno.EPERM)
        assert self.ask(machine, name, *arguments[:-1], 0x4000) == ALLOW

    @pytest.mark.parametrize("name", ["kill", "chmod"])
    def test_ordinary_calls_are_allowed(self, machine: str, name: str) -> None:
        assert self.ask(machine, name, 4242) == ALLOW

    @pytest.mark.parametrize("name", ["mq_open", "mq_unlink", "ioprio_set", "fanotify_init", "kcmp"])
    def test_what_is_shared_with_the_host_is_refused(self, machine: str, name: str) -> None:
        assert self.ask(machine, name) == refusal(errno.EPERM)

    @pytest.mark.parametrize(("name", "place"), [("fchmod", 1), ("fchmodat", 2), ("fchmodat2", 2)])
    def test_no_file_gets_the_set_user_id_bit(self, machine: str, name: str, place: int) -> None:
        before = [0o4000] * place
        assert self.ask(machine, name, *before, 0o4755) == refusal(errno.EPERM)
        assert self.ask(machine, name, *before, 0o2755) == ALLOW

    @pytest.mark.parametrize("number", [132, 235, 261])
    def test_times_are_set_by_the_newest_call_alone(self, machine: str, number: int) -> None:
        if machine == "x86_64":  # the other one never had them
            found = decide(filter_among_equals(machine), number, ARCHITECTURE[machine])
            assert found == refusal(errno.ENOSYS)

    @pytest.mark.parametrize("name", ["setxattr", "lsetxattr", "fsetxattr", "fremovexattr", "setxattrat"])
    def test_attributes_are_not_supported(self, machine: str, name: str) -> None:
        assert self.ask(machine, name) == refusal(errno.ENOTSUP)

    @pytest.mark.parametrize("request_number", [0x40086602, 0x40046602, 0x401C5820, 0x40087602, 0x40047602])
    def test_inode_flags_are_not_supported(self, machine: str, request_number: int) -> None:
        assert self.ask(machine, "ioctl", 3, request_number) == refusal(errno.ENOTSUP)
        assert self.ask(machine, "ioctl", 3, 0x80086601) == ALLOW
        assert self.ask(machine, "ioctl", request_number, 0x5401) == ALLOW

    @pytest.mark.parametrize("name", ["prlimit64", "sched_setaffinity", "sched_setscheduler"])
    def test_settings_of_oneself_alone(self, machine: str, name: str) -> None:
        assert self.ask(machine, name, 0) == ALLOW
        assert self.ask(machine, name, 4242) == refusal(errno.EPERM)

    @pytest.mark.parametrize(
        ("which", "who", "is_allowed"),
        [(0, 0, True), (0, 4242, False), (1, 0, False), (2, 0, False), (2, 1000, False)],
    )
    def test_the_priority_of_oneself_alone(
        self, machine: str, which: int, who: int, *, is_allowed: bool
    ) -> None:
        expected = ALLOW if is_allowed else refusal(errno.EPERM)
        assert self.ask(machine, "setpriority", which, who) == expected

    def test_other_architectures(self, machine: str) -> None:
        assert decide(filter_among_equals(machine), 0, 0x40000003) == refusal(errno.ENOSYS)


def test_an_unknown_machine_has_no_filter() -> None:
    assert filter_program("riscv64") == filter_among_equals("riscv64") == b""
