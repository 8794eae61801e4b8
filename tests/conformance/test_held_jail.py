"""The end of a jail that its command keeps from ending, and its start on a machine whose pipes are used up."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from ordinary_user import as_ordinary_user

from composer_replication.records import ExecResult, Limits, SandboxSpec
from composer_replication.sandbox import LocalSandbox, choose_backend
from composer_replication.sandbox.bubblewrap import WarmJail
from composer_replication.sandbox.bwrap_program import START_SECONDS
from composer_replication.sandbox.conformance.plugin import living, python, start_ours, wait_until
from composer_replication.sandbox.process_tree import descendants

IS_ROOT = os.geteuid() == 0
KINDS = ["bubblewrap", "bubblewrap-warm"]
LONG = 60.0
SOON = 20.0  # well below START_SECONDS, after which a jail is given up
LEAVE_MANY = "echo > up; sleep 98 & setsid sleep 98 & (setsid sleep 98 &) & sleep 98"


def open_jail(name: str, tree: Path, limits: Limits | None = None) -> LocalSandbox:
    backend = choose_backend(name)
    if not (check := backend.is_available()).ok:
        pytest.skip(f"{name} is not available here: {check.detail}")
    return backend.open(SandboxSpec(tree, limits=limits or Limits()))


def sleepers() -> list[int]:
    found = []
    for pid in descendants(os.getpid()):
        with suppress(OSError):
            if Path(f"/proc/{pid}/cmdline").read_bytes() == b"sleep\x0098\0":
                found.append(pid)
    return found


def test_a_stopped_bwrap_does_not_hold_us(tmp_path: Path) -> None:
    """An ordinary user's command can stop it, with the group that both are in."""
    results: list[ExecResult] = []
    with open_jail("bubblewrap", tmp_path) as sandbox:

        def run() -> None:
            results.append(sandbox.exec("echo > up; sleep 98", timeout_seconds=2.0))

        runner = threading.Thread(target=run, daemon=True)
        runner.start()
        while not (tmp_path / "up").exists():
            time.sleep(0.01)
        outermost = descendants(os.getpid())[0]
        os.kill(outermost, signal.SIGSTOP)
        runner.join(SOON)
        with suppress(ProcessLookupError):
            os.kill(outermost, signal.SIGCONT)
        runner.join(LONG)
    assert (results[0].timed_out, results[0].exit_code, results[0].seconds < SOON) == (True, 137, True)


@pytest.mark.parametrize("name", KINDS)
def test_a_first_process_that_does_not_end_the_others(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kept from every processor it would take as long as the command likes; here it is never told."""
    tell, send = signal.pidfd_send_signal, WarmJail._send

    def tell_others(handle: int, number: int) -> None:
        of_which = Path(f"/proc/self/fdinfo/{handle}").read_text()
        if not re.search(r"^NSpid:\s+\d+\s+1$", of_which, re.MULTILINE):
            tell(handle, number)

    def send_others(jail: WarmJail, kind: bytes, descriptors: Any = ()) -> None:
        if kind != b"K":
            send(jail, kind, descriptors)

    with open_jail(name, tmp_path) as sandbox:
        sandbox.exec("true", timeout_seconds=LONG)
        with monkeypatch.context() as context:
            context.setattr(signal, "pidfd_send_signal", tell_others)
            context.setattr(WarmJail, "_send", send_others)
            done = sandbox.exec(LEAVE_MANY, timeout_seconds=1.0)
            left = sleepers()
        assert (tmp_path / "up").exists()
        assert (done.timed_out, left) == (True, [])
        assert done.seconds < SOON < START_SECONDS
        assert sandbox.exec("echo on", timeout_seconds=LONG).stdout == "on\n"


@pytest.mark.parametrize("name", KINDS)
def test_no_command_has_a_descriptor_of_what_was_handed_in(name: str, tmp_path: Path) -> None:
    with open_jail(name, tmp_path) as sandbox:
        done = sandbox.exec(
            python("import os; print(sorted(os.listdir('/proc/self/fd')))"), timeout_seconds=LONG
        )
    assert done.stdout == "['0', '1', '2', '3']\n"  # 3 is the listing itself


NUMBERS = {"x86_64": (278, 54, 206), "aarch64": (75, 208, 0)}
LEND = """
import ctypes, errno, os, socket, struct
page, one, place = ctypes.create_string_buffer(4096), ctypes.c_int(1), ctypes.c_ulong(0)
room = ctypes.create_string_buffer(struct.pack("QQ", ctypes.addressof(page), 4096))
def ask(*words):
    done = ctypes.CDLL(None, use_errno=True).syscall(*words)
    print(errno.errorcode[ctypes.get_errno()] if done < 0 else "done")
ask(VMSPLICE, os.pipe()[1], room, 1, 0)
ask(SETSOCKOPT, socket.socket().fileno(), 1, 60, ctypes.byref(one), 4)
ask(IO_SETUP, 1, ctypes.byref(place))
"""


@pytest.mark.parametrize("name", [*KINDS, "sandlock"])
def test_no_memory_is_lent_and_no_place_taken(name: str, tmp_path: Path) -> None:
    """Of lent memory whole huge pages stay, uncounted; places for asynchronous input are the whole machine's."""
    if (numbers := NUMBERS.get(os.uname().machine)) is None:
        pytest.skip("the filter does not know this machine")
    with open_jail(name, tmp_path) as sandbox:
        code = f"VMSPLICE, SETSOCKOPT, IO_SETUP = {numbers}\n{LEND}"
        done = sandbox.exec(python(code), timeout_seconds=LONG)
    assert done.stdout.split() == ["EINVAL", "ENOPROTOOPT", "ENOSYS"], done.stderr


REACH = """
import os, ctypes
reached = []
for number in range(1, 65):
    try: os.kill(1, number)
    except OSError: pass
for name in ("mem", "environ", "maps", "fd", "cwd", "root", "ns/net"):
    path = "/proc/1/" + name
    try:
        os.listdir(path) if name == "fd" else os.readlink(path) if name in ("cwd", "root", "ns/net") else open(path, "rb").read(1)
        reached.append(name)
    except OSError: pass
if ctypes.CDLL(None).ptrace(16, 1, 0, 0) == 0: reached.append("ptrace")
print(reached)
"""
HOSTILE = """
import json, os, sys, threading, time
from pathlib import Path
from composer_replication.records import SandboxSpec
from composer_replication.sandbox import base_python, choose_backend
backends = {name: choose_backend(name) for name in ("bubblewrap", "bubblewrap-warm")}
for backend in backends.values():
    check = backend.is_available()
    if not check.ok:
        print(json.dumps({"skip": check.detail})); sys.exit()
python = [str(base_python()), "-I", "-S", "-c"]
SETTINGS = '''
import os, resource
affinity, nothing = os.sched_getaffinity(0), os.sched_param(0)
def refused(call, *words):
    try: call(*words)
    except PermissionError: return True
    return False
def of(pid):
    return [refused(resource.prlimit, pid, resource.RLIMIT_CPU, (999, 999)), refused(os.sched_setaffinity, pid, affinity),
        refused(os.sched_setscheduler, pid, os.SCHED_IDLE, nothing), refused(os.sched_setparam, pid, nothing),
        refused(os.setpriority, os.PRIO_PROCESS, pid, 19)]
child = os.fork() or os.execvp("sleep", ["sleep", "9"])
print(of(1), of(0), of(os.getpid()), of(child), [refused(os.setpriority, which, 0, 19) for which in (os.PRIO_PGRP, os.PRIO_USER)])
'''
PIPES = '''
import fcntl, os, time
size, kept = 1 << 20, []
while size >= 1 << 12 and len(kept) < 230:
    kept.append(os.pipe())
    os.close(kept[-1][0])
    fcntl.fcntl(kept[-1][1], 1031, 4096)
    while size >= 1 << 12:
        try: fcntl.fcntl(kept[-1][1], 1031, size); break
        except OSError: size //= 2
open("up", "w")
end = time.monotonic() + 60
while not os.path.exists("done") and time.monotonic() < end: time.sleep(0.01)
'''
REACH = CODE
found = {}
def within(seconds, name, call):
    def run(): found[name] = call()
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
def tree(name):
    folder = Path(os.environ["TMPDIR"]) / name
    folder.mkdir()
    return SandboxSpec(folder)
def ended(done): return [done.exit_code, done.timed_out, done.stdout]
for name, backend in backends.items():
    with backend.open(tree(name)) as jail:
        done = jail.exec([*python, SETTINGS], timeout_seconds=60)
        found[name] = done.stdout + done.stderr
        first_tree = jail.snapshot()
        asks = [lambda: None, jail.snapshot, lambda: jail.restore(first_tree), jail.list_files]
        found[name + " closed"] = []
        for mode in ("000", "400", "500"):
            for ask in asks:  # none of them is a failure of the jail
                closing = jail.exec(f'chmod {mode} "$HOME" "$TMPDIR" .', timeout_seconds=60)
                found[name + " closed"].append(closing.exit_code)
                ask()
        jail.exec("chmod 700 .; mkdir d; echo kept > d/f; chmod 000 d/f; chmod 500 d", timeout_seconds=60)
        closed = jail.snapshot()
        jail.exec("chmod 700 d; rm -rf d", timeout_seconds=60)
        jail.restore(closed)
        found[name + " modes"] = jail.exec("stat -c %a d d/f; chmod 600 d/f; cat d/f", timeout_seconds=60).stdout
        if name == "bubblewrap-warm":  # its first process stays, and is ours
            first = jail.jail_pid
            found["reach"] = [jail.exec([*python, REACH], timeout_seconds=60).stdout, jail.jail_pid == first]
jail = backends["bubblewrap"].open(tree("stop"))
within(40, "stop", lambda: ended(jail.exec("kill -STOP 0; sleep 1; echo lived", timeout_seconds=1)))
hoard, other = backends["bubblewrap"].open(tree("pipes")), backends["bubblewrap-warm"].open(tree("other"))
within(0, "pipes", lambda: ended(hoard.exec([*python, PIPES], timeout_seconds=70)))
place = Path(os.environ["TMPDIR"]) / "pipes"
for _ in range(2000):
    if not (place / "up").exists(): time.sleep(0.01)
within(40, "other", lambda: ended(other.exec("echo on", timeout_seconds=10)))
(place / "done").touch()
if "stop" in found and "other" in found:
    hoard.close(), other.close(), jail.close()
print(json.dumps(found), flush=True)
os._exit(0)
""".replace("CODE", repr(REACH))


@pytest.mark.skipif(not IS_ROOT, reason="as an ordinary user it would be this test itself that is starved")
def test_an_ordinary_user_s_jail_ends_and_starts_whatever_another_does() -> None:
    """Its commands have the same user id as what is around them."""
    found = as_ordinary_user(HOSTILE, is_clean=False)  # it is killed amid its work
    refused, allowed = [True] * 5, [False] * 5
    expected = f"{refused} {allowed} {allowed} {allowed} [True, True]\n"
    assert (found["bubblewrap"], found["bubblewrap-warm"]) == (expected, expected)
    for name in ("bubblewrap", "bubblewrap-warm"):  # what a command closes is never an outage
        assert found[f"{name} closed"] == [0] * 12
        assert found[f"{name} modes"] == "500\n0\nkept\n"
    assert found["reach"] == ["[]\n", True]
    assert found.get("stop") == [137, True, ""]
    assert found.get("other") == [0, False, "on\n"]


def test_the_first_process_of_a_jail_that_stays_is_out_of_reach(tmp_path: Path) -> None:
    """Started by root it keeps a right that a command has not; above the same as an ordinary user."""
    with open_jail("bubblewrap-warm", tmp_path) as sandbox:
        sandbox.exec("true", timeout_seconds=LONG)
        before = descendants(os.getpid())
        assert sandbox.exec(python(REACH), timeout_seconds=LONG).stdout == "[]\n"
        assert descendants(os.getpid()) == before


# --- a jail whose owner is killed ---


DIES = """
import os, signal
from pathlib import Path
from composer_replication.records import SandboxSpec
from composer_replication.sandbox import bubblewrap, choose_backend
def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)
{patch}
with choose_backend({name!r}).open(SandboxSpec(Path({tree!r}))) as sandbox:
    sandbox.exec("touch ran; : {token}; sleep 600", timeout_seconds=600)
"""
MOMENTS = {
    "bwrap is started and not yet bound to us": "bubblewrap.HeldJail.release = die",
    "the jail is released and its first process perhaps not bound": "bubblewrap.HeldJail.own_pipes = die",
    "never": "",
}


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("name", ["bubblewrap", "bubblewrap-warm"])
def test_a_command_does_not_run_without_its_owner(name: str, moment: str, tmp_path: Path) -> None:
    check = choose_backend(name).is_available()
    if not check.ok:
        pytest.skip(f"not available here: {check.detail}")
    if name.endswith("warm") and "own_pipes" in MOMENTS[moment]:
        pytest.skip("a warm jail is not started in this way")
    tree = tmp_path / "tree"
    tree.mkdir()
    token = uuid.uuid4().hex
    code = DIES.format(patch=MOMENTS[moment], name=name, tree=str(tree), token=token)
    with start_ours(code, tmp_path) as process:
        if not MOMENTS[moment]:  # the counterpart: with a living owner it runs
            wait_until((tree / "ran").exists)
            process.kill()
    assert process.returncode == -9
    with suppress(AssertionError):  # one that was caught between two calls waits for ever, for the next start
        wait_until(lambda: not living(str(tree)), 0.5)
    with start_ours("from composer_replication.sandbox.process_folder import sweep; sweep()", tmp_path):
        pass
    wait_until(lambda: not living(token) and not living(str(tree)))
    assert (tree / "ran").exists() == (not MOMENTS[moment])
    assert list(tmp_path.glob("composer-rl-*")) == []
