"""Runs inside the sandbox, started by ``pytest_runner.hand_over``: calls functions of a tree with recorded arguments.

Not imported by the package and never placed in a tree. Inputs come on standard input,
canonical digests go out; what they ought to be is never here. Each job runs in a child
process of its own that imports the tree itself, so no job sees the state of another. A call
that hangs or crashes costs itself: another child begins anew and leaves it out (``run_job``).
"""

import ast
import base64
import collections
import contextlib
import gc
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
import types
import typing

from composer_replication.tasks.twin.call_pickle import make_dumps
from composer_replication.tasks.twin.canonical_encoding import OpaqueValue, Work, digest, encode, node

WALL_FACTOR = 20
"""A limit is processor time, which a busy machine hardly changes; a call that sleeps may take so many times as long."""
MAX_MUTATED_BYTES = 120_000
FEW = 10
"""Mutated calls without which a function gets no twin."""
MAX_NODES = 1_000_000
"""Encoded while recorded calls are made again, about two seconds; three times as much while they are mutated."""
NOTHING = (False, "")
"""Of a call that cannot be loaded, made or compared."""


def find_function(symbol, module_name):
    """The function that a module defines under a qualified name, whatever it is wrapped in; else what has that name."""
    value = module = importlib.import_module(module_name)
    for part in symbol.split("."):
        value = vars(value)[part]
    functions = [found for found in gc.get_objects() if type(found) is types.FunctionType]
    own = [one for one in functions if one.__globals__ is vars(module) and one.__code__.co_qualname == symbol]
    own = [one for one in own if one not in typing.get_overloads(one)]  # typing keeps these alive
    if not own and not callable(value):
        raise LookupError(symbol)
    return min(own, key=lambda one: one.__code__.co_firstlineno, default=value)


class Job:
    """One function, one task: replay, mutate or constants."""

    def __init__(self, job, steps):
        self.job, self.steps = job, steps
        self.blobs = [base64.b64decode(blob) for blob in job["blobs"]]
        self.constants = [ast.literal_eval(text) for text in job.get("constants", ())]
        # Whoever changes the modules in the process changes nothing here.
        self.encode, self.digest, self.loads = encode, digest, pickle.loads

    def told(self):
        """What is told of it: all that it found, or why it failed as a whole."""
        try:
            return self._run()
        except BaseException as error:
            return {"error": f"{type(error).__name__}: {error}"[:300]}

    def _run(self):
        for path, text in self.job.get("overlay", {}).items():
            with open(path, "w", encoding="utf-8", newline="") as file:
                file.write(text)
        self.dumps = make_dumps(os.getcwd(), MAX_MUTATED_BYTES)
        self.function = find_function(self.job["symbol"], self.job["module"])
        return {"error": "", **(self._mutate() if "wanted" in self.job else self._replay())}

    def _replay(self):
        digests = [""] * len(self.blobs)
        order = range(len(self.blobs))
        for index in reversed(order) if self.job.get("backwards") else order:
            _, digests[index] = self.outcome(self.blobs[index])
        return {"digests": digests}

    def outcome(self, blob):
        """Whether a call returns, and the digest of what it returns or raises; ``NOTHING`` where there is none."""
        return self.steps.limited(self._outcome, blob) or NOTHING

    def _outcome(self, blob):
        try:
            args, kwargs = self.loads(blob)
        except BaseException:
            return NOTHING
        try:
            if self.constants:  # in the place of the function; a digest for each, in one text
                given = self.encode((args, kwargs), is_result=False)
                digests = [self.digest(node("ret", self.encode(one), given)) for one in self.constants]
                return True, " ".join(digests)
            result = self.encode(self.function(*args, **kwargs))
            return True, self.digest(node("ret", result, self.encode((args, kwargs), is_result=False)))
        except (OpaqueValue, MemoryError, RecursionError):  # the last two depend on what else is held
            return NOTHING
        except BaseException as error:
            return False, self.digest(node("exc", repr(type(error).__name__)))

    def _input_digest(self, blob):
        """What tells this input from others; None for one that cannot be told."""
        with contextlib.suppress(Exception):
            return self.steps.limited(
                lambda: self.digest(self.encode(self.loads(blob), is_result=False, pickled=self.dumps))
            )
        return None

    def _mutate(self):
        """Outcome and input of each recorded call, and the mutated calls with theirs."""
        digests: list[str] = []
        inputs: list[str | None] = []
        usable: list[bytes] = []
        for blob in self.blobs:
            if Work.num_nodes > MAX_NODES:
                break
            digests.append(self.outcome(blob)[1])
            inputs.append(self._input_digest(blob))
            usable += [blob] if digests[-1] else []
        seen, kept = set(inputs), dict[bytes, str]()
        draw = random.Random(self.job["seed"])  # noqa: S311  a sample, not a secret
        # A function of one small number has few neighbours: where they are too few, theirs are tried too.
        for wanted in (4 * self.job["wanted"], 2 * FEW, 2 * FEW):
            if usable and len(kept) < FEW:
                self._add_mutated(CallPool([*usable, *kept], self.loads), draw, seen, kept, wanted)
        # One call of each outcome in turn, so that common outcomes do not crowd out rare ones.
        groups: dict[str, list[tuple[str, str]]] = {}
        for blob, outcome in kept.items():
            groups.setdefault(outcome, []).append((base64.b64encode(blob).decode(), outcome))
        in_turn = [call for turn in itertools.zip_longest(*groups.values()) for call in filter(None, turn)]
        return {"digests": digests, "inputs": inputs, "mutated": in_turn[: self.job["wanted"]]}

    def _add_mutated(self, pool, draw, seen, kept, wanted):
        def change():
            call = pool.mutated(draw)
            return None if call is None else self.dumps(call)

        for _ in range(self.job["tries"]):
            if Work.num_nodes > 4 * MAX_NODES or len(kept) >= wanted:
                return
            blob = None
            with contextlib.suppress(Exception):
                blob = self.steps.limited(change)
            known = None if blob is None else self._input_digest(blob)
            if known is None or known in seen:
                continue
            seen.add(known)
            is_return, digest = self.outcome(blob)
            if is_return:
                kept[blob] = digest


# --- Recorded calls are changed a little, so that a table of them does not answer.
# Everything is drawn from one seeded generator, in one order, so the same calls and seed give the same changes.

OTHER_VALUE_SHARE = 0.3
"""How often an argument is replaced by another recorded value of the same parameter."""
_TEXTS = ("é", "ß", "漢", " ", "_", "-", "A", "z", "0", ".", "'", "\n")


class CallPool:
    """Recorded calls, loaded afresh whenever one of their values is used."""

    def __init__(self, blobs, loads):
        self.blobs = blobs
        self.loads = loads
        self.places = collections.defaultdict(list)
        for number, blob in enumerate(blobs):
            args, kwargs = loads(blob)
            for place in [*range(len(args)), *kwargs]:
                self.places[place].append(number)

    def mutated(self, draw):
        """A recorded call with one or two arguments changed; None when nothing can be changed."""
        args, kwargs = self.loads(self.blobs[draw.randrange(len(self.blobs))])
        args, kwargs = list(args), dict(kwargs)
        places = [*range(len(args)), *kwargs]
        if not places:
            return None
        is_changed = False
        for place in draw.sample(places, min(len(places), draw.choice((1, 1, 2)))):
            holder = args if isinstance(place, int) else kwargs
            is_changed |= self._change(holder, place, draw)
        return (tuple(args), kwargs) if is_changed else None

    def _change(self, holder, place, draw):
        value = holder[place]
        if draw.random() < OTHER_VALUE_SHARE or type(value) not in _MUTATORS:  # objects are only exchanged
            numbers = self.places[place]
            if len(numbers) < 2:
                return False
            args, kwargs = self.loads(self.blobs[draw.choice(numbers)])
            holder[place] = args[place] if isinstance(place, int) else kwargs[place]
            return True
        holder[place] = mutate(value, draw)
        return True


def mutate(value, draw, depth=0):
    """A value of the same type that is a little different; others come back as they are."""
    mutator = _MUTATORS.get(type(value))
    return value if mutator is None or depth > 4 else mutator(value, draw, depth)


def _text(value, draw, _depth):
    if not value:
        return draw.choice(_TEXTS)
    cut, other = draw.randrange(len(value)), draw.randrange(len(value) + 1)
    low, high = min(cut, other), max(cut, other)
    return draw.choice(
        (
            value[:cut] + value[cut + 1 :],
            value[low:high],
            value[:other] + draw.choice(_TEXTS) + value[other:],
            value[::-1],
            value.swapcase(),
            value.title(),
            value[:other] + value[low:high] + value[other:],
            value[other:] + value[:other],
            value + value,
        )
    )


def _bytes(value, draw, _depth):
    cut = draw.randrange(len(value) + 1)
    changed = draw.choice((value[cut:], value[:cut], value[:cut] + b"a" + value[cut:], bytes(value[::-1])))
    return type(value)(changed)


def _list(value, draw, depth):
    items = list(value)
    if not items:
        return [draw.choice((0, 1, "a", None))]
    place = draw.randrange(len(items))
    way = draw.randrange(6)
    if way == 0:
        del items[place]
    elif way == 1:
        items.insert(draw.randrange(len(items) + 1), items[place])
    elif way == 2:
        items.reverse()
    elif way == 3:
        draw.shuffle(items)
    elif way == 4:
        items.insert(place, mutate(items[place], draw, depth + 1))
    else:
        items[place] = mutate(items[place], draw, depth + 1)
    return items


def _mapping(value, draw, depth):
    # Not type(value)(...): an empty one keeps a default factory, too.
    changed = value.copy()
    keys = list(changed)
    if not keys:
        changed[draw.choice((0, 1, "a"))] = draw.choice((0, 1, "a"))
        return changed
    key = draw.choice(keys)
    way = draw.randrange(4)
    if way == 0:
        del changed[key]
    elif way == 1:
        changed[mutate(key, draw, depth + 1)] = changed[key]
    elif way == 2:
        changed[draw.choice(keys)] = changed[key]
    else:
        changed[key] = mutate(changed[key], draw, depth + 1)
    return changed


def _set(value, draw, depth):
    # Sorted by type and text: the order of a set is not the same in every process.
    items = sorted(value, key=lambda item: (type(item).__name__, repr(item)))
    return type(value)(_list(items, draw, depth))


_MUTATORS = {
    bool: lambda value, _draw, _depth: not value,
    int: lambda value, draw, _depth: draw.choice((value + 1, value - 1, 0, -value, 2 * value)),
    float: lambda value, draw, _depth: draw.choice(
        (value + 1.0, value - 0.5, 0.0, -value, 2.0 * value, value / 3.0)
    ),
    complex: lambda value, draw, _depth: draw.choice((value + 1, value * 2, -value, value.conjugate())),
    str: _text,
    bytes: _bytes,
    bytearray: _bytes,
    list: _list,
    tuple: lambda value, draw, depth: tuple(_list(value, draw, depth)) if value else value,
    collections.deque: lambda value, draw, depth: collections.deque(_list(value, draw, depth), value.maxlen),
    dict: _mapping,
    collections.OrderedDict: _mapping,
    collections.defaultdict: _mapping,
    collections.Counter: _mapping,
    set: _set,
    frozenset: _set,
    type(iter([])): lambda value, draw, depth: iter(_list(value, draw, depth)),
    type(iter(())): lambda value, draw, depth: iter(_list(value, draw, depth)),
}


# --- One bad call costs itself alone.
# A call may hang or die inside C code, or catch whatever is raised to stop it. So each step has timers of the kernel, whose
# signals end the process. How far it came lies in memory that parent and child share, and another child begins anew and
# leaves out the step of which an earlier one died.

LOADING, DONE = -1, -2
MAX_LOST = 11
"""Calls that took their process along; past the 5 % of 200 that may be wrong, so no more are made."""


class Steps:
    """Numbers what a job does. ``fatal`` are the steps of which earlier children died."""

    def __init__(self, fatal, seconds):
        # One number: the step that is done now, or LOADING or DONE.
        self.now = memoryview(mmap.mmap(-1, 8)).cast("q")
        self.now[0] = LOADING
        self.fatal, self.seconds = fatal, seconds
        self.set_timer = signal.setitimer  # what a tree makes of it later changes nothing here

    def limited(self, work, *arguments):
        """What the next step gives; None for one that is left out."""
        self.now[0] += 1
        is_enough = len(self.fatal) >= MAX_LOST and self.now[0] > max(self.fatal)
        if is_enough or self.now[0] in self.fatal:
            return None
        self._limit(self.seconds)
        try:
            return work(*arguments)
        finally:
            self._limit(0)

    def _limit(self, seconds):
        self.set_timer(signal.ITIMER_PROF, seconds)
        self.set_timer(signal.ITIMER_REAL, WALL_FACTOR * seconds)


def run_job(request, number, send):
    """Do a job in children, one after the other until one comes to the end and tells of all.

    The limits are processor time of all children together and of one step. After the last death one more child can tell of
    what there was until then.
    """
    fatal: list[int] = []
    latest = _used_by_children() + request["job_seconds"]
    while len(fatal) <= MAX_LOST:
        steps = Steps(fatal, request["call_seconds"])
        child = os.fork()
        if child == 0:
            try:
                os.setsid()
                lower_limit(resource.RLIMIT_CPU, math.ceil(latest - _used_by_children()))
                send("done", job=number, **Job(request["jobs"][number], steps).told())
                steps.now[0] = DONE
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        now = steps.now[0]
        if now != DONE and _used_by_children() >= latest:
            send("done", job=number, error=f"the calls ran longer than {request['job_seconds']:g} s")
            return
        if now < 0 or now in fatal:
            return
        fatal.append(now)


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
    sys.path[:0] = [os.path.normpath(os.path.join(root, path)) for path in request["import_roots"]]
    # Below what the sandbox may use: past that limit the run of all is over, past this one a call is.
    lower_limit(resource.RLIMIT_DATA, request["memory_bytes"])
    send("ready")
    for number in range(len(request["jobs"])):
        run_job(request, number, send)
    send("end")
    os._exit(0)
