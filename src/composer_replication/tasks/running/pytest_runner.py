"""Runs inside the sandbox, given as ``python -c``: pytest with a protected channel for its records.

Never placed in a tree. Standard output is kept under a private descriptor for records; whatever tests print goes to
standard error. Each record is one JSON line that carries the nonce which came on standard input.
"""

import importlib.util
import json
import math
import os
import resource
import sys
import time
import types


def private_stdout():
    """Keep standard output under a descriptor of our own; what anything prints goes to standard error from now on."""
    descriptor = os.dup(1)
    os.set_inheritable(descriptor, False)
    os.dup2(2, 1)
    return descriptor


def make_send(descriptor, nonce):
    """A function that writes one JSON line for each record; it begins a line, for whatever stands before may be cut off."""
    dump, write = json.dumps, os.write  # what a tree makes of them later would be told the nonce

    def send(event, **fields):
        line = "\n" + dump({"nonce": nonce, "event": event, **fields}) + "\n"
        data = line.encode("utf-8", "backslashreplace")
        while data:
            data = data[write(descriptor, data) :]

    return send


def place_of(item, root):
    """File, first line and name of the function that a test runs; empty when it is not in the tree."""
    import inspect

    function = inspect.unwrap(getattr(item, "function", None) or (lambda: None))
    code = getattr(function, "__code__", None)
    if code is None or not os.path.abspath(code.co_filename).startswith(root + os.sep):
        return ["", 0, ""]
    return [os.path.relpath(code.co_filename, root), code.co_firstlineno, code.co_name]


def shuffle_key(item, seed):
    """Sorts tests into an order drawn by the seed in which each folder, module and class stays together.

    One hash for each collector on the way down to the test: siblings are shuffled, and a
    fixture of a module or class is still set up once.
    """
    import hashlib

    return [
        hashlib.sha256(f"{seed}/{node.nodeid}".encode("utf-8", "backslashreplace")).digest()
        for node in item.listchain()[1:]
    ]


def first_line_of(text):
    """What a report shows of a longer text."""
    return str(text).strip().partition("\n")[0][:300]


def state_of(report, before):
    """What became of a test by this phase; ``before`` is what the phases so far say."""
    worst = ("", "passed", "skipped", "failed", "error")
    state = "passed" if report.when == "call" and report.outcome == "passed" else ""
    if report.failed:
        state = "failed" if report.when == "call" and before != "error" else "error"
    elif report.skipped or hasattr(report, "wasxfail"):
        state = "skipped"
    return max(before, state, key=worst.index)


class Recorder:
    """The plugin that selects the wanted tests and reports what became of each."""

    def __init__(self, send, request, root):
        import pytest

        self.send, self.request, self.root = send, request, root
        self.home = os.getpid()
        self.states = {}
        self.why = {}
        for hook in (Recorder.pytest_collection_modifyitems, Recorder.pytest_runtest_protocol):
            pytest.hookimpl(wrapper=True, tryfirst=True)(hook)

    def pytest_collectstart(self, collector):
        import pytest

        if isinstance(collector, pytest.File):
            self.send("file", id=collector.nodeid)

    def pytest_collection_modifyitems(self, items):
        wanted, seed = self.request["node_ids"], self.request["shuffle_seed"]
        if seed is not None:
            # Before all others: pytest then still groups parametrised fixtures, and an order
            # that the repository itself asks for wins, as it does when answers are graded.
            items.sort(key=lambda item: shuffle_key(item, seed), reverse=self.request["backwards"])
        result = yield
        if wanted is not None:
            wanted = set(wanted)
            items[:] = [item for item in items if item.nodeid in wanted]
        places = [place_of(item, self.root) for item in items]
        self.send("collected", ids=[item.nodeid for item in items], places=places)
        return result

    def pytest_collectreport(self, report):
        if report.failed:
            text = str(report.longrepr).strip().splitlines()
            self.send("collect_error", id=report.nodeid, text=text[-1][:300] if text else "")
        self.tell_skip(report)

    def tell_skip(self, report):
        """Send why a test or a file is skipped."""
        if report.skipped and isinstance(report.longrepr, tuple):  # file, line, reason
            self.send("skip", id=report.nodeid, text=first_line_of(report.longrepr[-1]))

    def pytest_runtest_protocol(self, item):
        try:
            return (yield)
        except BaseException as error:  # it ends the whole run
            self.states.pop(item.nodeid, None)
            self.why[item.nodeid] = first_line_of(f"{type(error).__name__}: {error}")
            raise
        finally:
            if os.getpid() != self.home:  # a test forked, and here comes the child
                try:
                    self.send("forked", id=item.nodeid)
                finally:  # a child of a daemon has closed the channel
                    os._exit(0)
            outcome = self.states.pop(item.nodeid, "") or "missing"
            self.send("test", id=item.nodeid, outcome=outcome, why=self.why.pop(item.nodeid, ""))

    def pytest_runtest_logreport(self, report):
        self.states[report.nodeid] = state_of(report, self.states.get(report.nodeid, ""))
        self.tell_skip(report)
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            why = getattr(crash, "message", None) or report.longrepr
            self.why.setdefault(report.nodeid, first_line_of(why))


def prepare(request, root):
    """Set the limit and the places of import that a run has; returns the arguments of the test runner."""
    limit = request.get("cpu_seconds")
    if limit is not None:  # the kernel ends the run, whatever the code under test does with signals
        whole = math.ceil(limit)
        resource.setrlimit(resource.RLIMIT_CPU, (whole, whole + 1))
    roots = [os.path.normpath(os.path.join(root, path)) for path in request["import_roots"]]
    import pytest  # noqa: F401  before the tree can be imported from

    sys.path[:0] = roots
    os.environ["PYTHONPATH"] = os.pathsep.join(roots)
    request["options"] = importable_plugins(request["options"], root)
    return [
        *request["options"],
        *request["arguments"],
        f"--rootdir={root}",
        *(os.path.join(root, name) for name in request["files"]),
    ]


def processor_seconds():
    """Processor time of this process and of its children that have ended."""
    below = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + below.ru_utime + below.ru_stime


def run_tests(request, descriptor):
    """Run what is asked for in the folder that this is, tell it, and end the process."""
    send = make_send(descriptor, request["nonce"])
    root = os.getcwd()
    arguments = prepare(request, root)
    import pytest

    calls = CallRecorder(root) if request["calls"] else None
    suite = make_suite(request["options"], request["left_out"])
    code = int(pytest.main(arguments, plugins=[Recorder(send, request, root), suite]))
    called = calls.called() if calls else None
    send("end", exit_code=code, cpu_seconds=processor_seconds(), called=called)
    os._exit(0)  # threads that a test left behind must not hold the result back


def hand_over():
    """Make the modules that came as text importable under their own names, and run the program that is asked for."""
    descriptor = private_stdout()
    request = json.loads(sys.stdin.buffer.read())
    send = make_send(descriptor, request.pop("nonce"))
    for name, source in request["sources"]:
        module = sys.modules[name] = types.ModuleType(name)
        exec(compile(source, name, "exec"), module.__dict__)
    sys.modules[request["program"]].main(request, send)


# --- A plugin of pytest that lets a suite run although tools around it are not installed.
# What measures or speeds up a suite (coverage, parallel runs, reports) is left out of every environment. Its options,
# fixtures and hooks may still be named by the repository; none of that must end the run.


def importable_plugins(options, root):
    """The options without ``-p NAME`` where nothing is called so: a tool that was left out."""
    import importlib.metadata

    from _pytest.config import builtin_plugins

    known = {entry.name for entry in importlib.metadata.entry_points(group="pytest11")} | set(builtin_plugins)

    def is_there(name):
        top = name.partition(".")[0]
        return name.startswith("no:") or not known.isdisjoint({name, top}) or _is_module(top, root)

    return [option for option in options if not option.startswith("-p") or is_there(option[2:])]


def _is_module(top, root):
    """Whether a module of that name can be imported, or lies in the tree, to which ``pythonpath`` may lead."""
    try:
        if importlib.util.find_spec(top) is not None:
            return True
    except (ImportError, ValueError, AttributeError):
        return False
    return any(top in folders or f"{top}.py" in files for _, folders, files in os.walk(root))


class Benchmark:
    """What stands in for the fixture of pytest-benchmark and pytest-codspeed: calls the function once."""

    enabled, disabled, group, stats = False, True, None, None

    def __init__(self, request):
        self.name = self.fullname = request.node.name
        self.extra_info = {}

    def __call__(self, function, *args, **kwargs):
        return function(*args, **kwargs)

    def pedantic(self, target, args=(), kwargs=None, setup=None, **_options):
        made = setup() if setup is not None else None
        args, kwargs = made if made is not None else (args, kwargs)
        return target(*args, **(kwargs or {}))


STAND_INS = {
    "worker_id": ("session", lambda: "master"),
    "testrun_uid": ("session", lambda: "composer-rl"),
    "cov": ("function", lambda: None),
    "no_cover": ("function", lambda: None),
    "extra": ("function", list),
    "extras": ("function", list),
    "json_metadata": ("function", dict),
}
"""Fixtures of tools that are left out, with their scope and what gives their value."""


def make_suite(options, left_out=()):
    """The plugin; ``options`` are the repository's own, and those that nothing installed knows are taken back.

    ``left_out`` are ids of tests that are not run, and files that are not imported.
    """
    import pytest

    root, left_out = os.getcwd(), set(left_out)

    class Suite:
        def pytest_addhooks(self, pluginmanager):
            # A conftest.py may have hooks for a tool that was left out.
            pluginmanager.check_pending = lambda: None

        @pytest.hookimpl(trylast=True)
        def pytest_load_initial_conftests(self, args, parser):
            """Now that plugins and conftest.py files have named theirs."""
            for option in options:
                flag = option.partition("=")[0]
                if option in args and not is_known(parser, option):
                    place = args.index(option)
                    args[place : place + 1] = [flag] if flag != option and is_known(parser, flag) else []

        def pytest_internalerror(self, excrepr):
            # Where a hook of the repository's ended it, nothing else prints why.
            sys.stderr.write(f"{str(excrepr).strip()}\n")

        def pytest_ignore_collect(self, collection_path):
            return True if left_out and os.path.relpath(collection_path, root) in left_out else None

        def pytest_collection_modifyitems(self, items):
            items[:] = [item for item in items if item.nodeid not in left_out]

        @pytest.fixture
        def benchmark(self, request):
            return Benchmark(request)

    def stand_in(name, scope, make):
        return pytest.fixture(scope=scope, name=name)(lambda _self: make())

    # Whoever brings the real ones is registered later, and wins.
    for name, (scope, make) in STAND_INS.items():
        setattr(Suite, name, stand_in(name, scope, make))
    return Suite()


def is_known(parser, option):
    """Whether pytest, a plugin or a conftest.py takes an option in this form."""
    try:
        return not parser.parse_known_and_unknown_args([option])[1]
    except (Exception, SystemExit):  # a value that it does not take
        return False


# --- Which functions of the tree are called while the suite runs.

TOOL = 4  # no debugger, coverage or profiler uses this number of sys.monitoring


class CallRecorder:
    """Notes what is called from now on, in all threads of this process."""

    def __init__(self, root):
        self.prefix = root + os.sep
        self.codes = {}  # by identity, for to hash one is slow
        self.profiler = None
        if monitoring := getattr(sys, "monitoring", None):  # of Python 3.12
            monitoring.use_tool_id(TOOL, "composer-rl")
            start = monitoring.events.PY_START
            monitoring.register_callback(TOOL, start, lambda code, _: self.add(code) or monitoring.DISABLE)
            monitoring.set_events(TOOL, start)
            return
        import _lsprof
        import threading

        threading.setprofile(lambda frame, event, _: self.add(frame.f_code) if event == "call" else None)
        self.profiler = _lsprof.Profiler(builtins=False, subcalls=False)
        self.profiler.enable()

    def add(self, code):
        self.codes[id(code)] = code

    def called(self):
        """File and first line of each function; None where a test took the profiler away, and nobody knows."""
        if self.profiler is not None:
            if id(sys.getprofile()) != id(self.profiler):
                return None
            self.profiler.disable()
            for entry in self.profiler.getstats():
                if not isinstance(entry.code, str):
                    self.add(entry.code)
        ours = [code for code in self.codes.values() if code.co_filename.startswith(self.prefix)]
        places = {
            (code.co_filename.removeprefix(self.prefix), code.co_firstlineno, code.co_name) for code in ours
        }
        return sorted(place[:2] for place in places if place[2] != "<module>")
