"""Runs inside the sandbox, started by ``inside_channel``: calls functions of a tree with recorded arguments.

Not imported by the package and never placed in a tree. Inputs come on standard input,
canonical digests go out; what they ought to be is never here. Each job runs in a child
process of its own that imports the tree itself, so no job sees the state of another. A call
that hangs or crashes costs itself: another child goes on behind it (``call_steps``). Every
digest is written before the next call begins.
"""

import ast
import base64
import functools
import importlib
import inspect
import os
import random
import resource
import signal
import sys
import time
import traceback
import types
from typing import Any

# A limit is processor time, which a busy machine hardly changes; for what sleeps, so many times as much.
WALL_FACTOR = 20
FEW = 10  # mutated calls without which a function gets no twin
# Encoded while recorded calls are made again, and as much while they are mutated, about two seconds each: a function
# that has few of a kind by then has enough; for mutated calls one that has not gets three times as much.
MAX_NODES = 1_000_000
LOST = ("lost", "")  # an earlier child died of this call
NOT_STABLE = (MemoryError, RecursionError)  # they depend on what else the process holds


class Late(BaseException):
    """A call took too long. No ``Exception``: code that swallows those does not swallow this one."""


def module_name(path, roots):
    """The name under which tests import a file of the tree."""
    prefix = next((f"{root}/" for root in roots if root != "." and path.startswith(f"{root}/")), "")
    return path.removeprefix(prefix).removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def find_function(path, symbol, module_name):
    """The innermost function behind a qualified name: decorators and descriptors are taken off.

    Raises:
        Exception: what importing the module raises.
        LookupError: there is no such name, or nothing there that can be called.
    """
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
            todo += closure_values(found)
        for name in ("__wrapped__", "__func__", "fget", "func", "_partial", "_func"):
            inner = getattr(found, "__dict__", {}).get(name)
            inner = getattr(found, name, None) if inner is None and not isinstance(found, type) else inner
            if callable(inner):
                todo.append(inner)
    if not callable(value):
        raise LookupError(symbol)  # noqa: TRY004  what the tree holds is no argument of ours
    return value


def closure_values(function):
    """What a function keeps of the scopes around it."""
    values = []
    for cell in function.__closure__ or ():
        try:
            values.append(cell.cell_contents)
        except ValueError:  # not filled yet
            continue
    return values


def start_clocks(seconds):
    """Ring after so much processor time, and again and again: a candidate may swallow the first."""
    signal.setitimer(signal.ITIMER_PROF, seconds, 0.05)
    signal.setitimer(signal.ITIMER_REAL, WALL_FACTOR * seconds, 0.05)


def stop_clocks():
    """Both at once."""
    signal.setitimer(signal.ITIMER_PROF, 0)
    signal.setitimer(signal.ITIMER_REAL, 0)


class Replay:
    """Calls one function and encodes what comes of it."""

    def __init__(self, request, function, encoding, loads, steps):
        self.steps = steps
        self.function = function
        self.encode, self.digest = encoding.encode, encoding.digest
        self.opaque = encoding.OpaqueValue
        self.loads = loads
        self.constants = []
        self.seconds = request["call_seconds"]
        self.is_late = False
        signal.signal(signal.SIGALRM, self._on_alarm)
        signal.signal(signal.SIGPROF, self._on_alarm)

    def _on_alarm(self, _number, _frame):
        self.is_late = True
        raise Late

    def outcome(self, blob):
        """``(kind, digest)``; the kind is ret, exc, opaque, timeout, unstable, unloadable or lost."""
        if not self.steps.begin(self.seconds):
            return LOST
        self.is_late = False
        found = ("timeout", "")
        try:
            start_clocks(self.seconds)
            try:
                found = self._outcome(blob)
            finally:
                stop_clocks()
        except Late:
            stop_clocks()  # it may have come before both were stopped
        if self.is_late:
            self.steps.num_lost += 1
            return ("timeout", "")
        return found

    def _outcome(self, blob):
        try:
            args, kwargs = self.loads(blob)
        except Late:
            raise
        except BaseException:
            return ("unloadable", "")
        try:
            if self.constants:  # in the place of the function; a digest for each, in one text
                given = self.encode((args, kwargs), is_result=False)
                return (
                    "ret",
                    " ".join(self.digest(("ret", self.encode(one), given)) for one in self.constants),
                )
            result = self.function(*args, **kwargs)
            encoded: tuple[Any, ...] = (
                "ret",
                self.encode(result),
                self.encode((args, kwargs), is_result=False),
            )
        except self.opaque:
            return ("opaque", "")
        except NOT_STABLE:
            return ("unstable", "")
        except Late:
            raise
        except BaseException as error:
            encoded = ("exc", type(error).__name__)
        return (encoded[0], self.digest(encoded))

    def bound(self, args, kwargs):
        """Arguments by parameter, defaults filled in: one call written in two ways is one input."""
        try:
            bound = inspect.signature(self.function, follow_wrapped=False).bind(*args, **kwargs)
        except (TypeError, ValueError):
            return [args, kwargs]
        bound.apply_defaults()
        return dict(bound.arguments)

    def input_digest(self, blob):
        """What tells this input from others; None for one that cannot be told."""
        if not self.steps.begin(self.seconds):
            return None
        try:
            start_clocks(self.seconds)
            try:
                values = self.bound(*self.loads(blob))
                return self.digest(self.encode(values, is_result=False, with_code=True))
            finally:
                stop_clocks()
        except (Exception, Late):
            return None


class Job:
    """One function, one task: replay, mutate, constants or answers."""

    def __init__(self, request, number, send, steps):
        self.request = request
        self.number = number
        self.send = send
        self.steps = steps
        self.job = request["jobs"][number]
        self.twin = request["twins"][self.job["twin"]]
        self.blobs = [base64.b64decode(blob) for blob in self.twin["blobs"]]

    def run(self):
        sources = None
        if self.job["mode"] == "mutate":
            sources = sys.modules["unseeded_random"].RandomSources()
        for path, text in self.job.get("overlay", {}).items():
            with open(path, "w", encoding="utf-8", newline="") as file:
                file.write(text)
        encoding = sys.modules["canonical_encoding"]
        self.work = encoding.Work
        call_pickle = sys.modules["call_pickle"]
        pickler = sys.modules[call_pickle.MODULE]
        self.dumps, loads = call_pickle.make_dumps(pickler, os.getcwd(), self.request["max_bytes"])
        try:
            module = module_name(self.twin["path"], self.request["import_roots"])
            function = find_function(self.twin["path"], self.twin["symbol"], module)
        except BaseException as error:
            self.send(
                "done", job=self.number, line=0, error=f"{type(error).__name__}: {error}"[:300], seconds=0
            )
            return
        line = getattr(getattr(function, "__code__", None), "co_firstlineno", 0)
        self.replay = Replay(self.request, function, encoding, loads, self.steps)
        started = time.process_time()
        if self.job["mode"] == "mutate":
            self._mutate(sources)
        elif self.job["mode"] == "answers":
            self._answer()
        else:
            self.replay.constants = [ast.literal_eval(text) for text in self.job.get("constants", ())]
            self._replay_all()
        seconds = time.process_time() - started
        self.send("done", job=self.number, line=line, error="", seconds=seconds)

    def _replay_all(self):
        order = range(len(self.blobs))
        for index in self._left(reversed(order) if self.job.get("backwards") else order):
            kind, digest = self.replay.outcome(self.blobs[index])
            self.send("vector", job=self.number, index=index, kind=kind, digest=digest)
            self.steps.num_told += 1
            if self.steps.is_enough:
                return

    def _left(self, order):
        """What no earlier child has told; the first may be the one of which the last child died."""
        self.steps.now = self.steps.num_told - 1
        return list(order)[self.steps.num_told :]

    def _mutate(self, sources):
        mutation = sys.modules["call_mutation"]
        steady = sys.modules["unseeded_random"].steady_outcome
        outcome = functools.partial(steady, sources, self.replay.outcome)
        self.steps.num_lost = len(self.steps.fatal)  # calls that were late before are made again
        recorded = []
        usable: list[bytes] = []
        for blob in self.blobs:
            if self.work.num_nodes > MAX_NODES and len(usable) >= FEW:
                break
            kind, digest = outcome(blob)
            recorded.append([kind, digest, self.replay.input_digest(blob)])
            if kind in ("ret", "exc"):
                usable.append(blob)
        self.work.num_nodes = 0  # what is mutated has a budget of its own
        seen = {known for _, _, known in recorded}
        groups: dict[str, list[bytes]] = {}
        draw = random.Random(self.job["seed"])  # noqa: S311  a sample, not a secret
        kept: list[bytes] = []
        # A function of one small number has few neighbours: where they are too few, theirs are tried too.
        for wanted in (4 * self.job["wanted"], 2 * FEW, 2 * FEW):
            if usable and len(kept) < FEW and not self.steps.is_enough:
                pool = mutation.CallPool([*usable, *kept], self.replay.loads)
                self._add_mutated(pool, draw, outcome, (seen, groups, kept), wanted)
        chosen = round_robin(groups, self.job["wanted"])
        vectors = [[base64.b64encode(blob).decode(), digest] for blob, digest in chosen]
        # At the end alone: a child that dies before it has said nothing, and the next one begins anew.
        self.send("recorded", job=self.number, outcomes=recorded)
        self.send("mutated", job=self.number, vectors=vectors)

    def _add_mutated(self, pool, draw, outcome, found, wanted):
        seen, groups, kept = found
        for _ in range(self.job["tries"]):
            is_spent = self.work.num_nodes > (MAX_NODES if len(kept) >= FEW else 3 * MAX_NODES)
            if self.steps.is_enough or is_spent or len(kept) >= wanted:
                return
            blob = self._mutated_blob(pool, draw)
            known = None if blob is None else self.replay.input_digest(blob)
            if known is None or known in seen:
                continue
            seen.add(known)
            kind, digest = outcome(blob)
            if kind == "ret":
                kept.append(blob)
                groups.setdefault(digest, []).append(blob)

    def _mutated_blob(self, pool, draw):
        if not self.steps.begin(self.request["call_seconds"]):
            return None
        try:
            start_clocks(self.request["call_seconds"])
            try:
                call = pool.mutated(draw)
                return None if call is None else self.dumps(call)
            finally:
                stop_clocks()
        except (Exception, Late):
            return None

    def _answer(self):
        for index in self._left(range(len(self.blobs))):
            blob = self.blobs[index]
            self.steps.num_told = index
            if not self.steps.begin(self.request["call_seconds"]):
                continue
            try:
                args, kwargs = self.replay.loads(blob)
                try:
                    result = self.replay.function(*args, **kwargs)
                    if hasattr(type(result), "__next__"):
                        result = ("iterator", [item for item, _ in zip(result, range(300), strict=False)])
                    else:
                        result = ("value", result)
                except Exception as error:
                    result = ("raise", error)
                data = base64.b64encode(self.dumps(result)).decode()
            except Exception:
                data = ""
            self.send("answer", job=self.number, index=index, data=data)


def round_robin(groups, wanted):
    """One call of each outcome in turn, so that common outcomes do not crowd out rare ones."""
    chosen: list[Any] = []
    for turn in range(max(map(len, groups.values()), default=0)):
        for digest, blobs in groups.items():
            if turn < len(blobs) and len(chosen) < wanted:
                chosen.append((blobs[turn], digest))
    return chosen


def run_job(request, number, send):
    """Run a job in a child process, and say so when it took too long."""

    def work(steps):
        try:
            Job(request, number, send, steps).run()
        except BaseException:
            traceback.print_exc()
            os._exit(1)

    seconds = request["job_seconds"]
    ended = sys.modules["call_steps"].run_to_the_end(
        work,
        cpu_seconds=seconds,
        wall_seconds=WALL_FACTOR * seconds,
        stuck_seconds=2 * WALL_FACTOR * request["call_seconds"],
        is_retold=request["jobs"][number]["mode"] == "mutate",
    )
    if ended == "late":
        send("late", job=number)


def main(request, send):
    """Do the jobs of a request."""
    root = os.getcwd()
    sys.modules["call_pickle"].load_cloudpickle(request["cloudpickle"])
    sys.path[:0] = [os.path.normpath(os.path.join(root, path)) for path in request["import_roots"]]
    # Below what the sandbox may use: past that limit the run of all is over, past this one a call is.
    for kind, size in (
        (resource.RLIMIT_AS, request["address_bytes"]),
        (resource.RLIMIT_DATA, request["memory_bytes"]),
    ):
        hard = resource.getrlimit(kind)[1]
        most = size if hard == resource.RLIM_INFINITY else min(size, hard)
        resource.setrlimit(kind, (most, most))
    send("ready")
    for number in range(len(request["jobs"])):
        run_job(request, number, send)
    send("end")
    os._exit(0)
