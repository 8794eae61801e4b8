"""Runs inside the sandbox, started by ``pytest_runner.hand_over``: calls functions of a tree with recorded arguments.

Not imported by the package and never placed in a tree. Inputs come on standard input,
canonical digests go out; what they ought to be is never here. Each job runs in a child
process of its own that imports the tree itself, so no job sees the state of another. A call
that hangs or crashes costs itself: another child goes on behind it (``run_to_the_end``). Every
digest is written before the next call begins.
"""

import ast
import base64
import contextlib
import importlib
import itertools
import math
import mmap
import os
import pickle
import random
import resource
import signal
import sys
import time
import traceback
import types
from typing import Any

from composer_replication.tasks.twin.call_mutation import CallPool
from composer_replication.tasks.twin.call_pickle import MODULE as PICKLER
from composer_replication.tasks.twin.call_pickle import load_cloudpickle, make_dumps
from composer_replication.tasks.twin.canonical_encoding import OpaqueValue, Work, digest, encode, node

# A limit is processor time, which a busy machine hardly changes; for what sleeps, so many times as much.
WALL_FACTOR = 20
FEW = 10  # mutated calls without which a function gets no twin
# Encoded while recorded calls are made again, and as much while they are mutated, about two seconds each: a function
# that has few of a kind by then has enough; for mutated calls one that has not gets three times as much.
MAX_NODES = 1_000_000
LOST = ("lost", "")  # an earlier child died of this call
NOT_STABLE = (MemoryError, RecursionError)  # they depend on what else the process holds


def module_name(path, roots):
    """The name under which tests import a file of the tree."""
    prefix = next((f"{root}/" for root in roots if root != "." and path.startswith(f"{root}/")), "")
    return path.removeprefix(prefix).removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def find_function(path, symbol, module_name):
    """The innermost function behind a qualified name: decorators and descriptors are taken off."""
    value = importlib.import_module(module_name)
    for part in symbol.split("."):
        value = vars(value)[part]
    todo: list[Any] = [value]
    seen: set[int] = set()
    while todo:
        found = todo.pop(0)
        if id(found) in seen or len(seen) > 200:
            continue
        seen.add(id(found))
        if isinstance(found, types.FunctionType):
            code = found.__code__
            if code.co_qualname == symbol and code.co_filename.endswith("/" + path):
                return found
            for cell in found.__closure__ or ():
                with contextlib.suppress(ValueError):  # not filled yet
                    todo.append(cell.cell_contents)
        for name in ("__wrapped__", "__func__", "fget", "func", "_partial", "_func"):
            inner = getattr(found, "__dict__", {}).get(name)
            inner = getattr(found, name, None) if inner is None and not isinstance(found, type) else inner
            if callable(inner):
                todo.append(inner)
    if not callable(value):
        raise LookupError(symbol)  # noqa: TRY004  what the tree holds is no argument of ours
    return value


class Job:
    """One function, one task: replay, mutate or constants."""

    def __init__(self, request, number, send, steps):
        self.request, self.number, self.send, self.steps = request, number, send, steps
        self.job = request["jobs"][number]
        self.twin = request["twins"][self.job["twin"]]
        self.blobs = [base64.b64decode(blob) for blob in self.twin["blobs"]]
        self.constants = [ast.literal_eval(text) for text in self.job.get("constants", ())]
        # Whoever changes the modules in the process changes nothing here.
        self.encode, self.digest, self.loads = encode, digest, pickle.loads

    def run(self):
        for path, text in self.job.get("overlay", {}).items():
            with open(path, "w", encoding="utf-8", newline="") as file:
                file.write(text)
        self.dumps = make_dumps(sys.modules[PICKLER], os.getcwd(), self.request["max_bytes"])
        try:
            module = module_name(self.twin["path"], self.request["import_roots"])
            self.function = find_function(self.twin["path"], self.twin["symbol"], module)
        except BaseException as error:
            problem = f"{type(error).__name__}: {error}"[:300]
            self.send("done", job=self.number, line=0, error=problem, seconds=0)
            return
        line = getattr(getattr(self.function, "__code__", None), "co_firstlineno", 0)
        started = time.process_time()
        # What is mutated is told at the end alone: of a child that dies before, the next one knows nothing and begins anew.
        found = self._mutate() if self.job["mode"] == "mutate" else self._replay()
        seconds = time.process_time() - started
        self.send("done", job=self.number, line=line, error="", seconds=seconds, **found)

    def _replay(self):
        order = range(len(self.blobs))
        begin = max(self.steps.fatal, default=-1) + 1  # earlier children have told what stands before
        self.steps.now[0] = begin - 1
        for index in list(reversed(order) if self.job.get("backwards") else order)[begin:]:
            _, digest = self.outcome(self.blobs[index])
            self.send("vector", job=self.number, index=index, digest=digest)
        return {}

    def outcome(self, blob):
        """``(kind, digest)`` of what it returns (ret) or raises (exc); any other kind says why there is no digest."""
        return self.steps.limited(self._outcome, blob) or LOST

    def _outcome(self, blob):
        try:
            args, kwargs = self.loads(blob)
        except BaseException:
            return ("unloadable", "")
        try:
            if self.constants:  # in the place of the function; a digest for each, in one text
                given = self.encode((args, kwargs), is_result=False)
                digests = [self.digest(node("ret", self.encode(one), given)) for one in self.constants]
                return ("ret", " ".join(digests))
            result = self.encode(self.function(*args, **kwargs))
            return ("ret", self.digest(node("ret", result, self.encode((args, kwargs), is_result=False))))
        except OpaqueValue:
            return ("opaque", "")
        except NOT_STABLE:
            return ("unstable", "")
        except BaseException as error:
            return ("exc", self.digest(node("exc", repr(type(error).__name__))))

    def _in_time(self, work):
        """What some work gives; None where it is left out or raises."""
        with contextlib.suppress(Exception):
            return self.steps.limited(work)
        return None

    def _input_digest(self, blob):
        """What tells this input from others; None for one that cannot be told."""
        return self._in_time(
            lambda: self.digest(self.encode(self.loads(blob), is_result=False, pickled=self.dumps))
        )

    def _mutate(self):
        """Outcome and input of each recorded call, and the mutated calls with theirs."""
        recorded: list[list[str]] = []
        usable: list[bytes] = []
        for blob in self.blobs:
            if Work.num_nodes > MAX_NODES and len(usable) >= FEW:
                break
            _, digest = self.outcome(blob)
            recorded.append([digest, self._input_digest(blob)])
            if digest:
                usable.append(blob)
        Work.num_nodes = 0  # what is mutated has a budget of its own
        seen = {known for _, known in recorded}
        groups: dict[str, list[bytes]] = {}
        kept: list[bytes] = []
        draw = random.Random(self.job["seed"])  # noqa: S311  a sample, not a secret
        # A function of one small number has few neighbours: where they are too few, theirs are tried too.
        for wanted in (4 * self.job["wanted"], 2 * FEW, 2 * FEW):
            if usable and len(kept) < FEW and not self.steps.is_enough:
                pool = CallPool([*usable, *kept], self.loads)
                self._add_mutated(pool, draw, (seen, groups, kept), wanted)
        # One call of each outcome in turn, so that common outcomes do not crowd out rare ones.
        rows = [[(blob, digest) for blob in blobs] for digest, blobs in groups.items()]
        in_turn = [call for turn in itertools.zip_longest(*rows) for call in turn if call is not None]
        chosen = in_turn[: self.job["wanted"]]
        vectors = [[base64.b64encode(blob).decode(), digest] for blob, digest in chosen]
        return {"recorded": recorded, "mutated": vectors}

    def _add_mutated(self, pool, draw, found, wanted):
        seen, groups, kept = found

        def change():
            call = pool.mutated(draw)
            return None if call is None else self.dumps(call)

        for _ in range(self.job["tries"]):
            is_spent = Work.num_nodes > (MAX_NODES if len(kept) >= FEW else 3 * MAX_NODES)
            if self.steps.is_enough or is_spent or len(kept) >= wanted:
                return
            blob = self._in_time(change)
            known = None if blob is None else self._input_digest(blob)
            if known is None or known in seen:
                continue
            seen.add(known)
            kind, digest = self.outcome(blob)
            if kind == "ret":
                kept.append(blob)
                groups.setdefault(digest, []).append(blob)


def run_job(request, number, send):
    """Run a job in a child process, and say so when it took too long."""

    def work(steps):
        try:
            Job(request, number, send, steps).run()
        except BaseException:
            traceback.print_exc()
            os._exit(1)

    is_retold = request["jobs"][number]["mode"] == "mutate"
    if run_to_the_end(work, request["job_seconds"], request["call_seconds"], is_retold=is_retold):
        problem = f"the calls ran longer than {request['job_seconds']:g} s"
        send("done", job=number, line=0, error=problem, seconds=0)


# --- One bad call costs itself alone.
# A call may hang or die inside C code, or catch whatever is raised to stop it. So each step has timers of the kernel, whose
# signals end the process. How far it came lies in memory that parent and child share, and another child leaves out the step
# of which an earlier one died.

LOADING, DONE = -1, -2
MAX_LOST = 11  # calls that took their process along; past the 5 % of 200 that may be wrong


class Steps:
    """Numbers what a job does. ``fatal`` are the steps of which earlier children died."""

    def __init__(self, fatal, seconds):
        # One number: the step that is done now, or LOADING or DONE.
        self.now = memoryview(mmap.mmap(-1, 8)).cast("q")
        self.now[0] = LOADING
        self.fatal, self.seconds = fatal, seconds
        self.set_timer = signal.setitimer  # what a tree makes of it later changes nothing here

    @property
    def is_enough(self):
        """Whether so many calls were lost that no more are made."""
        return len(self.fatal) >= MAX_LOST and self.now[0] >= self.fatal[-1]

    def limited(self, work, *arguments):
        """What the next step gives; None for one that is left out."""
        self.now[0] += 1
        if self.now[0] in self.fatal:
            return None
        self._limit(self.seconds)
        try:
            return work(*arguments)
        finally:
            self._limit(0)

    def _limit(self, seconds):
        self.set_timer(signal.ITIMER_PROF, seconds)
        self.set_timer(signal.ITIMER_REAL, WALL_FACTOR * seconds)


def run_to_the_end(work, cpu_seconds, step_seconds, *, is_retold):
    """Do ``work(steps)`` in children, one after the other until one comes to the end; whether they ran too long.

    The limits are processor time of all children together and of one step, which by the clock may take ``WALL_FACTOR``
    times as long. With ``is_retold`` each child begins at the beginning, so that after the last death one more can tell of
    what there was until then.
    """
    fatal: list[int] = []
    latest = _used_by_children() + cpu_seconds
    deadline = time.monotonic() + WALL_FACTOR * cpu_seconds
    while len(fatal) < MAX_LOST + is_retold:
        steps = Steps(fatal, step_seconds)
        _run_child(work, steps, latest - _used_by_children(), deadline)
        now = steps.now[0]
        if now != DONE and (_used_by_children() >= latest or time.monotonic() > deadline):
            return True
        if now < 0 or now in fatal:
            break
        fatal.append(now)
    return False


def _run_child(work, steps, cpu_seconds, deadline):
    child = os.fork()
    if child == 0:
        try:
            os.setsid()
            lower_limit(resource.RLIMIT_CPU, math.ceil(cpu_seconds))
            work(steps)
            steps.now[0] = DONE
        finally:
            os._exit(0)
    wait = 0.001
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)  # the next turn waits for it
        time.sleep(wait)
        wait = min(0.02, wait * 1.5)


def lower_limit(kind, most):
    """Lower a limit of this process; one that is lower already stays."""
    _, hard = resource.getrlimit(kind)
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(kind, (most, most))


def _used_by_children():
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main(request, send):
    """Do the jobs of a request."""
    root = os.getcwd()
    load_cloudpickle(request["cloudpickle"])
    sys.path[:0] = [os.path.normpath(os.path.join(root, path)) for path in request["import_roots"]]
    # Below what the sandbox may use: past that limit the run of all is over, past this one a call is.
    lower_limit(resource.RLIMIT_AS, request["address_bytes"])
    lower_limit(resource.RLIMIT_DATA, request["memory_bytes"])
    send("ready")
    for number in range(len(request["jobs"])):
        run_job(request, number, send)
    send("end")
    os._exit(0)
