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
import itertools
import json
import operator
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
    at = 0
    while at < KEY_BYTES:
        number = os.readv(0, [memoryview(key)[at:]])
        if not number:
            raise EOFError("the key is cut off")
        at += number
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
    look, joined, is_a, kind_of, number = os.stat, str.join, issubclass, type, int
    text, raw, array = str, bytes, bytearray
    decode, decode_array, part, split = bytes.decode, bytearray.decode, bytes.__getitem__, str.rpartition
    try:
        device = look("/proc/self/stat").st_dev
    except OSError:
        device = None

    def is_inside(path):
        kind = kind_of(path)
        if is_a(kind, text):
            name = joined("", [path])
        elif is_a(kind, raw):
            name = decode(part(path, slice(None)), "latin-1")
        elif is_a(kind, array):
            name = decode_array(path, "latin-1")
        else:
            return not is_a(kind, number) and path is not None
        if split(name, "/")[2] == "mem" or "map_files" in name:
            return True
        if "/fd/" in name and ("proc/" in name or "dev/" in name):
            return True
        try:
            info = look(path if kind is text or kind is raw else name)
        except (OSError, ValueError):
            return False
        # Below /proc only a process's memory may be read and written by its owner alone.
        return info.st_dev == device and (info.st_mode & 0o170000 == 0o040000 or info.st_mode == 0o100600)

    return is_inside


def watch(transcript, name, callers):
    """Install the hook behind which the ``transcript`` hides; it obeys the event ``name`` from frames in ``callers``.

    ``callers`` maps the identity of a code object to that of the code that must call it, or None.
    What became of the test runner is found without code of the tree, which would find ``send`` on the stack.
    """
    marks, functions = take_marks()
    changed = make_check(marks)
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
            wanted = callers.get(id_of(frame.f_code), 0)
            if pid_of() != home or wanted == 0 or (wanted and id_of(frame.f_back.f_code) != wanted):  # type: ignore[union-attr]
                flag("channel: used by something else")
                return
            send((*args, *changed()) if args[0] in ("start", "end") else args)
        elif event in watched:
            flag(event)
        elif event == "object.__setattr__":
            if len(args) > 1 and type(args[1]) is str and args[1] == "__code__":
                is_ours = id_of(args[0]) in functions
                flag("code of the test runner replaced" if is_ours else "code of a function replaced")
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
    wanted, hook_checks = set(request["node_ids"]), []
    seed, backwards = request["shuffle_seed"], request["backwards"]
    order, plain_run, hook_check_of = shuffle_key, pytest.Function.runtest, make_hook_check  # type: ignore[name-defined]  # noqa: F821  of the files before
    used, text_of, most = processor_seconds, repr, max  # type: ignore[name-defined]  # noqa: F821  the same

    class Recorder:
        @pytest.hookimpl(tryfirst=True)
        def pytest_load_initial_conftests(self, early_config):
            hook_checks.append(hook_check_of(early_config))

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
            audit(name, "start", item.nodeid, *hook_checks[0]())
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
            expected = "xfail" if hasattr(report, "wasxfail") else ""
            audit(name, "report", report.nodeid, report.when, report.outcome, expected)

    def finish(code):
        flags = hook_checks[0]() if hook_checks else ["never began"]
        audit(name, "end", text_of(code), text_of(used()), *flags)

    return Recorder(), finish


def keep_tests(config, paths):
    """Compile the test files now; what is written over them later, or put beside them compiled, is not run."""
    from pathlib import Path

    from _pytest.assertion import rewrite

    kept = {}
    for path in paths:
        try:
            kept[path] = rewrite._rewrite_test(Path(path), config)[1]
        except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):  # seen when it is collected
            continue
    read = rewrite._read_pyc

    def _read_pyc(source, pyc, trace=lambda _text: None):
        found = kept.get(str(source))
        return read(source, pyc, trace) if found is None else found

    rewrite._read_pyc = _read_pyc


# --- What the test runner was, and what became of it.

MARKED_PACKAGES = ("_pytest", "pluggy", "pytest")
MARKED_MODULES = ("unittest.case",)
NUM_NAMED = 64  # more than the test runner's own plugins exchange for the time of a run


def function_of(value):
    """What does the work of a function, method or property; None for other values."""
    value = value.fget if type(value) is property else getattr(value, "__func__", value)
    return value if type(value) is type(function_of) else None


def spaces_of(name, module):
    """A module and its own classes, with the names in each."""
    yield name, vars(module)
    for key, value in vars(module).items():
        if isinstance(value, type) and value.__module__ == name:
            yield f"{name}.{key}", vars(value)


def take_marks():
    """What the functions of the test runner are, and their identities.

    For each module and class its names, which of them are functions, and the values of these.
    """
    functions: set[int] = set()
    marks = []
    for name, module in list(sys.modules.items()):
        if name in MARKED_MODULES or name.partition(".")[0] in MARKED_PACKAGES:
            for place, space in spaces_of(name, module):
                found = [function_of(value) for value in space.values()]
                chosen = [function is not None for function in found]
                marks.append((place, space, [*space], chosen, [*itertools.compress(space.values(), chosen)]))
                functions.update(map(id, itertools.compress(found, chosen)))
    return marks, functions


def make_check(marks):
    """A function that names what was changed since the marks were taken, each once; it looks at nothing that is new.

    Runs below the hook: it asks no object of the tree anything. Before every test, so that identities are compared
    by C alone where all is as it was; code that is replaced the hook notices by itself.
    """
    nothing, kind_of, text, number, pairs = object(), type, str, len, zip
    same, each, every, those = operator.is_, map, all, itertools.compress
    named: set[str] = set()

    def changed():
        found = []
        for place, space, names, chosen, own in marks:
            if (
                number(space) >= number(names)
                and every(each(same, names, [*space]))
                and every(each(same, own, those([*space.values()], chosen)))
            ):
                continue
            now = {key: value for key, value in [*space.items()] if kind_of(key) is text}
            asked = pairs(those(names, chosen), own)
            found += [f"{place}.{key} changed" for key, value in asked if now.get(key, nothing) is not value]
        new = [each for each in found if each not in named]
        named.update(new)
        return new[:NUM_NAMED]

    return changed


PATH_HOOKS = frozenset(
    f"pytest_{name}"
    for name in "ignore_collect collect_file pycollect_makemodule report_header report_collectionfinish".split()
)
"""For these the proxy of pytest 7 and 8 has functions of its own."""


def hook_callers(config, relay):
    """The hooks of ``relay`` by name. In pytest 7 and 8 a proxy stands before it, which keeps what it was asked for."""
    kept = {} if config.hook is relay else vars(config.hook)
    asked = {name: each for name, each in kept.items() if each is not relay and name not in PATH_HOOKS}
    return {**vars(relay), **asked}


def make_hook_check(config):
    """A function that names the hooks of the test runner that do not call what they called when it was first seen."""
    kept: dict[int, tuple[object, object]] = {}
    manager = config.pluginmanager
    relay, execute = manager.hook, manager._inner_hookexec
    callers = hook_callers(config, relay)
    ident, every = id, hook_callers

    def exchanged():
        found = []
        if manager._inner_hookexec is not execute:
            found.append("hook calls exchanged")
        for name, caller in every(config, relay).items():
            if callers.setdefault(name, caller) is not caller:
                found.append(f"hook {name} exchanged")
            impls = caller.get_hookimpls() if hasattr(caller, "get_hookimpls") else ()
            others = [e for e in impls if kept.setdefault(ident(e), (e, e.function))[1] is not e.function]
            found += [f"hook {name} of {each.plugin_name} exchanged" for each in others]
        return found[:NUM_NAMED]

    exchanged()
    return exchanged


def make_starter(parts, paths):
    """The plugin that takes stock of tests and runner before any code of the tree runs, and then watches.

    ``parts``, of ``watch``, are taken out of their list, so that nothing leads back to them.
    """
    import pytest

    class Starter:
        @pytest.hookimpl(tryfirst=True)
        def pytest_load_initial_conftests(self, early_config):
            keep_tests(early_config, paths)
            transcript, name, callers = parts.pop()
            watch(transcript, name, callers)
            early_config.pluginmanager.unregister(self)

    return Starter()


def callers_of(recorder, finish):
    """Which frames may speak: the methods of the plugin when pluggy calls them, and the end when we do."""
    import pluggy

    multicall = getattr(getattr(pluggy, "_callers", None), "_multicall", None)
    by_pluggy = None if multicall is None else id(multicall.__code__)
    methods = (value for key, value in vars(type(recorder)).items() if key.startswith("pytest_"))
    return {
        **{id(method.__code__): by_pluggy for method in methods},
        id(finish.__code__): id(watched_main.__code__),
    }


def watched_main():
    """Run what the request on standard input asks for, watched."""
    descriptor = private_stdout()  # type: ignore[name-defined]  # noqa: F821  of pytest_runner
    transcript = open_transcript(descriptor, read_key())
    request = json.loads(sys.stdin.buffer.read())
    root = os.getcwd()
    arguments = prepare(request, root)  # type: ignore[name-defined]  # noqa: F821  of pytest_runner
    import pytest

    name = "composer-rl." + os.urandom(16).hex()
    recorder, finish = make_recorder(name, request)
    parts = [(transcript, name, callers_of(recorder, finish))]
    starter = make_starter(parts, [os.path.join(root, path) for path in request["files"]])
    suite = make_suite(request["options"])  # type: ignore[name-defined]  # noqa: F821  of suite_plugin
    leave, plugins = os._exit, [recorder, starter, suite]
    del transcript, name, request, recorder, starter, parts, descriptor, suite
    gc.freeze()  # what is there by now is in no list that gc gives out
    finish(int(pytest.main(arguments, plugins=plugins)))
    leave(0)
