"""Runs inside the sandbox behind ``pytest_runner.py``: which functions each single test calls.

Not imported by the package and never placed in a tree. A function belongs to a test if it was
called between the first setup and the last teardown of it. What is called while a module is
imported, tests are collected, or a fixture of wider scope comes and goes happens once for many
tests: it belongs to none of them and so to all.
"""

import contextlib
import os
import sys

UNKNOWN = ("", 0)  # called by a test that took the profile away from us: it may have called anything


class Functions:
    """Tells functions of the tree, as file and first line; nothing else has a place."""

    def __init__(self, root):
        self.prefix = root + os.sep
        self.by_code = {}

    def place(self, code):
        """The place of a code object, or None; found by identity, for to hash one is slow."""
        found = self.by_code.get(id(code))
        if found is None:
            place = None
            if code.co_filename.startswith(self.prefix) and code.co_name != "<module>":
                place = (code.co_filename[len(self.prefix) :], code.co_firstlineno)
            self.by_code[id(code)] = found = (place, code)  # kept, so that its id stays its own
        return found[0]


class Monitor(Functions):
    """Python 3.12 and newer: the first call of each function in each context is one event."""

    TOOL = 4  # no debugger, coverage or profiler uses this number of sys.monitoring

    def __init__(self, root):
        super().__init__(root)
        self.current = set()
        self.monitoring = monitoring = getattr(sys, "monitoring")  # noqa: B009  of Python 3.12
        monitoring.use_tool_id(self.TOOL, "composer-rl")
        events = (monitoring.events.PY_START, monitoring.events.PY_RESUME)
        for event in events:
            monitoring.register_callback(self.TOOL, event, self.on_event)
        monitoring.set_events(self.TOOL, sum(events))

    def on_event(self, code, _offset):
        self.current.add(self.place(code))
        return self.monitoring.DISABLE

    def switch(self, context, *, by_force):  # noqa: ARG002  nobody takes these events away
        self.current = context
        self.monitoring.restart_events()


class Profile(Functions):
    """Before Python 3.12: the profiler of the interpreter, which counts calls in C."""

    def __init__(self, root):
        import _lsprof
        import threading

        super().__init__(root)
        self.new = lambda: _lsprof.Profiler(builtins=False, subcalls=False)
        self.current = set()
        self.profiler = self.new()
        threading.setprofile(self.on_thread)
        self.profiler.enable()

    def on_thread(self, frame, event, _argument):
        if event == "call":
            self.current.add(self.place(frame.f_code))

    def switch(self, context, *, by_force):
        """Note what was called and go on in another context; ``by_force`` also when another profiler came."""
        current: object = sys.getprofile()
        is_ours = current is self.profiler
        if is_ours:
            self.profiler.disable()
            codes = [entry.code for entry in self.profiler.getstats()]
            self.current.update(self.place(code) for code in codes if not isinstance(code, str))
        else:
            self.current.add(UNKNOWN)
            if not by_force:
                context.add(UNKNOWN)
        self.current = context
        if is_ours or by_force:
            self.profiler = self.new()
            self.profiler.enable()


class ContextMap:
    """A plugin of the test runner that keeps, for each test, the functions that it calls."""

    def __init__(self, root):
        import pytest

        self.shared: set[tuple[str, int]] = set()
        self.tests: dict[str, set[tuple[str, int]]] = {}
        self.context = self.shared
        self.engine = (Monitor if hasattr(sys, "monitoring") else Profile)(root)
        self.engine.switch(self.shared, by_force=True)
        for name in ("pytest_runtest_protocol", "pytest_fixture_setup"):
            hook = getattr(type(self), name)
            setattr(type(self), name, pytest.hookimpl(wrapper=True, tryfirst=True)(hook))
        self.share_imports(root + os.sep)

    def switch(self, context, *, by_force=False):
        self.context = context
        self.engine.switch(context, by_force=by_force)

    @contextlib.contextmanager
    def for_all(self):
        """Until its end everything belongs to all tests."""
        before = self.context
        if before is self.shared:
            yield
            return
        self.switch(self.shared)
        try:
            yield
        finally:
            self.switch(before)

    def share_imports(self, prefix):
        """What a module calls while it is imported, also where a test is the first to import it, belongs to all.

        So does what a wider fixture does when it ends, in the teardown of whichever test is the last of its scope.
        """
        from importlib.machinery import SourceFileLoader

        from _pytest.assertion.rewrite import AssertionRewritingHook
        from _pytest.fixtures import FixtureDef

        def is_of_tree(_loader, module):
            return str(getattr(module, "__file__", "")).startswith(prefix)

        def is_wide(fixture, *_request):
            return fixture.scope != "function"

        shared = [(SourceFileLoader, "exec_module", is_of_tree), (FixtureDef, "finish", is_wide)]
        for kind, name, concerns in [*shared, (AssertionRewritingHook, "exec_module", is_of_tree)]:
            setattr(kind, name, self.shared_where(concerns, getattr(kind, name)))

    def shared_where(self, concerns, method):
        def call(*args, **options):
            with self.for_all() if concerns(*args) else contextlib.nullcontext():
                return method(*args, **options)

        return call

    def pytest_runtest_protocol(self, item):
        self.switch(self.tests.setdefault(item.nodeid, set()), by_force=True)
        try:
            return (yield)
        finally:
            self.switch(self.shared, by_force=True)

    def pytest_fixture_setup(self, fixturedef):
        if fixturedef.scope == "function":
            return (yield)
        with self.for_all():
            return (yield)

    def contexts(self):
        """In the form of ``call_contexts.encode``: functions once, each distinct set of their numbers once."""
        self.switch(self.shared, by_force=True)
        called = {"": self.shared, **self.tests}
        functions = [*set().union(*called.values()) - {None}]
        numbers = {function: number for number, function in enumerate(functions)}
        sets: dict[tuple[int, ...], int] = {}
        chosen = {
            test: tuple(sorted(numbers[one] for one in places if one)) for test, places in called.items()
        }
        shared = chosen.pop("")
        tests = [[test, sets.setdefault(one, len(sets))] for test, one in chosen.items()]
        return {"form": 1, "functions": functions, "shared": shared, "sets": list(sets), "tests": tests}
