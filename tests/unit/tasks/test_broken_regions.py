"""Broken places: where, how many lines, and none of them."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from composer_replication.tasks.instructions.broken_regions import MAX_REGIONS, broken_regions
from composer_replication.tasks.leaks.shown_code import golden_spans, shows_any
from composer_replication.tasks.store import TaskStore


def regions(store: TaskStore, task_id: str) -> list[str]:
    return broken_regions(store, store.get(task_id)).splitlines()


def test_a_whole_function_and_its_export(sized_store: TaskStore) -> None:
    assert regions(sized_store, "t-function-whole") == [
        "--- tinymath/__init__.py",
        '    1   """A few small functions to cut tasks from."""',
        "    2",
        "      - ... 1 line removed",
        "    3 + from tinymath.numbers import absolute, is_even, mean, sign, square",
        "    4   from tinymath.text import initials, is_palindrome, repeat, shout",
        "    5   from tinymath.vector import Vector",
        "    6",
        "--- tinymath/__init__.py",
        "    7   __all__ = [",
        '    8       "Vector",',
        '    9       "absolute",',
        "      - ... 1 line removed",
        '   10       "initials",',
        '   11       "is_even",',
        '   12       "is_palindrome",',
        "--- tinymath/numbers.py",
        "   23       return 1 if x > 0 else 0",
        "   24",
        "   25",
        "      - ... 5 lines removed",
        "   26   def mean(values):",
        '   27       """Return the arithmetic mean; no values give 0.0."""',
        "   28       values = list(values)",
    ]


def test_a_removed_file_and_the_end_of_a_file(sized_store: TaskStore) -> None:
    assert regions(sized_store, "t-module-whole")[:2] == [
        "--- tinymath/text.py",
        "      - ... the file, 14 lines removed",
    ]
    assert regions(sized_store, "t-method-whole")[-1] == "      - ... 4 lines removed"


def test_every_hole_of_a_class(sized_store: TaskStore) -> None:
    shown = regions(sized_store, "t-class-body")
    assert [line for line in shown if " + " in line] == [
        f"{number:>5} +         raise NotImplementedError" for number in (8, 12, 16, 21)
    ]


def test_a_part_of_a_line(make_store: Any, sized_tasks: Any) -> None:
    from composer_replication.records import Edit

    store = make_store(sized_tasks["t-function-whole"])
    record = store.record("t-function-whole")
    text = store.files(store.get("t-function-whole"), "golden")["tinymath/__init__.py"].decode()
    start = text.index("clamp, ")
    edits = (Edit("tinymath/__init__.py", start, start + len("clamp, "), ""),)
    store.put_task(replace(record, edits=edits), store.secret("t-function-whole"))
    assert regions(store, "t-function-whole")[3:5] == [
        "      - ... a part of the line removed",
        "    3 + from tinymath.numbers import absolute, is_even, mean, sign, square",
    ]


def test_no_region_shows_a_removed_line(sized_store: TaskStore) -> None:
    for task in sized_store.tasks():
        text = broken_regions(sized_store, task)
        bare = "\n".join(re.sub(r"^ *\d+ [+ ] ?", "", line) for line in text.splitlines())
        assert not shows_any(bare, golden_spans(sized_store, task)), task.task_id


def test_very_many_places_are_counted(make_store: Any, sized_tasks: Any) -> None:
    source = "".join(f"def f{i}(x):\n    return x + {i}\n\n\n" for i in range(30))
    task = replace(
        sized_tasks["t-module-body"],
        path="many.py",
        functions=tuple(f"many.py::f{i}" for i in range(30)),
        visible=(),
    )
    store = make_store(task, files={"many.py": source.encode()})
    shown = regions(store, task.task_id)
    assert shown.count("--- many.py") == MAX_REGIONS
    assert shown[-1] == f"... and {30 - MAX_REGIONS} more places"
