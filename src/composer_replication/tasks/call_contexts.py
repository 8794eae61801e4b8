"""Which tests call which functions: a compact form to keep, and the tests that a deletion can touch.

Contexts map a test's node id to the functions (file, first line) of the tree that were called
while it ran. Under ``""`` are those called for all tests: while modules were imported, tests
collected, or a fixture of wider scope made or ended.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

Function = tuple[str, int]
Contexts = Mapping[str, frozenset[Function]]

EVERY_TEST, UNKNOWN, FORM = "", ("", 0), 1
"""As ``context_recorder`` has them, which runs inside and imports nothing of ours."""


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
    """The contexts that ``context_recorder.encode`` wrote; a ValueError for another form, or what it never writes."""
    try:
        if value["form"] != FORM:
            raise ValueError(f"form {value['form']!r}")
        functions = [(str(path), int(line)) for path, line in value["functions"]]
        of_numbers = (value["shared"], *value["sets"])
        shared, *sets = (frozenset(functions[number] for number in numbers) for numbers in of_numbers)
        return {EVERY_TEST: shared, **{str(test): sets[number] for test, number in value["tests"]}}
    except (KeyError, TypeError, ValueError, IndexError, OverflowError) as error:
        raise ValueError(f"the call contexts are damaged: {error}") from error
