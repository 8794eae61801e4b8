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


class Places:
    """Gives each function of the tree a number; what is no function of the tree has none."""

    def __init__(self, root):
        self.prefix = root + os.sep
        self.numbers = {}
        self.by_code = {}

    def number(self, place):
        return self.numbers.setdefault(place, len(self.numbers))

    def of(self, code):
        """The number of a code object, or None; found by identity, for to hash one is slow."""
        found = self.by_code.get(id(code))
        if found is None:
            number = None
            if code.co_filename.startswith(self.prefix) and code.co_name != "<module>":
                number = self.number((code.co_filename[len(self.prefix) :], code.co_firstlineno))
            self.by_code[id(code)] = found = (number, code)  # kept, so that its id stays its own
        return found[0]

    def listed(self):
        return [list(place) for place in self.numbers]


class Monitor:
    """Python 3.12 and newer: the first call of each function in each context is one event."""

    TOOL = 4  # no debugger, coverage or profiler uses this number of sys.monitoring

    def __init__(self, places):
        self.places = places
        self.current = set()
        self.monitoring = monitoring = getattr(sys, "monitoring")  # noqa: B009  of Python 3.12
        monitoring.use_tool_id(self.TOOL, "composer-rl")
        events = (monitoring.events.PY_START, monitoring.events.PY_RESUME)
        for event in events:
            monitoring.register_callback(self.TOOL, event, self.on_event)
        monitoring.set_events(self.TOOL, sum(events))

    def on_event(self, code, _offset):
        number = self.places.of(code)
        if number is not None:
            self.current.add(number)
        return self.monitoring.DISABLE

    def switch(self, context, *, by_force):  # noqa: ARG002  nobody takes these events away
        self.current = context
        self.monitoring.restart_events()


class Profile:
    """Before Python 3.12: the profiler of the interpreter, which counts calls in C."""

    def __init__(self, places):
        import _lsprof
        import threading

        self.new = lambda: _lsprof.Profiler(builtins=False, subcalls=False)
        self.places = places
        self.current = set()
        self.profiler = self.new()
        threading.setprofile(self.on_thread)
        self.profiler.enable()

    def on_thread(self, frame, event, _argument):
        if event == "call":
            number = self.places.of(frame.f_code)
            if number is not None:
                self.current.add(number)

    def switch(self, context, *, by_force):
        """Note what was called and go on in another context; ``by_force`` also when another profiler came."""
        current: object = sys.getprofile()
        is_ours = current is self.profiler
        if is_ours:
            self.profiler.disable()
        else:
            unknown = self.places.number(UNKNOWN)
            self.current.add(unknown)
            if not by_force:
                context.add(unknown)
        for entry in self.profiler.getstats() if is_ours else ():
            if not isinstance(entry.code, str):
                number = self.places.of(entry.code)
                if number is not None:
                    self.current.add(number)
        self.current = context
        if is_ours or by_force:
            self.profiler = self.new()
            self.profiler.enable()


class ContextMap:
    """A plugin of the test runner that keeps, for each test, the functions that it calls."""

    def __init__(self, root):
        import pytest

        self.places = Places(root)
        self.shared: set[int] = set()
        self.tests: dict[str, set[int]] = {}
        self.context = self.shared
        self.engine = (Monitor if hasattr(sys, "monitoring") else Profile)(self.places)
        self.engine.switch(self.shared, by_force=True)
        for name in ("pytest_runtest_protocol", "pytest_fixture_setup"):
            hook = getattr(type(self), name)
            setattr(type(self), name, pytest.hookimpl(wrapper=True, tryfirst=True)(hook))
        self.watch_imports(root)
        self.watch_teardown()

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

    def watch_imports(self, root):
        """What a module calls while it is imported belongs to all, also when a test is the first to import it."""
        import importlib.machinery

        from _pytest.assertion.rewrite import AssertionRewritingHook

        for loader in (importlib.machinery.SourceFileLoader, AssertionRewritingHook):
            setattr(loader, "exec_module", self.watched(loader.exec_module, root + os.sep))  # noqa: B010  mypy

    def watched(self, exec_module, prefix):
        def watched_exec_module(loader, module):
            if not str(getattr(module, "__file__", "")).startswith(prefix):
                return exec_module(loader, module)
            with self.for_all():
                return exec_module(loader, module)

        return watched_exec_module

    def watch_teardown(self):
        """A wider fixture ends in the teardown of whichever test is the last of its scope."""
        from _pytest.fixtures import FixtureDef

        finish = FixtureDef.finish

        def watched_finish(fixturedef, request):
            if fixturedef.scope == "function":
                return finish(fixturedef, request)
            with self.for_all():
                return finish(fixturedef, request)

        setattr(FixtureDef, "finish", watched_finish)  # noqa: B010  mypy

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
        sets: dict[tuple[int, ...], int] = {}
        tests = [
            [node_id, sets.setdefault(tuple(sorted(numbers)), len(sets))]
            for node_id, numbers in self.tests.items()
        ]
        return {
            "form": 1,
            "functions": self.places.listed(),
            "shared": sorted(self.shared),
            "sets": list(sets),
            "tests": tests,
        }
