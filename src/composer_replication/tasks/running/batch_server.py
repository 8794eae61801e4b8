"""Runs inside the sandbox behind ``pytest_runner.py``: imports once, forks off each run, answers for it, ends one that hangs.

Not imported by the package and never placed in a tree. Code of a tree runs in the forks alone.
"""

import contextlib
import json
import os
import select
import shutil
import signal
import sys
import tempfile
import time

PATIENCE_SECONDS = 10.0
LOOK_SECONDS = 0.25
END_SECONDS = 0.004
"""How often it is asked whether a run has ended."""
PLACES_OF_ALL = ("/tmp", "/dev/shm")
STAGE = "run"
"""What the folder of a run is called while the run lasts: so all of them see their tree at one path."""
COMPILED = "compiled"
"""The folder beside it that keeps code for later runs."""


class Lookout:
    """Notes whether anything asked for a module that the trees have: it would come from elsewhere."""

    def __init__(self, names):
        self.names = frozenset(names)
        self.seen = []

    def find_spec(self, name, path=None, _target=None):
        if path is None and name in self.names:
            self.seen.append(name)


def import_quietly(name, attributes=()):
    """Import a module as a test file would; what cannot be imported fails again, and is seen, in the run."""
    import importlib

    try:
        module = importlib.import_module(name)
    except Exception:
        return
    for attribute in attributes:
        if not hasattr(module, attribute):
            import_quietly(f"{name}.{attribute}")


def preload(wanted, lookout):
    """Import the test runner, its plugins and what the trees import; False where a fork would not do."""
    import importlib.metadata

    import pytest  # noqa: F401  a lone run, too, imports it before the tree can be imported from

    sys.meta_path.insert(0, lookout)
    try:
        from _pytest.config import default_plugins

        for name in default_plugins:
            if f"no:{name}" not in wanted["blocked"]:
                import_quietly(f"_pytest.{name}")
        for entry in importlib.metadata.entry_points(group="pytest11"):
            if f"no:{entry.name}" not in wanted["blocked"]:
                import_quietly(entry.module)
        for name, attributes in wanted["modules"]:
            import_quietly(name, attributes)
    except BaseException:
        return False
    finally:
        sys.meta_path.remove(lookout)
    return not lookout.seen and not has_threads()


def share_compiled(folder, tree):
    """Let a run find what one before it compiled: files of the tree with the same path and bytes.

    What fails or warns does so again in each run.
    """
    import hashlib
    import marshal
    import warnings
    from importlib.machinery import SourceFileLoader

    from _pytest.assertion import rewrite

    os.mkdir(folder)
    compile_source = SourceFileLoader.source_to_code

    def shared(kind, path, source, make):
        key = hashlib.sha256(b"%b %b\0%b" % (kind, os.fsencode(path), source)).hexdigest()
        place = os.path.join(folder, key)
        with contextlib.suppress(OSError, EOFError, ValueError, TypeError), open(place, "rb") as file:
            return marshal.load(file)  # noqa: S302  of this batch, whose runs are not isolated
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            code = make()
        if told:
            return make()
        with contextlib.suppress(OSError, ValueError):
            with open(f"{place}.new", "wb") as file:
                marshal.dump(code, file)
            os.replace(f"{place}.new", place)
        return code

    def source_to_code(loader, data, path, *more, **options):
        def make():
            return compile_source(loader, data, path, *more, **options)

        is_ours = (
            type(data) is bytes and type(path) is str and path.startswith(tree) and not (more or options)
        )
        return shared(b"module", path, data, make) if is_ours else make()

    SourceFileLoader.source_to_code = source_to_code  # type: ignore[method-assign,assignment]
    rewrite_test = rewrite._rewrite_test

    def rewrite_shared(path, config):
        if not str(path).startswith(tree) or not sys.dont_write_bytecode:  # else what it gives beside is used
            return rewrite_test(path, config)
        with open(path, "rb") as file:
            source = file.read()
        return os.stat(path), shared(b"test", path, source, lambda: rewrite_test(path, config)[1])

    rewrite._rewrite_test = rewrite_shared


def has_threads():
    """Whether this process has more than one thread; without ``/proc``, whether it could have."""
    import threading

    try:
        return threading.active_count() > 1 or len(os.listdir("/proc/self/task")) > 1
    except OSError:
        foreign = (getattr(module, "__file__", None) or "" for module in list(sys.modules.values()))
        return threading.active_count() > 1 or any(
            name.endswith(".so") and "site-packages" in name for name in foreign
        )


class Server:
    """Starts the runs, keeps their time, collects what they say, clears up behind them.

    ``run_tests`` is what a fork does; ``own_descriptor`` is not to be left to a run, but for one that is alone: what it
    says goes to the sandbox's own streams, and is known also where the sandbox ends all of it. Such a run also leads no
    session and cannot write beside its tree, as where answers are graded: a test that would need that fails here, too.
    """

    def __init__(self, orders, run_tests, make_channel, own_descriptor):
        self.run_tests = run_tests
        self.make_channel = make_channel
        self.is_alone = orders["is_alone"]
        self.own_descriptor = own_descriptor
        self.keep_bytes = orders["keep_bytes"]
        self.root = os.getcwd()
        self.pending = [COMPILED, *(run["folder"] for run in orders["runs"])]
        places = {*PLACES_OF_ALL, os.environ["HOME"], os.environ["TMPDIR"]}
        self.before = {place: set(names_in(place)) for place in places if is_private(place)}

    def run(self, order):
        """One run, with its tree at the path of all; None when that path is lost."""
        number, _, tree = order["folder"].partition("/")
        away, stage = (os.path.join(self.root, name) for name in (number, STAGE))
        try:
            os.rename(away, stage)
        except OSError:
            return None
        above = (self.root, stage) if self.is_alone and is_private(self.root) else ()
        for place in above:
            os.chmod(place, 0o500)
        result = self.attend(order, os.path.join(stage, tree))
        with contextlib.suppress(OSError):
            for place in above:
                os.chmod(place, 0o700)
            os.rename(stage, away)
        return result

    def attend(self, order, folder):
        """See one run from its start to its last process; its streams are files that have no name."""
        started = time.monotonic()
        request = order["request"]
        is_heard = self.is_alone and order["each_seconds"] is not None
        told, tell = os.pipe() if is_heard else (None, None)
        with contextlib.ExitStack() as stack:
            asked, records, words = (
                stack.enter_context(tempfile.TemporaryFile(buffering=0, dir=os.environ["TMPDIR"]))
                for _ in range(3)
            )
            asked.write(json.dumps({**request, "tell": tell}).encode())
            asked.seek(0)
            pid = os.fork()
            if pid == 0:
                if not self.is_alone:
                    os.setsid()
                kept = [records.fileno(), words.fileno()]
                streams = [asked.fileno(), *([self.own_descriptor, 2] if self.is_alone else kept)]
                become_run(folder, streams, self.own_descriptor, self.run_tests)
            if tell is not None:
                os.close(tell)
            patience = Patience(order, told)
            code, why = wait_for(pid, patience)
            if code is None:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            end_all(pid)
            is_stuck = code is None and patience.told is not None
            if is_stuck:
                name = patience.name.decode("utf-8", "replace")
                self.make_channel(self.own_descriptor, request["nonce"]).send("stuck", id=name, text=why)
            if told is not None:
                os.close(told)
            said, spoken = self.read(records), self.read(words)
        return {
            "exit_code": 137 if code is None else 128 - code if code < 0 else code,
            "stdout": said[: self.keep_bytes].decode(errors="replace"),
            "last_words": last_line(spoken[: self.keep_bytes].decode(errors="replace")),
            "truncated": max(len(said), len(spoken)) > self.keep_bytes,
            "timed_out": code is None and not is_stuck,
            "seconds": time.monotonic() - started,
        }

    def read(self, stream):
        """What a run wrote, up to a byte more than is kept."""
        stream.seek(0)
        return stream.read(self.keep_bytes + 1)

    def clear_up(self, folder):
        """Remove the tree of a run that is over and all that it left in the places of all."""
        self.pending.remove(folder)
        for name in names_in(self.root) if is_private(self.root) else ():
            if not any(other == name or other.startswith(f"{name}/") for other in self.pending):
                remove(os.path.join(self.root, name))
        for place, before in self.before.items():
            for name in set(names_in(place)) - before:
                remove(os.path.join(place, name))


class Patience:
    """How long a run is waited for: its time, and until nothing of it has done anything, or wanted to, for ``idle_seconds``.

    Unlike the time by the clock, these do not depend on how busy the machine is. None: for ever. Where a run tells on the
    descriptor ``told`` what it begins, each of its tests and files has ``each_seconds``; ``name`` is the one at work.
    """

    def __init__(self, order, told):
        self.seconds, self.idle_seconds = order["timeout_seconds"], order["idle_seconds"]
        self.each_seconds, self.told = order["each_seconds"], told
        self.name, self.ticks = b"", None
        self.begun = self.each_begun = self.since = self.looked = time.monotonic()

    def hear(self, now):
        """Whether the run began another test or file."""
        if self.told is not None and select.select([self.told], [], [], 0)[0]:
            data = os.read(self.told, 1 << 16)
            if data:
                self.name, self.ticks = data[:-1].rpartition(b"\n")[2], None
                self.each_begun = self.since = self.looked = now

    def why_over(self):
        """Look, at processes at most every ``LOOK_SECONDS``; empty while it is not over."""
        now = time.monotonic()
        self.hear(now)
        if now - self.begun >= self.seconds:
            self.told = None  # the time of all of it: no fault of the test that is at work
            return "it ran out of time"
        if self.told is not None and now - self.each_begun >= self.each_seconds:
            return f"it ran longer than {self.each_seconds:g} s"
        if self.idle_seconds is None or now - self.looked < LOOK_SECONDS:
            return ""
        ticks = ticks_used(orphans(os.getpid()))
        # One tick, of a hundred in a second, is what waking up and looking at a clock may need.
        if ticks is None or self.ticks is None or not 0 <= ticks - self.ticks <= 1:
            self.since = now
        self.ticks, self.looked = ticks, now
        is_over = now - self.since >= self.idle_seconds
        return f"it waited {self.idle_seconds:g} s for something that did not come" if is_over else ""


def wait_for(pid, patience):
    """The exit code of a run; where the patience with it was over first, None and why."""
    while True:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status), ""
        why = patience.why_over()
        if why:
            return None, why
        time.sleep(END_SECONDS)


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


def ticks_used(pids):
    """Processor time of all threads of these processes; None if one runs or would, or where there is none."""
    ticks = 0
    for pid in pids:
        for thread in names_in(f"/proc/{pid}/task"):
            try:
                with open(f"/proc/{pid}/task/{thread}/stat", encoding="utf-8", errors="replace") as handle:
                    fields = handle.read().rpartition(")")[2].split()
            except OSError:
                return None
            if fields[0] in "RD":
                return None
            ticks += int(fields[11]) + int(fields[12])
    return ticks if pids else None


def last_line(text):
    """What a report shows of the last words."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:200] if lines else ""


def orphans(root):
    """Living processes below one; none where there is no ``/proc``."""
    children: dict[int, list[tuple[int, str]]] = {}
    for name in names_in("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as handle:
                    state, parent = handle.read().rpartition(")")[2].split()[:2]
            except (OSError, ValueError):
                continue
            children.setdefault(int(parent), []).append((int(name), state))
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


def become_run(folder, descriptors, not_ours, run_tests):
    """Be what a lone runner is: its folder, its streams, nothing else; never returns."""
    code = 1
    try:
        os.chdir(folder)
        for number, descriptor in enumerate(descriptors):
            os.dup2(descriptor, number)
        for descriptor in {*descriptors, not_ours} - {2}:
            os.close(descriptor)
        if "PWD" in os.environ:
            os.environ["PWD"] = folder
        sys.argv[1:] = []
        run_tests()
    except SystemExit as error:  # what the interpreter does with it at the end of a program
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if error.code is not None and not isinstance(error.code, int):
            print(error.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        except BaseException:
            code = 120  # as the interpreter says it
        os._exit(code & 0xFF)


def serve(run_tests, make_channel):
    """Run the batch that standard input asks for; one JSON line for each run that was seen to its end, none where a fork would not do."""
    import gc

    descriptor = os.dup(1)
    os.set_inheritable(descriptor, False)
    os.dup2(2, 1)
    orders = json.loads(sys.stdin.buffer.read())
    channel = make_channel(descriptor, orders["nonce"])
    wanted = orders["preload"]
    if wanted is not None:
        # an import that never ends ends the batch: its runs are done without it then
        signal.alarm(int(wanted["seconds"]))
        if not preload(wanted, Lookout(wanted["tree_names"])):
            os._exit(0)
        signal.alarm(0)
        if len(orders["runs"]) > 1:
            share_compiled(os.path.join(os.getcwd(), COMPILED), os.path.join(os.getcwd(), STAGE, "tree", ""))
    gc.collect()
    gc.freeze()
    adopt_orphans()
    channel.send("started")
    server = Server(orders, run_tests, make_channel, descriptor)
    for number, order in enumerate(orders["runs"]):
        result = server.run(order)
        if result is None:
            break
        channel.send("run", number=number, **result)
        server.clear_up(order["folder"])
    os._exit(0)
