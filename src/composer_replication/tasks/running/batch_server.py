"""Runs inside the sandbox behind ``pytest_runner.py``: imports once, forks off each run, hands on what it says, ends one that hangs.

Not imported by the package and never placed in a tree. Code of a tree runs in the forks alone.
"""

import contextlib
import gc
import json
import os
import select
import shutil
import signal
import sys
import time

PATIENCE_SECONDS = 10.0
LOOK_SECONDS = 0.25
END_SECONDS = 0.004
"""How often it is asked whether a run has ended."""
PLACES_OF_ALL = ("/tmp", "/dev/shm")
SLOW_IMPORTS = ("pytest", "hypothesis", "numpy")
"""What takes long to import, and bears a fork."""
STAGE = "run"
"""What the folder of a run is called while the run lasts: so all of them see their tree at one path."""
COMPILED = "compiled"
"""The folder beside it in which a run finds what one before it compiled, of the same path, size and time of change."""


def preload():
    """Import the test runner and what is slow, which no run then does."""
    import importlib

    for name in SLOW_IMPORTS:
        with contextlib.suppress(Exception):  # not installed, or it fails again and is seen in the run
            importlib.import_module(name)


def hand_on(heard, output):
    """Pass on what a run says as it comes: so it is known also where the sandbox ends all of it. False where nobody speaks any more."""
    said = rest = os.read(heard, 1 << 16)
    while rest:
        rest = rest[os.write(output, rest) :]
    return bool(said)


def attend(pid, heard, output, timeout_seconds, idle_seconds):
    """See a run to its end: its exit code; or None where the patience with it was over first, and why.

    It has its time by the clock, and ``idle_seconds`` in which nothing of it does anything, or wants to: these do not
    depend on how busy the machine is.
    """
    ticks: int | None = None
    is_open = True
    begun = active = looked = time.monotonic()
    while True:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status), ""
        now = time.monotonic()
        if now - begun >= timeout_seconds:
            return None, ""  # the time of all of it: no fault of the test that is at work
        if now - looked >= LOOK_SECONDS:
            before, ticks, looked = ticks, ticks_used(orphans(os.getpid())), now
            # One tick, of a hundred in a second, is what waking up and looking at a clock may need.
            if before is None or ticks is None or not 0 <= ticks - before <= 1:
                active = now
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
        alive = orphans(os.getpid())
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
    try:
        return os.listdir(place)
    except OSError:
        return []


def stat_of(place):
    """State and the fields behind it of a process or thread; what is gone has none."""
    try:
        with open(f"{place}/stat", encoding="utf-8", errors="replace") as handle:
            return handle.read().rpartition(")")[2].split()
    except OSError:
        return []


def ticks_used(pids):
    """Processor time of all threads of these processes; None if one runs or would, or where there is none."""
    ticks = 0
    for pid in pids:
        for thread in names_in(f"/proc/{pid}/task"):
            fields = stat_of(f"/proc/{pid}/task/{thread}")
            if not fields or fields[0] in "RD":
                return None
            ticks += int(fields[11]) + int(fields[12])
    return ticks if pids else None


def orphans(root):
    """Living processes below one; none where there is no ``/proc``."""
    children: dict[int, list[tuple[int, str]]] = {}
    for name in names_in("/proc"):
        fields = stat_of(f"/proc/{name}") if name.isdigit() else []
        if fields:
            children.setdefault(int(fields[1]), []).append((int(name), fields[0]))
    found, queue = [], [root]
    while queue:
        for pid, state in children.get(queue.pop(), []):
            queue.append(pid)
            if state not in "ZX":
                found.append(pid)
    return found


def is_private(place):
    """Whether a folder was made for this sandbox alone: ours, and closed to all others.

    The host's ``/tmp`` is open to all. Nothing in it is ever touched, whatever it may be that
    runs this program.
    """
    try:
        info = os.stat(place)
    except OSError:
        return False
    return info.st_uid == os.geteuid() and not info.st_mode & 0o077


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


def adopt_orphans():
    """Become the parent of whatever leaves its session, so that it can be found."""
    with contextlib.suppress(ImportError, OSError, AttributeError):
        import ctypes

        ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER


def become_run(folder, not_ours, *, is_alone):
    """Be what a lone runner is: its folder, and no descriptor that is not its own."""
    os.chdir(folder)
    if "PWD" in os.environ:
        os.environ["PWD"] = folder
    if not is_alone:
        os.setsid()
        sys.pycache_prefix, sys.dont_write_bytecode = os.path.abspath(f"../../{COMPILED}"), False
    for descriptor in not_ours:
        os.close(descriptor)


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
        preload()
        os.mkdir(COMPILED)
    gc.collect()
    gc.freeze()
    adopt_orphans()
    root = os.getcwd()
    stage = os.path.join(root, STAGE)
    closed = (root, stage) if is_private(root) else ()
    places = {root, *PLACES_OF_ALL, os.environ["HOME"], os.environ["TMPDIR"]}
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
            become_run(os.path.join(stage, "tree"), (heard, output), is_alone=is_alone)
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
