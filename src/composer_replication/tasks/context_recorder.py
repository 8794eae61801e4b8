"""Which functions each single test calls: seen inside the sandbox, behind ``pytest_runner.py``, and read and asked outside.

Contexts map a test's node id to the functions (file, first line) of the tree that were called while it ran. A function belongs to a test if it was called between the
first setup and the last teardown of it. What is called while tests are collected, or a fixture of wider scope is made,
happens once for many tests: it belongs to none of them and so to all, under ``""``.
"""

import os
import sys
from collections.abc import Iterable, Mapping
from typing import Any

Function = tuple[str, int]
Contexts = Mapping[str, frozenset[Function]]
UNKNOWN = ("", 0)
"""Called by a test whose calls could not be watched to the end: it may have called anything."""
EVERY_TEST = ""
FORM = 1


def encode(contexts: Any) -> Any:
    """Contexts as JSON: functions once, each distinct set of them once, the tests by set."""
    tests = {test: frozenset(called) for test, called in contexts.items() if test != EVERY_TEST}
    shared = frozenset(contexts.get(EVERY_TEST, ()))
    functions = sorted(shared.union(*tests.values()))
    numbers = {function: number for number, function in enumerate(functions)}
    sets: dict[frozenset[Any], int] = {}
    for called in tests.values():
        sets.setdefault(called, len(sets))
    return {
        "form": FORM,
        "functions": [list(function) for function in functions],
        "shared": sorted(numbers[function] for function in shared),
        "sets": [sorted(numbers[function] for function in called) for called in sets],
        "tests": [[test, sets[called]] for test, called in tests.items()],
    }


def select_tests(contexts: Contexts, functions: Iterable[Function]) -> tuple[str, ...]:
    """The tests that called one of the functions, in the order of the contexts; all, if all did.

    A test is also chosen when its calls are not fully known. What is not seen: a call that an earlier test made in its
    place because its result was kept (``lru_cache``, a lazy global), and calls in child processes. So the choice saves
    time where a whole run confirms it.
    """
    wanted = {*functions, UNKNOWN}
    is_for_all = not wanted.isdisjoint(contexts.get(EVERY_TEST, ()))
    calls = ((test, called) for test, called in contexts.items() if test != EVERY_TEST)
    return tuple(test for test, called in calls if is_for_all or not wanted.isdisjoint(called))


def decode(value: Mapping[str, Any]) -> dict[str, frozenset[Function]]:
    """The contexts that ``encode`` wrote; a ValueError for another form, or what it never writes."""
    try:
        if value["form"] != FORM:
            raise ValueError(f"form {value['form']!r}")
        functions = [(str(path), int(line)) for path, line in value["functions"]]
        of_numbers = (value["shared"], *value["sets"])
        shared, *sets = (frozenset(functions[number] for number in numbers) for numbers in of_numbers)
        return {EVERY_TEST: shared, **{str(test): sets[number] for test, number in value["tests"]}}
    except (KeyError, TypeError, ValueError, IndexError, OverflowError) as error:
        raise ValueError(f"the call contexts are damaged: {error}") from error


class Functions:
    """Tells functions of the tree, as file and first line; nothing else has a place."""

    def __init__(self, root):
        self.prefix = root + os.sep
        self.by_code = {}

    def place(self, code):
        """The place of a code object, or None; found by identity, for to hash one is slow."""
        if id(code) not in self.by_code:
            path = code.co_filename.removeprefix(self.prefix)
            is_ours = path != code.co_filename and code.co_name != "<module>"
            place = (path, code.co_firstlineno) if is_ours else None
            self.by_code[id(code)] = place, code  # kept, so that its id stays its own
        return self.by_code[id(code)][0]


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

    def switch(self, context, *, by_force=False):
        self.context = context
        self.engine.switch(context, by_force=by_force)

    def pytest_runtest_protocol(self, item):
        self.switch(self.tests.setdefault(item.nodeid, set()), by_force=True)
        try:
            return (yield)
        finally:
            self.switch(self.shared, by_force=True)

    def pytest_fixture_setup(self, fixturedef):
        """What a fixture of wider scope calls when it is made belongs to all tests."""
        before = self.context
        if fixturedef.scope != "function" and before is not self.shared:
            self.switch(self.shared)
        try:
            return (yield)
        finally:
            if self.context is not before:
                self.switch(before)

    def contexts(self):
        """What each test called, in the form of ``encode``."""
        self.switch(self.shared, by_force=True)
        called = {EVERY_TEST: self.shared, **self.tests}
        return encode({test: functions - {None} for test, functions in called.items()})
