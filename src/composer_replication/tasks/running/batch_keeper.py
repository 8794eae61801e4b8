"""Runs inside the sandbox behind ``batch_nursery.py``: starts the runs of a batch and answers for them.

Not imported by the package and never placed in a tree. It never runs code of a tree.
"""

import contextlib
import json
import os
import selectors
import shutil
import signal
import socket
import sys
import time

PATIENCE_SECONDS = 10.0
LOOK_SECONDS = 0.5
PLACES_OF_ALL = ("/tmp", "/dev/shm")
STAGE = "run"
"""What the folder of a run is called while the run lasts: so all of them see their tree at one path."""


class Keeper:
    """Starts the runs, keeps their time, collects what they say, clears up behind them."""

    def __init__(self, link, nursery_pid, orders):
        self.link = link
        self.answers = bytearray()
        self.nursery_pid = nursery_pid
        self.keep_bytes = orders["keep_bytes"]
        self.root = os.getcwd()
        self.pending = [run["folder"] for run in orders["runs"]]
        places = {*PLACES_OF_ALL, os.environ["HOME"], os.environ["TMPDIR"]}
        self.before = {place: set(self.names(place)) for place in places if is_private(place)}

    @staticmethod
    def names(place):
        try:
            return os.listdir(place)
        except OSError:
            return []

    def answer(self, deadline):
        """The next line of the nursery; None when it is dead or silent."""
        self.link.settimeout(max(0.001, deadline - time.monotonic()))
        try:
            while b"\n" not in self.answers:
                data = self.link.recv(4096)
                if not data:
                    return None
                self.answers += data
        except OSError:
            return None
        line, _, rest = bytes(self.answers).partition(b"\n")
        self.answers = bytearray(rest)
        return line.decode()

    def run(self, order):
        """One run, with its tree at the path of all; None when the nursery or that path is lost."""
        number, _, tree = order["folder"].partition("/")
        away, stage = (os.path.join(self.root, name) for name in (number, STAGE))
        try:
            os.rename(away, stage)
        except OSError:
            return None
        result = self.attend(order, os.path.join(stage, tree))
        with contextlib.suppress(OSError):
            os.rename(stage, away)
        return result

    def attend(self, order, folder):
        """See one run from its start to its last process; None when the nursery is lost."""
        started = time.monotonic()
        request_read, request_write = os.pipe()
        records_read, records_write = os.pipe()
        words_read, words_write = os.pipe()
        theirs = [request_read, records_write, words_write]
        streams = {records_read: bytearray(), words_read: bytearray()}
        try:
            socket.send_fds(self.link, [os.fsencode(folder)], theirs)
        except OSError:
            return None
        finally:
            for descriptor in theirs:
                os.close(descriptor)
        pid = self.answer(started + PATIENCE_SECONDS)
        if pid is None:
            return None
        for descriptor in (request_write, records_read, words_read):
            os.set_blocking(descriptor, False)
        lost: set[int] = set()
        patience = Patience(self.nursery_pid, started + order["timeout_seconds"], order["idle_seconds"])
        request = json.dumps(order["request"]).encode()
        timed_out = self.feed_and_drain(request_write, request, streams, lost, patience)
        if timed_out:
            self.kill(int(pid))
        code = self.answer(time.monotonic() + PATIENCE_SECONDS)
        self.kill(int(pid))
        for descriptor, kept in streams.items():
            while self.drain(descriptor, kept, lost):
                pass
            os.close(descriptor)
        if code is None:
            return None
        return {
            "exit_code": 137 if timed_out else int(code),
            "stdout": streams[records_read].decode(errors="replace"),
            "last_words": last_line(streams[words_read].decode(errors="replace")),
            "truncated": bool(lost),
            "timed_out": timed_out,
            "seconds": time.monotonic() - started,
        }

    def feed_and_drain(self, request_write, request, streams, lost, patience):
        """Move bytes until the nursery says that the run is over; True when the patience with it was over first."""
        with selectors.DefaultSelector() as selector:
            selector.register(self.link, selectors.EVENT_READ)
            selector.register(request_write, selectors.EVENT_WRITE)
            for descriptor in streams:
                selector.register(descriptor, selectors.EVENT_READ)
            try:
                while b"\n" not in self.answers:
                    if patience.is_over():
                        return True
                    for key, _ in selector.select(patience.pause()):
                        if key.fileobj is self.link:
                            return False
                        if key.fd == request_write:
                            request = write_some(request_write, request)
                            if not request:
                                selector.unregister(request_write)
                                os.close(request_write)
                                request_write = None
                        elif self.drain(key.fd, streams[key.fd], lost) is None:
                            selector.unregister(key.fd)
                return False
            finally:
                if request_write is not None:
                    os.close(request_write)

    def drain(self, descriptor, kept, lost):
        """Take what is there: True for something, False for nothing yet, None at the end."""
        try:
            data = os.read(descriptor, 1 << 18)
        except BlockingIOError:
            return False
        room = self.keep_bytes - len(kept)
        kept += data[:room]
        if len(data) > room:
            lost.add(descriptor)
        return True if data else None

    def kill(self, group):
        """End the run's session, and whatever left it, as far as this sandbox lets us see processes."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                os.killpg(group, signal.SIGKILL)
            alive = orphans(os.getpid(), {self.nursery_pid})
            for pid in alive:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            collect_dead(self.nursery_pid)
            if not alive:
                return
            time.sleep(0.001)

    def clear_up(self, folder):
        """Remove the tree of a run that is over and all that it left in the places of all."""
        self.pending.remove(folder)
        for name in self.names(self.root) if is_private(self.root) else ():
            if not any(other == name or other.startswith(f"{name}/") for other in self.pending):
                remove(os.path.join(self.root, name))
        for place, before in self.before.items():
            for name in set(self.names(place)) - before:
                remove(os.path.join(place, name))


class Patience:
    """How long a run is waited for: to a deadline, or until nothing of it has done anything, or wanted to, for so long.

    Unlike the time by the clock, ``idle_seconds`` (None: nobody asks) do not depend on how busy the machine is.
    """

    def __init__(self, nursery_pid, deadline, idle_seconds):
        self.nursery_pid = nursery_pid
        self.deadline = deadline
        self.idle_seconds = idle_seconds
        self.ticks = None
        self.since = self.looked = time.monotonic()

    def pause(self):
        """How long to wait until the next look."""
        left = max(0.0, self.deadline - time.monotonic())
        return left if self.idle_seconds is None else min(left, LOOK_SECONDS)

    def is_over(self):
        """Look, at processes at most every ``LOOK_SECONDS``."""
        now = time.monotonic()
        if self.idle_seconds is None or now - self.looked < LOOK_SECONDS:
            return now >= self.deadline
        ticks = ticks_used(orphans(os.getpid(), {self.nursery_pid}))
        # One tick, of a hundred in a second, is what waking up and looking at a clock may need.
        if ticks is None or self.ticks is None or not 0 <= ticks - self.ticks <= 1:
            self.since = now
        self.ticks, self.looked = ticks, now
        return now >= self.deadline or now - self.since >= self.idle_seconds


def ticks_used(pids):
    """Processor time of all threads of these processes; None if one runs or would, or where there is none."""
    ticks = 0
    for pid in pids:
        for thread in Keeper.names(f"/proc/{pid}/task"):
            try:
                with open(f"/proc/{pid}/task/{thread}/stat", encoding="utf-8", errors="replace") as handle:
                    fields = handle.read().rpartition(")")[2].split()
            except OSError:
                return None
            if fields[0] in "RD":
                return None
            ticks += int(fields[11]) + int(fields[12])
    return ticks if pids else None


def write_some(descriptor, data):
    """Write what fits now; the answer is the rest."""
    try:
        return data[os.write(descriptor, data[: 1 << 16]) :]
    except BlockingIOError:
        return data
    except OSError:  # it ended without reading: its own affair
        return b""


def last_line(text):
    """What a report shows of the last words."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:200] if lines else ""


def orphans(keeper, spared):
    """Living processes below the keeper, but for ``spared``; none where there is no ``/proc``."""
    children: dict[int, list[tuple[int, str]]] = {}
    for name in Keeper.names("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as handle:
                    state, parent = handle.read().rpartition(")")[2].split()[:2]
            except (OSError, ValueError):
                continue
            children.setdefault(int(parent), []).append((int(name), state))
    found, queue = [], [keeper]
    while queue:
        for pid, state in children.get(queue.pop(), []):
            queue.append(pid)
            if pid not in spared and state not in "ZX":
                found.append(pid)
    return found


def collect_dead(nursery_pid):
    """Take the exit codes of orphans; the nursery's own state is not touched."""
    try:
        while True:
            found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if found is None or found.si_pid == nursery_pid:
                return
            os.waitpid(found.si_pid, os.WNOHANG)
    except OSError:
        return


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
    try:
        if os.path.islink(path) or not os.path.isdir(path):
            os.unlink(path)
            return
        os.chmod(path, 0o700)
        for folder, names, _ in os.walk(path):
            for name in names:
                if not os.path.islink(os.path.join(folder, name)):
                    os.chmod(os.path.join(folder, name), 0o700)
        shutil.rmtree(path, ignore_errors=True)
    except OSError:
        shutil.rmtree(path, ignore_errors=True)


def adopt_orphans():
    """Become the parent of whatever leaves its session, so that it can be found."""
    with contextlib.suppress(ImportError, OSError, AttributeError):
        import ctypes

        ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER


def serve(nursery, make_channel):
    """Run the batch that standard input asks for; one JSON line for each run that was seen to its end."""
    mine, theirs = socket.socketpair()
    nursery_pid = os.fork()
    if nursery_pid == 0:
        mine.close()
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
        os.dup2(2, 1)
        try:
            nursery(theirs)
        finally:
            os._exit(1)
    theirs.close()
    descriptor = os.dup(1)
    os.set_inheritable(descriptor, False)
    os.dup2(2, 1)
    orders = json.loads(sys.stdin.buffer.read())
    channel = make_channel(descriptor, orders["nonce"])
    mine.sendall(json.dumps(orders["nursery"]).encode() + b"\n")
    adopt_orphans()
    keeper = Keeper(mine, nursery_pid, orders)
    way = keeper.answer(time.monotonic() + orders["preload_seconds"])
    if way is not None:
        channel.send("started", way=way)
        for number, order in enumerate(orders["runs"]):
            result = keeper.run(order)
            if result is None:
                break
            channel.send("run", number=number, **result)
            keeper.clear_up(order["folder"])
    os._exit(0)
