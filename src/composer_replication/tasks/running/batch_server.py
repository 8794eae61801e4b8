"""Runs inside the sandbox behind ``pytest_runner.py``: imports once, forks off each run, hands on what it says, ends one that hangs.

Not imported by the package and never placed in a tree. Code of a tree runs in the forks alone.
"""

import contextlib
import gc
import importlib
import json
import os
import select
import shutil
import signal
import sys
import time

PATIENCE_SECONDS = 10.0
LOOK_SECONDS = 0.25
IDLE_TICKS = 10
"""What a run that waits may need of the processor, in all the time that it waits: waking up and looking at a clock."""
END_SECONDS = 0.004
"""How often it is asked whether a run has ended."""
SLOW_IMPORTS = ("pytest", "hypothesis", "numpy")
"""What takes long to import, and bears a fork: imported once, for all runs."""
COMPILED = "compiled"
"""The folder beside all trees, in which a run finds what one before it compiled, of the same path, size and time of change."""


def hand_on(heard, output):
    """Pass on what a run says as it comes: so it is known also where the sandbox ends all of it. False where nobody speaks any more."""
    said = rest = os.read(heard, 1 << 16)
    while rest:
        rest = rest[os.write(output, rest) :]
    return bool(said)


def attend(pid, heard, output, timeout_seconds, idle_seconds):
    """See a run to its end: its exit code; or None where the patience with it was over first, and why.

    It has its time by the clock, and ``idle_seconds`` in which all of it together hardly computes and says nothing.
    """
    ticks, is_open = 0, True
    begun = active = looked = time.monotonic()
    while True:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status), ""
        now = time.monotonic()
        if now - begun >= timeout_seconds:
            return None, ""  # the time of all of it: no fault of the test that is at work
        if now - looked >= LOOK_SECONDS:
            used, looked = ticks_used(below(os.getpid())), now
            if used is None or not 0 <= used - ticks < IDLE_TICKS:
                ticks, active = used or 0, now
            if now - active >= idle_seconds:
                return None, f"it waited {idle_seconds:g} s for something that did not come"
        if select.select([heard] if is_open else [], [], [], END_SECONDS)[0]:
            is_open = hand_on(heard, output)
            active = time.monotonic()


def end_all(group):
    """End the run's session, and whatever left it, as far as this sandbox lets us see processes."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            os.killpg(group, signal.SIGKILL)
        alive = below(os.getpid())
        for pid in alive:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(OSError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if not alive:
            return
        time.sleep(0.001)


def names_in(place):
    """What a folder holds; nothing where it cannot be read."""
    with contextlib.suppress(OSError):
        return os.listdir(place)
    return []


def ticks_used(pids):
    """Processor time of these processes, in hundredths of a second; None if there is none."""
    ticks = 0
    for pid in pids:
        with contextlib.suppress(OSError), open(f"/proc/{pid}/stat", errors="replace") as handle:
            ticks += sum(map(int, handle.read().rpartition(")")[2].split()[11:13]))
    return ticks if pids else None


def below(pid):
    """Processes that descend from one and were not waited for; none where there is no ``/proc``."""
    found: list[int] = []
    for thread in names_in(f"/proc/{pid}/task"):
        with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{thread}/children") as handle:
            found += map(int, handle.read().split())
    return [*found, *(each for child in found for each in below(child))]


def is_private(place):
    """Whether a folder is ours and closed to all others, as the host's ``/tmp`` is not: that is never touched."""
    with contextlib.suppress(OSError):
        info = os.stat(place)
        return info.st_uid == os.geteuid() and not info.st_mode & 0o077
    return False


def remove(path):
    """Remove a file or folder, whatever modes a run gave it; a mount point stays."""
    with contextlib.suppress(OSError):
        if os.path.islink(path) or not os.path.isdir(path):
            os.unlink(path)
            return
        os.chmod(path, 0o700)
        for folder, names, _ in os.walk(path):
            for name in names:
                if not os.path.islink(os.path.join(folder, name)):
                    os.chmod(os.path.join(folder, name), 0o700)
    shutil.rmtree(path, ignore_errors=True)


def how_it_ended(pid, heard, output, *limits):
    """See a run to the end of its last process; the fields of its record."""
    started = time.monotonic()
    code, why = attend(pid, heard, output, *limits)
    if code is None:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    end_all(pid)
    while select.select([heard], [], [], 0)[0] and hand_on(heard, output):
        pass
    return {
        "exit_code": 137 if code is None else 128 - code if code < 0 else code,
        "timed_out": code is None,
        "stopped": why,
        "seconds": time.monotonic() - started,
    }


def serve():
    """Run the batch that standard input asks for; one record for each run that was seen to its end.

    A run that is alone leads no session, and no run can write beside its tree, as where answers are graded: a test that
    would need that fails here, too.
    """
    output = private_stdout()  # type: ignore[name-defined]  # noqa: F821  of pytest_runner
    orders = json.loads(sys.stdin.buffer.read())
    nonce, is_alone = orders["nonce"], len(orders["runs"]) == 1
    send = make_send(output, nonce)  # type: ignore[name-defined]  # noqa: F821  of pytest_runner
    if not is_alone:
        for name in SLOW_IMPORTS:
            with contextlib.suppress(Exception):  # not installed, or it fails again and is seen in the run
                importlib.import_module(name)
        os.mkdir(COMPILED)
    gc.collect()
    gc.freeze()
    with contextlib.suppress(ImportError, OSError, AttributeError):
        import ctypes

        ctypes.CDLL(None).prctl(
            36, 1, 0, 0, 0
        )  # PR_SET_CHILD_SUBREAPER: what leaves its session becomes our child
    root = os.getcwd()
    stage = os.path.join(
        root, "run"
    )  # the folder of each run while it lasts: so all see their tree at one path
    closed = (root, stage) if is_private(root) else ()
    places = {root, "/tmp", "/dev/shm", os.environ["HOME"], os.environ["TMPDIR"]}
    before = {place: set(names_in(place)) for place in places if is_private(place)}
    for number, order in enumerate(orders["runs"]):
        try:
            os.rename(os.path.join(root, str(number)), stage)
        except OSError:  # a run before it lost it: it is done alone
            break
        for place in closed:
            os.chmod(place, 0o500)
        os.write(2, f"\n{nonce}\n".encode())  # here its own words begin
        heard, said = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.chdir(os.path.join(stage, "tree"))
            if "PWD" in os.environ:
                os.environ["PWD"] = os.getcwd()
            if not is_alone:
                os.setsid()
                sys.pycache_prefix, sys.dont_write_bytecode = os.path.join(root, COMPILED), False
            os.close(heard)
            os.close(output)
            return run_tests(order["request"], said)  # type: ignore[name-defined]  # noqa: F821  of pytest_runner
        os.close(said)
        limits = order["timeout_seconds"], orders["idle_seconds"]
        send("run", number=number, **how_it_ended(pid, heard, output, *limits))
        os.close(heard)
        with contextlib.suppress(OSError):
            for place in closed:
                os.chmod(place, 0o700)
        for place, names in before.items():
            for name in set(names_in(place)) - names:
                remove(os.path.join(place, name))
    os._exit(0)
