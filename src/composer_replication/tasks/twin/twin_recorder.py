"""Runs inside the sandbox, started by ``pytest_runner.hand_over``: pytest while a profile hook keeps real calls.

Not imported by the package and never placed in a tree. The functions stay what they are:
nothing is wrapped, so identity, signature and pickle name are those of the repository. A
call is kept the moment it begins, before the function can change its arguments.
"""

import base64
import contextlib
import dis
import gc
import inspect
import os
import sys
import types

from composer_replication.tasks.running.pytest_runner import make_suite, prepare
from composer_replication.tasks.twin.call_pickle import MODULE, make_dumps

MAX_CALLS, MAX_CALL_BYTES = 150, 30_000
MAX_ATTEMPTS = 1000  # of one function; a hot one must not make the suite slow


class Target:
    """One function and what was kept of its calls."""

    def __init__(self, code):
        self.blobs = {}  # in the order of the calls
        self.num_attempts = 0
        # A generator is resumed many times; only its first RESUME is a call.
        self.first_resume = next(
            (step.offset for step in dis.get_instructions(code) if step.opname == "RESUME"), -1
        )
        names, self.more, self.named = inspect.getargs(code)
        count = code.co_argcount
        self.positional, self.keywords = names[:count], names[count:]
        # Whatever it is wrapped in: a function object that runs this code, while there is one.
        function = next((f for f in gc.get_referrers(code) if isinstance(f, types.FunctionType)), None)
        defaults = (function and function.__defaults__) or ()
        self.defaults = dict(zip(self.positional[count - len(defaults) :], defaults, strict=True))
        self.defaults |= (function and function.__kwdefaults__) or {}

    def arguments(self, values):
        """Positional and keyword arguments of a call, without trailing ones that are the default itself."""

        def is_given(name):
            return name not in self.defaults or values[name] is not self.defaults[name]

        more, positional = values[self.more] if self.more else (), list(self.positional)
        while positional and not more and not is_given(positional[-1]):
            positional.pop()
        kwargs = {name: values[name] for name in self.keywords if is_given(name)}
        kwargs.update(values[self.named] if self.named else {})
        return (*(values[name] for name in positional), *more), kwargs


class Recorder:
    """The profile hook, and a plugin of pytest that sets it while a test runs."""

    def __init__(self, request, root):
        import pytest

        # All our temporary folders are below one, whose name is drawn at random; nothing is there when a call is made again.
        ours = os.path.basename(request["ours"])
        self.pickler, self.dumps = sys.modules[MODULE], make_dumps(ours, MAX_CALL_BYTES)
        self.by_value = {os.path.join(root, path) for path in request["by_value"]}
        self.wanted = {
            (os.path.join(root, path), line): number for number, (path, line) in enumerate(request["targets"])
        }
        self.targets, self.by_code = {}, {}
        pytest.hookimpl(trylast=True)(Recorder.pytest_collection_finish)
        pytest.hookimpl(wrapper=True, tryfirst=True)(Recorder.pytest_runtest_protocol)

    def hook(self, frame, event, _argument):
        if event != "call":
            return
        code = frame.f_code
        # By identity: two equal functions of two files have equal code objects.
        known = self.by_code.get(id(code))
        if known is None:
            number = self.wanted.get((code.co_filename, code.co_firstlineno))
            target = None
            if number is not None and not code.co_name.startswith("<"):
                target = self.targets.setdefault(number, Target(code))
            known = self.by_code[id(code)] = (code, target)
        target = known[1]
        if target is None or frame.f_lasti != target.first_resume:
            return
        if target.num_attempts < MAX_ATTEMPTS and len(target.blobs) < MAX_CALLS:
            target.num_attempts += 1
            # Whatever a value raises when it is pickled, this call is not kept.
            with contextlib.suppress(Exception):
                target.blobs[self.dumps(target.arguments(frame.f_locals))] = None

    def pytest_collection_finish(self):
        for module in list(sys.modules.values()):
            if getattr(module, "__file__", None) in self.by_value:
                self.pickler.register_pickle_by_value(module)

    def pytest_runtest_protocol(self):
        sys.setprofile(self.hook)
        try:
            return (yield)
        finally:
            sys.setprofile(None)


def main(request, send):
    """Run the suite, and send the calls."""
    root = os.getcwd()
    arguments = prepare(request, root)
    import pytest

    recorder = Recorder(request, root)
    code = pytest.main(arguments, plugins=[recorder, make_suite(request["options"], request["left_out"])])
    for number, target in sorted(recorder.targets.items()):
        send("calls", target=number, calls=[base64.b64encode(blob).decode() for blob in target.blobs])
    send("end", exit_code=int(code))
    os._exit(0)  # threads that a test left behind must not hold the result back
