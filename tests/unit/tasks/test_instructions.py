"""An instruction says what is asked for, and never what the answer is."""

from __future__ import annotations

from dataclasses import replace

import pytest

from composer_replication.errors import InputError
from composer_replication.records import Hole, Task
from composer_replication.tasks.instructions import writing as instructions
from composer_replication.tasks.instructions.writing import (
    MAX_SOURCES,
    instruction_text,
    look_around,
    read_material,
    write_instruction,
)
from composer_replication.tasks.leaks.shown_code import shows_any
from composer_replication.tasks.planning.body_cuts import BodyCut, find_body_cuts
from composer_replication.tasks.planning.edits import edited_text, holes_of
from composer_replication.tasks.store import TaskStore

FILE = '''\
import os


class Box:
    """A box."""

    size = 1

    def first(self):
        return 1

    @property
    def second(self, a=1,
               b=2):
        """Say two.

        More.
        """
        x = self.size
        return x + 1

    def third(self): return 3


def outside(x: int) -> int:
    # a comment
    y = x * 2
    return y
'''


def broken(symbol: str) -> tuple[str, Hole, BodyCut]:
    (deletion,) = [found for found in find_body_cuts("box.py", FILE) if found.symbol == symbol]
    (hole,) = holes_of([deletion.edit])
    return edited_text(FILE, [deletion.edit]), hole, deletion


def task_of(store: TaskStore, symbol: str) -> Task:
    (task,) = [task for task in store.tasks() if task.symbol == symbol]
    return task


def test_surroundings_of_a_method() -> None:
    text, hole, _ = broken("Box.second")
    found = look_around(text, hole)
    assert found.header == "    @property\n    def second(self, a=1,\n               b=2):"
    assert found.docstring == '        """Say two.\n\n        More.\n        """'
    assert (found.owner, found.siblings, found.neighbours) == ("Box", ("first", "third"), ("outside",))
    assert found.line == 19


def test_a_file_that_does_not_parse_still_has_a_place() -> None:
    text, hole, _ = broken("outside")
    found = look_around(text + "\n(((", hole)
    assert (found.line, found.header, found.neighbours) == (26, "", ())


def test_what_an_instruction_says(tiny_store: TaskStore) -> None:
    task = task_of(tiny_store, "Vector.length")
    text = write_instruction(tiny_store, task)
    assert text.startswith("Write the body of `Vector.length` in `tinymath/vector.py`.\n")
    assert '    @property\n    def length(self):\n        """The Euclidean length."""' in text
    assert "class `Vector`, beside `__init__`, `dot`, `scaled`." in text
    assert all(f"- {test}" in text for test in task.tests.visible)
    assert "def test_" in text
    assert "** 0.5" not in text


@pytest.mark.parametrize(
    ("text", "golden", "shown"),
    [
        ("x\n  a = 1\n\n  # why\n  return a\ny", "\n    a = 1\n    return a", True),
        ("a = 1\nb = 2\nreturn a", "\n    a = 1\n    return a", False),
        ("say\nreturn x + 1\nend", "\n    return x + 1", True),
        ("say return x + 1\nend", "\n    return x + 1", False),
        ("anything", "\n    # nothing\n", False),
    ],
)
def test_when_a_body_is_shown(text: str, golden: str, shown: bool) -> None:
    assert shows_any(text, [golden]) is shown


def test_an_instruction_that_cannot_but_show_it_is_refused(
    tiny_store: TaskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = task_of(tiny_store, "clamp")
    monkeypatch.setattr(instructions, "golden_spans", lambda *_: ("\n    def clamp(x, low, high):\n",))
    with pytest.raises(InputError, match="CR0429") as caught:
        write_instruction(tiny_store, task)
    assert caught.value.where == task.task_id


def test_long_lists_are_clipped_and_say_so(tiny_store: TaskStore) -> None:
    task = task_of(tiny_store, "clamp")
    names = tuple(f"t.py::test_{i}" for i in range(25))
    many = replace(task, tests=replace(task.tests, visible=names))
    material = read_material(tiny_store, task)
    ((path, place),) = material.places
    around = replace(place, neighbours=tuple(f"n{i}" for i in range(30)))
    source = "\n".join(["def test():", *(f"    x{i} = '```'" for i in range(40))])
    text = instruction_text(
        replace(material, task=many, places=((path, around),), sources=(("t.py", source),) * 8)
    )
    assert "- and 5 more" in text
    assert "t.py::test_19\n" in text
    assert "t.py::test_20" not in text
    assert "`n19`, 10 more." in text
    assert "# 11 more lines\n````" in text  # a fence longer than what stands in the code
    assert "2 more functions" in text
    assert text.count("From `t.py`") == MAX_SOURCES
