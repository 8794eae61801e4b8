"""An instruction for every size and way: what it must say, and what it must never show."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from composer_replication.errors import InputError
from composer_replication.records import Edit, Hole
from composer_replication.tasks import instructions
from composer_replication.tasks.instructions import (
    MAX_FUNCTIONS,
    MAX_LINE_CHARS,
    MAX_SOURCES,
    clipped,
    instruction_text,
    look_around,
    write_instruction,
)
from composer_replication.tasks.leaks.shown_code import golden_spans, shows_any, spans_of
from composer_replication.tasks.planning.body_cuts import find_body_cuts
from composer_replication.tasks.planning.edits import Changes, edited_text, holes_of
from composer_replication.tasks.store import TaskStore

GOLDEN_LINES = (
    "return min(x, high)",
    "return self.x * other.x + self.y * other.y",
    "** 0.5",
    'text.upper() + "!"',
    "letters == letters[::-1]",
    "self.x = x",
)


def instruction(store: TaskStore, task_id: str) -> str:
    return write_instruction(store, store.get(task_id))


def test_none_shows_golden_code_or_a_hidden_test(sized_store: TaskStore) -> None:
    kinds = {(task.granularity, task.removal) for task in sized_store.tasks()}
    assert kinds == {(g, r) for g in ("function", "class", "module", "feature") for r in ("body", "whole")}
    for task in sized_store.tasks():
        text = write_instruction(sized_store, task)
        assert not shows_any(text, golden_spans(sized_store, task)), task.task_id
        assert not any(line in text for line in GOLDEN_LINES), task.task_id
        for hidden in task.tests.hidden:
            assert hidden.rpartition("::")[2] + "(" not in text
            assert f"- {hidden}\n" not in text
        assert all(f"- {test}\n" in text for test in task.tests.visible)
        assert "def test_" in text


@pytest.mark.parametrize(
    ("task_id", "functions"),
    [
        ("t-class-body", ("Vector.__init__", "Vector.dot", "Vector.scaled", "Vector.length")),
        ("t-module-body", ("shout", "repeat", "initials", "is_palindrome")),
        ("t-feature-body", ("clamp", "shout")),
    ],
)
def test_removed_bodies_are_listed_with_signature_and_docstring(
    sized_store: TaskStore, task_id: str, functions: tuple[str, ...]
) -> None:
    text = instruction(sized_store, task_id)
    files = sized_store.files(sized_store.get(task_id), "rollout")
    assert f"Write the {len(functions)} missing bodies of " in text
    for name in functions:
        head, _, rest = text.partition(f", `{name}`, line ")
        line = int(rest.partition(":")[0])
        path = head.rpartition("In `")[2].partition("`")[0]
        assert files[path].decode().splitlines()[line - 1].strip() == "raise NotImplementedError"
        block = rest.partition("```python\n")[2].partition("\n```")[0]
        assert f"def {name.rpartition('.')[2]}(" in block
        assert block in files[path].decode()
    assert text.count('"""') == 2 * len([name for name in functions if name != "Vector.__init__"])


def test_a_whole_function_is_known_by_its_tests(sized_store: TaskStore) -> None:
    text = instruction(sized_store, "t-function-whole")
    assert text.startswith("Write the function `clamp` again: it was removed from `tinymath/numbers.py`.\n")
    assert "clamp(50" not in text  # only a hidden test calls it so
    assert "Lines are missing in other files too: `tinymath/__init__.py`." in text
    assert (
        "def test_clamp_inside():\n    from tinymath import clamp\n" in text
    )  # as it stands in the rollout's tree


@pytest.mark.parametrize(
    ("task_id", "said", "not_said"),
    [
        ("t-method-whole", ["Write the method `Vector.length` again", "it was removed from `tinymath/vector.py`"], ""),
        ("t-class-whole", ["Write the class `Vector` again", "assert Vector(3, 4).length == 5"], ""),
        ("t-module-whole", ["again: it was removed from `tinymath/text.py`, which is gone.\n", "shout("], "palindrome"),  # no visible test
        ("t-feature-whole", ["with everything that only it needs", "`tinymath/__init__.py`, `tinymath/text.py`."], ""),
        ("t-function-whole", ["Write the function `clamp` again"], "nearest to"),  # its docstring
    ],
)  # fmt: skip
def test_what_each_size_says(sized_store: TaskStore, task_id: str, said: list[str], not_said: str) -> None:
    text = instruction(sized_store, task_id)
    assert all(words in text for words in said)
    assert not not_said or not_said not in text


def test_a_test_that_shows_one_of_many_bodies_is_left_out(make_store: Any, sized_tasks: Any) -> None:
    project = Path(__file__).parents[3] / "recipes" / "tiny-cpu" / "project"
    files = {p.relative_to(project).as_posix(): p.read_bytes() for p in project.rglob("*.py")}
    shown = b'\n\ndef test_oracle():\n    def oracle(text):\n        return text.upper() + "!"\n\n    assert oracle\n'
    files["tests/test_text.py"] += shown
    task = sized_tasks["t-module-body"]
    task = replace(task, visible=(*task.visible, "tests/test_text.py::test_oracle"))
    store = make_store(task, files=files)
    text = instruction(store, task.task_id)
    assert "- tests/test_text.py::test_oracle\n" in text
    assert "def oracle" not in text
    assert "def test_shout" in text  # the others stay


def store_of_many(make_store: Any, sized_tasks: Any, num_functions: int) -> tuple[TaskStore, str]:
    source = "".join(
        f'def f{i}(x):\n    """Doc {i}."""\n    return x + {i} * 7\n\n\n' for i in range(num_functions)
    )
    tests = b"import many\n\n\ndef test_it():\n    assert many.f1(1) == 8\n"
    functions = tuple(f"many.py::f{i}" for i in range(num_functions))
    visible = ("test_many.py::test_it",)
    task = replace(
        sized_tasks["t-module-body"], path="many.py", symbol="many", functions=functions, visible=visible
    )
    return make_store(task, files={"many.py": source.encode(), "test_many.py": tests}), task.task_id


def test_very_many_functions_and_long_lines_are_bounded(make_store: Any, sized_tasks: Any) -> None:
    store, task_id = store_of_many(make_store, sized_tasks, 90)
    text = instruction(store, task_id)
    assert text.count("def f") == MAX_FUNCTIONS
    assert f"And {90 - MAX_FUNCTIONS} more functions with that statement in them." in text
    assert len(text) < 6000
    text = clipped("x = '" + "a" * 10_000 + "'")
    assert len(text) < MAX_LINE_CHARS + 40
    assert text.endswith("… 9606 more characters")  # 10 006 in all


def edit_of(text: str, piece: str) -> Edit:
    start = text.index(piece)
    return Edit("a.py", start, start + len(piece), "")


def test_which_spans_are_golden() -> None:
    original = {
        "a.py": "import os\nfrom b import (\n    c,\n)\n\n\ndef f():\n    return os\n\n\nx = f() + 1\n",
        "g.py": "y = 2 * 3\n",
    }
    pieces = (
        "from b import (\n    c,\n)\n", "def f():\n    return os\n", "    return os\n", "x = f() + 1\n",
    )  # fmt: skip
    names, function, body, value = (edit_of(original["a.py"], piece) for piece in pieces)
    assert spans_of(original, Changes((body,)), ()) == ("    return os\n",)
    # An import tells names, which the tests tell too; a body, a definition and a value are code.
    assert spans_of(original, Changes((names, function, value), ("g.py",)), (body,)) == (
        "    return os\n",
        "def f():\n    return os\n",
        "x = f() + 1\n",
        "y = 2 * 3\n",
    )


def test_of_many_bodies_those_that_do_nothing_are_not_searched_for() -> None:
    text = "def f():\n    return self\n\ndef g():\n    return 7 * 6\n"
    cuts = [edit_of(text, piece) for piece in ("    return self", "    return 7 * 6")]
    assert spans_of({"a.py": text}, Changes(tuple(cuts)), ()) == ("    return 7 * 6",)
    alone = Changes((cuts[0],))  # then it is the answer
    assert spans_of({"a.py": text}, alone, ()) == ("    return self",)


# --- the surroundings of one hole ---

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


def broken(symbol: str) -> tuple[str, Hole]:
    (cut,) = [found for found in find_body_cuts("box.py", FILE) if found.symbol == symbol]
    return edited_text(FILE, [cut.edit]), holes_of([cut.edit])[0]


def test_surroundings_of_a_method_and_of_a_file_that_does_not_parse() -> None:
    text, hole = broken("Box.second")
    found = look_around(text, hole)
    assert found.header == "    @property\n    def second(self, a=1,\n               b=2):"
    assert found.docstring == '        """Say two.\n\n        More.\n        """'
    assert (found.owner, found.siblings, found.neighbours) == ("Box", ("first", "third"), ("outside",))
    assert found.line == 19
    text, hole = broken("outside")
    found = look_around(text + "\n(((", hole)
    assert (found.line, found.header, found.neighbours) == (26, "", ())


def test_what_an_instruction_for_one_method_says(make_store: Any, sized_tasks: Any) -> None:
    store = make_store(replace(sized_tasks["t-method-whole"], removal="body", texts=None))
    (task,) = store.tasks()
    text = write_instruction(store, task)
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
    sized_store: TaskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = sized_store.get("t-function-body")
    monkeypatch.setattr(instructions, "golden_spans", lambda *_: ("\n    def clamp(x, low, high):\n",))
    with pytest.raises(InputError, match="CR0429") as caught:
        write_instruction(sized_store, task)
    assert caught.value.where == task.task_id


def test_long_lists_are_clipped_and_say_so(sized_store: TaskStore) -> None:
    task = sized_store.get("t-function-body")
    names = tuple(f"t.py::test_{i}" for i in range(25))
    many = replace(task, tests=replace(task.tests, visible=names))
    around = look_around(sized_store.files(task, "rollout")[task.path].decode(), task.hole)
    around = replace(around, neighbours=tuple(f"n{i}" for i in range(30)))
    source = "\n".join(["def test():", *(f"    x{i} = '```'" for i in range(40))])
    text = instruction_text(many, [(task.path, around)], [("t.py", source)] * 8)
    assert "- and 5 more" in text
    assert "t.py::test_19\n" in text
    assert "t.py::test_20" not in text
    assert "`n19`, 10 more." in text
    assert "# 11 more lines\n````" in text  # a fence longer than what stands in the code
    assert "2 more functions" in text
    assert text.count("From `t.py`") == MAX_SOURCES


def test_the_first_test_of_a_file_has_the_imports_that_fail_one_line_a_module(
    make_store: Any, sized_tasks: Any
) -> None:
    project = Path(__file__).parents[3] / "recipes" / "tiny-cpu" / "project"
    path = "tests/test_text.py"
    names = ("initials", "is_palindrome", "repeat", "shout")
    may_fail = "".join(
        f"try:\n    from tinymath import {name}\nexcept ImportError:\n    pass\n" for name in names
    )
    before = (project / path).read_text()
    texts = {path: before.replace(f"from tinymath import {', '.join(names)}\n", may_fail)}
    assert texts[path] != before
    text = instruction(make_store(replace(sized_tasks["t-module-whole"], test_texts=texts)), "t-module-whole")
    assert text.count("from tinymath import initials, is_palindrome, repeat, shout\n") == 1
