"""Runs inside the sandbox behind ``pytest_runner.py`` when an answer of a policy is graded.

The answer shares this interpreter, so nothing here can be proof. What it does is to leave
nothing worth changing inside: each observation goes out at once, as one line whose first word
is a keyed digest of all lines so far. The key lives in an object of C that an audit hook holds,
and the hook takes orders from our own frames alone. Attempts to look for it are reported before
they take place. Not imported by the package and never placed in a tree.
"""

import functools
import gc
import hashlib
import importlib
import json
import os
import sys
import time

# What an answer has no honest use for, unless its own repository has: importing ctypes, forking or starting
# processes is not among it.
WATCHED_EVENTS = dict.fromkeys(
    """gc.get_objects gc.get_referrers sys.settrace sys.setprofile sys._current_frames sys._current_exceptions
    sys.monitoring.register_callback sys.addaudithook code.__new__ ctypes.dlsym ctypes.dlsym/handle ctypes.addressof
    ctypes.cdata ctypes.cdata/buffer ctypes.string_at ctypes.wstring_at ctypes.PyObj_FromPtr ctypes.call_function
    ctypes.memoryview_at cpython.PyInterpreterState_New""".split()
)
PATH_EVENTS = dict.fromkeys(("open", "os.chdir", "os.symlink", "os.link"))
KEY_BYTES = 32
PIECE_BYTES = 1024  # at 2048 hashlib takes a lock, which a fork may find taken
NUM_WAITING = 8


def read_key():
    """The key: the first bytes on standard input, in memory that can be written over, and no text."""
    key = bytearray(KEY_BYTES)
    for at in range(KEY_BYTES):
        os.readv(0, [memoryview(key)[at : at + 1]])
    return key


def open_transcript(descriptor, key):
    """A function that writes one line, and a list that is empty until this process is a forked one.

    ``send`` signs its texts together with all before them. What a fork copies of the state is changed for good
    before any code of the tree runs in the child: by C alone, so that no frame leads there.
    """
    state = hashlib.blake2s(key=key, digest_size=16)
    key[:] = bytes(len(key))
    update, copy, write, pieces = state.update, state.copy, os.write, range
    encode, to_hex, joined = str.encode, bytes.hex, str.join
    forked: list[bool] = []
    os.register_at_fork(after_in_child=functools.partial(update, os.urandom(256)))
    os.register_at_fork(after_in_child=functools.partial(forked.append, True))

    def send(fields):
        body = encode(joined(".", [to_hex(encode(field, "utf-8", "surrogatepass")) for field in fields]))
        line = body + b"\n"
        for at in pieces(0, len(line), PIECE_BYTES):
            update(line[at : at + PIECE_BYTES])
        data = b"%b %b" % (encode(copy().hexdigest()), line)
        while data:
            data = data[write(descriptor, data) :]

    return send, forked


def make_is_inside():
    """A function that says whether a path leads to the memory or the descriptors of a process.

    By its name, for names relative to a folder; and by what it is, behind whatever links. It calls no code of the
    tree: a text of a class of the tree is copied without asking it, any other object counts as such a path.
    """
    look, joined, is_a, kind_of, number, text, raw = os.stat, str.join, issubclass, type, int, str, bytes
    decode, split = bytes.decode, str.rpartition
    try:
        device = look("/proc/self/stat").st_dev
    except OSError:
        device = None

    def is_inside(path):
        kind = kind_of(path)
        if is_a(kind, text):
            path = name = joined("", [path])
        elif kind is raw:
            name = decode(path, "latin-1")
        else:
            return not is_a(kind, number) and path is not None
        if split(name, "/")[2] == "mem" or "map_files" in name:
            return True
        if "/fd/" in name and ("proc/" in name or "dev/" in name):
            return True
        try:
            info = look(path)
        except (OSError, ValueError):
            return False
        # Below /proc only a process's memory may be read and written by its owner alone.
        return info.st_dev == device and (info.st_mode & 0o170000 == 0o040000 or info.st_mode == 0o100600)

    return is_inside


def watch(transcript, name, callers):
    """Install the hook behind which the ``transcript`` hides; it obeys the event ``name`` from frames in ``callers``.

    ``callers`` maps the identity of a code object to that of the code that must call it.
    What became of the test runner is found without code of the tree, which would find ``send`` on the stack.
    """
    changed, kind_of, text, size = make_check(), type, str, len
    frame_of, id_of, pid_of, home = sys._getframe, id, os.getpid, os.getpid()
    send, forked = transcript
    watched, opening, seen, is_inside = WATCHED_EVENTS, PATH_EVENTS, set(), make_is_inside()

    def flag(text):
        if text not in seen and not forked:
            send(("flag", text))
            seen.add(text)  # not before: it may not have been said, at the end of the stack or of the memory

    def hook(event, args):
        if event == name:
            if forked:
                return
            frame = frame_of(2)  # the one that raised the event, past guarded
            wanted = callers.get(id_of(frame.f_code))
            if pid_of() != home or wanted is None or id_of(frame.f_back.f_code) != wanted:  # type: ignore[union-attr]
                flag("channel: used by something else")
                return
            send((*args, *changed()) if args[0] in ("start", "end") else args)
        elif event in watched:
            flag(event)
        elif event == "object.__setattr__":
            if size(args) > 1 and kind_of(args[1]) is text and args[1] == "__code__":
                flag("code of a function replaced")
        elif event in opening and args and is_inside(args[0]):
            flag("open of its own memory or descriptors")

    sys.addaudithook(functools.partial(guarded, hook, (gc.isenabled, gc.disable, gc.enable)))


def guarded(hook, tools, event, args):
    """Ask the hook so that neither what it raises nor garbage that is collected meanwhile leads to its frames.

    An exception that leaves has this frame alone in its traceback, and by then ``hook`` is none of its variables.
    """
    is_on, caught = False, None
    collects, stop, go_on = tools
    try:
        is_on = collects()
        stop()
        hook(event, args)
    except BaseException as error:
        error.__traceback__ = None  # no call: at the end of the stack there is no room for one
        caught = error
    del hook
    if is_on:
        go_on()
    if caught is not None:
        try:
            raise caught
        finally:
            del caught


def make_recorder(name, request):
    """The plugin that selects the wanted tests and tells at once what it sees, and the function for the end."""
    import pytest

    audit, clock, own_clock = sys.audit, time.perf_counter, time.process_time
    wanted = set(request["node_ids"])
    seed, backwards = request["shuffle_seed"], request["backwards"]
    order, state, plain_run = shuffle_key, state_of, pytest.Function.runtest  # type: ignore[name-defined]  # noqa: F821  of pytest_runner
    used, text_of, most = processor_seconds, repr, max  # type: ignore[name-defined]  # noqa: F821  the same

    class Recorder:
        @pytest.hookimpl(wrapper=True, tryfirst=True)
        def pytest_collection_modifyitems(self, items):
            if seed is not None:
                items.sort(key=lambda item: order(item, seed), reverse=backwards)
            result = yield
            items[:] = [item for item in items if item.nodeid in wanted]
            kinds = ["f" if type(item).runtest is plain_run else "o" for item in items]
            audit(name, "collected", "".join(kinds), *[item.nodeid for item in items])
            return result

        @pytest.hookimpl(wrapper=True, tryfirst=True)
        def pytest_runtest_protocol(self, item):
            begun, own = clock(), own_clock()
            audit(name, "start", item.nodeid)
            try:
                return (yield)
            finally:
                # A busy machine stretches the time by the clock; a test that waits has none of its own.
                seconds = most(own_clock() - own, (clock() - begun) / NUM_WAITING)
                audit(name, "finish", item.nodeid, text_of(seconds))

        @pytest.hookimpl(wrapper=True, tryfirst=True)
        def pytest_pyfunc_call(self, pyfuncitem):
            how = "raised"
            try:
                result = yield
                how = "returned"
                return result
            finally:
                audit(name, "call", pyfuncitem.nodeid, how)

        @pytest.hookimpl(tryfirst=True)
        def pytest_runtest_logreport(self, report):
            audit(name, "report", report.nodeid, state(report, ""))

    def finish(code):
        audit(name, "end", text_of(code), text_of(used()))

    return Recorder(), finish


MARKED = ("_pytest", "pluggy", "pytest", "unittest.case")
NUM_NAMED = 64  # more than the test runner's own plugins exchange for the time of a run


def is_function(value):
    """Whether it is a function, method or property in Python."""
    value = value.fget if type(value) is property else getattr(value, "__func__", value)
    return type(value) is type(is_function)


def make_check():
    """A function that names those of the test runner's own functions that are not what they are now.

    It runs below the hook, and asks no object of the tree anything.
    """
    marks = []
    for name, module in list(sys.modules.items()):
        if name in MARKED or name.partition(".")[0] in MARKED:
            names = vars(module)
            own = [each for each in names.values() if isinstance(each, type) and each.__module__ == name]
            spaces = {name: names, **{f"{name}.{each.__name__}": vars(each) for each in own}}
            for place, space in spaces.items():
                marks.append((place, space, [item for item in space.items() if is_function(item[1])]))
    nothing, kind_of, text = object(), type, str

    def changed():
        found = []
        for place, space, kept in marks:
            now = {key: value for key, value in [*space.items()] if kind_of(key) is text}
            found += [f"{place}.{key} changed" for key, value in kept if now.get(key, nothing) is not value]
        return found[:NUM_NAMED]

    return changed


def watched_main():
    """Run what the request on standard input asks for, watched."""
    descriptor = private_stdout()  # type: ignore[name-defined]  # noqa: F821  of pytest_runner
    transcript = open_transcript(descriptor, read_key())
    request = json.loads(sys.stdin.buffer.read())
    arguments = prepare(request, os.getcwd())  # type: ignore[name-defined]  # noqa: F821  of pytest_runner
    import pluggy
    import pytest
    from _pytest.config import default_plugins

    for plugin in default_plugins:  # so that all of the test runner is there before any code of the tree
        importlib.import_module(f"_pytest.{plugin}")
    name = "composer-rl." + os.urandom(16).hex()
    recorder, finish = make_recorder(name, request)
    multicall = id(pluggy._callers._multicall.__code__)
    methods = [value for key, value in vars(type(recorder)).items() if key.startswith("pytest_")]
    callers = dict.fromkeys((id(method.__code__) for method in methods), multicall)
    watch(transcript, name, {**callers, id(finish.__code__): id(watched_main.__code__)})
    suite = make_suite(request["options"])  # type: ignore[name-defined]  # noqa: F821  of pytest_runner
    leave, plugins = os._exit, [recorder, suite]
    del transcript, name, request, recorder, callers, methods, descriptor, suite
    gc.freeze()  # what is there by now is in no list that gc gives out
    finish(int(pytest.main(arguments, plugins=plugins)))
    leave(0)
