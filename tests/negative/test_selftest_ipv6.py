"""A jail that closes IPv4 alone is named for it, and a machine without IPv6 says that it was not tried."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys

import pytest

from composer_replication.records import SandboxSpec
from composer_replication.sandbox import LocalSandbox, run_selftest
from composer_replication.sandbox.keeper_process import NoIsolation, NoIsolationSandbox

ONLY_IPV6 = """
import socket
class Closed(socket.socket):
    def connect(self, address):
        if self.family != socket.AF_INET6: raise PermissionError(1, 'closed')
        return super().connect(address)
def no(*words): raise OSError('closed')
socket.socket, socket.getaddrinfo = Closed, no
"""
WITHOUT_ISOLATION = """
import json
from composer_replication.errors import ComposerError
from composer_replication.sandbox import acceptance, choose_backend, run_selftest
acceptance.accept([acceptance.EVERYTHING])
backend = choose_backend("none")
%s
try:
    print(json.dumps([check.detail for check in run_selftest(backend, names=["network"])]))
except ComposerError as error:
    print(json.dumps([error.code, error.message]))
"""
IN_OWN_NETWORK = """
import fcntl, socket, struct
with socket.socket() as asked:  # SIOCSIFFLAGS: the loopback device up
    fcntl.ioctl(asked, 0x8914, struct.pack("16sh14x", b"lo", 1))
with open("/proc/sys/net/ipv6/conf/all/disable_ipv6", "w") as setting:
    setting.write("1")
"""
WITH_FEW_DESCRIPTORS = "import os, resource; resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir('/proc/self/fd')) + 3, 4096))"


class ClosedToIpv4(NoIsolation):
    """No jail; the probe finds everything closed but IPv6, as behind a filter that somebody wrote in a hurry."""

    name = "closed-to-ipv4"

    def open(self, spec: SandboxSpec) -> LocalSandbox:
        return _ClosedToIpv4(spec, None)


class _ClosedToIpv4(NoIsolationSandbox):
    def exec(self, command, **options):  # type: ignore[no-untyped-def]
        *words, code = list(command)
        closed = code.replace("import ctypes\n", f"import ctypes\n{ONLY_IPV6}\n", 1)
        return super().exec([*words, closed], **options)


def has_ipv6_loopback() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


def told_by(words: list[str], prelude: str) -> subprocess.CompletedProcess[str]:
    command = [*words, sys.executable, "-c", WITHOUT_ISOLATION % prelude]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.skipif(not has_ipv6_loopback(), reason="this machine has no IPv6")
def test_a_jail_that_closes_ipv4_alone_is_named() -> None:
    (check,) = run_selftest(ClosedToIpv4(), names=["network"])
    assert not check.ok
    assert "a listener on the host's IPv6 loopback" in check.detail
    assert "a datagram socket of the host" in check.detail
    if "no route of IPv6" not in check.detail:
        assert "this machine by its IPv6 address" in check.detail
        assert "an IPv6 route to the outside" in check.detail


def test_a_machine_without_ipv6_says_so() -> None:
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("only root can make a network without IPv6")
    done = told_by(["unshare", "--net"], IN_OWN_NETWORK)
    if "disable_ipv6" in done.stderr or "unshare" in done.stderr:
        pytest.skip(done.stderr.strip().splitlines()[-1])
    (detail,) = json.loads(done.stdout)
    assert "this machine has no loopback address of IPv6 and no route of IPv6 that leads out" in detail


def test_where_nothing_can_be_planted_it_is_one_sentence() -> None:
    done = told_by([], WITH_FEW_DESCRIPTORS)
    assert done.stdout, done.stderr
    code, message = json.loads(done.stdout)
    assert code == "CR0302"
    assert message.startswith("the self-test cannot plant what it looks for: Too many open files")
