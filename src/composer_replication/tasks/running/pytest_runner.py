"""Runs inside the sandbox, given as ``python -c``: pytest with a protected channel for its records.

Not imported by the package and never placed in a tree. Standard output is kept under a
private descriptor for records; whatever tests print goes to standard error. Each record is
one JSON line that carries the nonce which came on standard input.
"""

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
    state = "passed" if report.when == "call" else ""
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
    request["options"] = importable_plugins(request["options"], root)  # type: ignore[name-defined]  # noqa: F821  of suite_plugin
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

    calls = CallRecorder(root) if request["calls"] else None  # type: ignore[name-defined]  # noqa: F821  of call_recorder
    suite = make_suite(request["options"], request["left_out"])  # type: ignore[name-defined]  # noqa: F821  of suite_plugin
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
