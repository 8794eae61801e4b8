"""Broken places: where, how many lines, and none of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from composer_replication.tasks.instructions.broken_regions import MAX_LINES, broken_regions
from composer_replication.tasks.leaks.shown_code import golden_spans, shows_any
from composer_replication.tasks.store import TaskStore


def regions(store: TaskStore, task_id: str) -> list[str]:
    return broken_regions(store, store.get(task_id)).splitlines()


def test_a_whole_function_and_its_export(sized_store: TaskStore) -> None:
    assert regions(sized_store, "t-function-whole") == [
        "--- tinymath/__init__.py, line 1",
        ' """A few small functions to cut tasks from."""',
        "",
        "- ... 1 line removed",
        "+from tinymath.numbers import absolute, is_even, mean, sign, square",
        " from tinymath.text import initials, is_palindrome, repeat, shout",
        " from tinymath.vector import Vector",
        "",
        " __all__ = [",
        '     "Vector",',
        '     "absolute",',
        "- ... 1 line removed",
        '     "initials",',
        '     "is_even",',
        '     "is_palindrome",',
        "--- tinymath/numbers.py, line 23",
        "     return 1 if x > 0 else 0",
        "",
        "",
        "- ... 5 lines removed",
        " def mean(values):",
        '     """Return the arithmetic mean; no values give 0.0."""',
        "     values = list(values)",
    ]


def test_a_removed_file_and_the_end_of_a_file(sized_store: TaskStore) -> None:
    assert regions(sized_store, "t-module-whole")[:2] == [
        "--- tinymath/text.py",
        "- ... the file, 14 lines removed",
    ]
    assert regions(sized_store, "t-method-whole")[-1] == "- ... 4 lines removed"


def test_every_hole_of_a_class(sized_store: TaskStore) -> None:
    shown = regions(sized_store, "t-class-body")
    assert [line for line in shown if line.startswith("+")] == ["+        raise NotImplementedError"] * 4


def test_no_region_shows_a_removed_line(sized_store: TaskStore) -> None:
    for task in sized_store.tasks():
        text = broken_regions(sized_store, task)
        bare = "\n".join(line[1:] for line in text.splitlines())
        assert not shows_any(bare, golden_spans(sized_store, task)), task.task_id


def test_very_many_places_are_counted(make_store: Any, sized_tasks: Any) -> None:
    source = "".join(f"def f{i}(x):\n    return x + {i}\n\n\n" for i in range(90))
    task = replace(
        sized_tasks["t-module-body"],
        path="many.py",
        functions=tuple(f"many.py::f{i}" for i in range(90)),
        visible=(),
    )
    store = make_store(task, files={"many.py": source.encode()})
    shown = regions(store, task.task_id)
    assert len(shown) == MAX_LINES + 1
    assert shown[-1].startswith("... and ")
