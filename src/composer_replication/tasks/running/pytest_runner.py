"""Runs inside the sandbox, given as ``python -c``: pytest with a protected channel for its records.

Not imported by the package and never placed in a tree. Standard output is kept under a
private descriptor for records; whatever tests print goes to standard error. Each record is
one JSON line that carries the nonce which came on standard input.
"""

import contextlib
import json
import math
import os
import resource
import sys
import time


class Channel:
    """Writes one JSON line per record to the descriptor that was standard output."""

    def __init__(self, descriptor, nonce):
        def send(event, **fields):
            line = json.dumps({"nonce": nonce, "event": event, **fields}) + "\n"
            data = line.encode("utf-8", "backslashreplace")
            while data:
                data = data[os.write(descriptor, data) :]

        self.send = send


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


def make_watch(channel, request):
    """Plugins that tell the server and the records which test or file is at work; none where nobody listens."""
    import pytest

    tell = request["tell"]
    if tell is None:
        return []

    def begins(name):
        data = name.encode("utf-8", "backslashreplace").replace(b"\n", b" ")[:2048]
        with contextlib.suppress(OSError):
            os.write(tell, data + b"\n")

    class Watch:
        def pytest_collectstart(self, collector):
            begins(collector.nodeid)
            if isinstance(collector, pytest.File):
                channel.send("file", id=collector.nodeid)

        def pytest_runtest_logstart(self, nodeid):
            begins(nodeid)

    return [Watch()]


def tell_skip(channel, request, report):
    """Send why a test or a file is skipped, where that is wanted."""
    if request["places"] and report.skipped and isinstance(report.longrepr, tuple):  # file, line, reason
        text = str(report.longrepr[-1]).strip()
        channel.send("skip", id=report.nodeid, text=text.partition("\n")[0][:300])


def note_failure(why, request, report):
    """Keep the first line of what a test says when it fails, where that is wanted."""
    if report.failed and request["places"]:
        crash = getattr(report.longrepr, "reprcrash", None)
        text = str(getattr(crash, "message", None) or report.longrepr).strip()
        why.setdefault(report.nodeid, text.partition("\n")[0][:300])


def state_of(report, before):
    """What one phase says of its test; empty for a setup or teardown that went well."""
    if report.failed:
        return "failed" if report.when == "call" and before != "error" else "error"
    if report.skipped or hasattr(report, "wasxfail"):
        return "skipped"
    return "passed" if report.when == "call" else ""


def make_plugin(channel, request, root):
    """The plugin that selects the wanted tests and reports what became of each."""
    import pytest

    wanted = None if request["node_ids"] is None else set(request["node_ids"])
    seed, home = request["shuffle_seed"], os.getpid()

    class Recorder:
        def __init__(self):
            self.states = {}
            self.why = {}

        @pytest.hookimpl(wrapper=True, tryfirst=True)
        def pytest_collection_modifyitems(self, items):
            if seed is not None:
                # Before all others: pytest then still groups parametrised fixtures, and an order
                # that the repository itself asks for wins, as it does when answers are graded.
                items.sort(key=lambda item: shuffle_key(item, seed), reverse=request["backwards"])
            result = yield
            if wanted is not None:
                items[:] = [item for item in items if item.nodeid in wanted]
            places = [place_of(item, root) for item in items] if request["places"] else []
            channel.send("collected", ids=[item.nodeid for item in items], places=places)
            return result

        def pytest_collectreport(self, report):
            if report.failed:
                text = str(report.longrepr).strip().splitlines()
                channel.send("collect_error", id=report.nodeid, text=text[-1][:300] if text else "")
            tell_skip(channel, request, report)

        @pytest.hookimpl(wrapper=True, tryfirst=True)
        def pytest_runtest_protocol(self, item):
            try:
                return (yield)
            except BaseException as error:  # it ends the whole run
                self.states.pop(item.nodeid, None)
                self.why[item.nodeid] = f"{type(error).__name__}: {error}".partition("\n")[0][:300]
                raise
            finally:
                if os.getpid() != home:  # a test forked, and here comes the child
                    channel.send("doubled", id=item.nodeid)
                    os._exit(0)
                more = {"why": self.why.pop(item.nodeid)} if item.nodeid in self.why else {}
                outcome = self.states.pop(item.nodeid, "") or "missing"
                channel.send("test", id=item.nodeid, outcome=outcome, **more)

        def pytest_runtest_logreport(self, report):
            before = self.states.get(report.nodeid, "")
            state = state_of(report, before)
            note_failure(self.why, request, report)
            if state == "skipped":
                tell_skip(channel, request, report)
            worst = ("", "passed", "skipped", "failed", "error")
            self.states[report.nodeid] = max(before, state, key=worst.index)

    return Recorder()


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


def main():
    """Run what the request on standard input asks for."""
    descriptor = os.dup(1)
    os.set_inheritable(descriptor, False)
    os.dup2(2, 1)
    request = json.loads(sys.stdin.buffer.read())
    channel = Channel(descriptor, request.pop("nonce"))
    root = os.getcwd()
    arguments = prepare(request, root)
    import pytest

    contexts = ContextMap(root) if request["contexts"] else None  # type: ignore[name-defined]  # noqa: F821  of context_recorder
    suite = make_suite(request["options"], request["left_out"])  # type: ignore[name-defined]  # noqa: F821  of suite_plugin
    plugins = [make_plugin(channel, request, root), suite, *make_watch(channel, request)]
    plugins += [contexts] if contexts else []
    code = int(pytest.main(arguments, plugins=plugins))
    more = {"contexts": contexts.contexts()} if contexts else {}
    below = resource.getrusage(resource.RUSAGE_CHILDREN)
    more["cpu_seconds"] = time.process_time() + below.ru_utime + below.ru_stime
    channel.send("end", exit_code=code, **more)
    os._exit(0)  # threads that a test left behind must not hold the result back
