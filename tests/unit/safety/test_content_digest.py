"""White space, comments, ids, names and order do not hide a copy; a real change shows."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from composer_replication.records import TaskContent
from composer_replication.safety.code_tokens import normalised_text
from composer_replication.safety.split_tasks import SplitRequestError, TaskReader

CODE = 'def area(r):\n    """Of a disc."""\n    return 3.14 * r ** 2  # pi\n'
CONTENT = TaskContent(
    task_id="one",
    repository="shapes==1.0",
    symbol="area",
    broken_tree={
        "shapes/__init__.py": "from .disc import area\n",
        "shapes/disc.py": CODE,
        "notes.txt": "a # b",
    },
    tests={"tests/test_disc.py": "from shapes import area\n\ndef test_area():\n    assert area(1) == 3.14\n"},
    golden="return 3.14 * r ** 2\n",
)


def digest(content: Any) -> str | None:
    return TaskReader(check_content=True).read([content], "tasks")[0].entry.content_sha256


def item(**parts: Any) -> SimpleNamespace:
    return SimpleNamespace(task_id="one", **parts)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("x = 1\n", "x=1"),
        ("if x:\n    y\n", "if x:\n\ty  # why\n"),
        ("# first\nx = 1\r\n", "\ufeffx = 1\n"),
        ("x = (1,\n     2)\n", "x = (1, 2)\n"),
        ("x = 'a'  # 'b'\n", "x = 'a'\n"),
        ("x = 1  # it's\ny = 2\n", "x = 1\ny = 2\n"),
    ],
)
def test_layout_and_comments_do_not_count(ours: str, theirs: str) -> None:
    assert normalised_text(ours, is_python=True) == normalised_text(theirs, is_python=True)


@pytest.mark.parametrize(
    "text",
    [
        "x = '# no comment'",
        'x = "it\'s # no comment"',
        'x = """\n# no comment\n"""',
        "x = '''a\\'''# no comment'''",
        "x = r'\\'  # no end'",
        'x = """a""b # no comment"""',
        "x = f'{a}# no comment'",
        "x = 'a\\\n# no comment'",
    ],
)
def test_a_hash_sign_in_a_string_is_no_comment(text: str) -> None:
    assert normalised_text(text, is_python=True) == "".join(text.split())


def test_text_that_is_no_python_is_scanned_all_the_same() -> None:
    assert normalised_text("x = 'open  # c\n$ y # d", is_python=True) == "x='open$y"
    assert normalised_text('x = """open # c\ny', is_python=True) == 'x="""openy'
    assert normalised_text("a # b", is_python=False) == "a#b"


@pytest.mark.no_cover
@given(st.text(alphabet="ab'\"#\\\n \ud800", max_size=40))
def test_any_text_is_normalised_once_and_for_all(text: str) -> None:
    once = normalised_text(text, is_python=True)
    assert not any(character.isspace() for character in once)
    assert len(digest(item(golden="x" + text)) or "") == 64


@pytest.mark.parametrize(
    "copy",
    [
        replace(CONTENT, task_id="two", repository="other==2", symbol="surface"),
        replace(CONTENT, broken_tree=dict(reversed(list(CONTENT.broken_tree.items())))),
        replace(CONTENT, golden="return 3.14*r**2 # same"),
        SimpleNamespace(
            task_id="two",
            broken_tree=CONTENT.broken_tree,
            tests=CONTENT.tests,
            golden=("return 3.14 * r ** 2",),
        ),
        replace(CONTENT, broken_tree={f"moved/{path}": text for path, text in CONTENT.broken_tree.items()}),
        replace(CONTENT, broken_tree={**CONTENT.broken_tree, "more/__init__.py": "# nothing\n"}),
        replace(CONTENT, tests={**CONTENT.tests, "tests/test_copy.py": next(iter(CONTENT.tests.values()))}),
    ],
)
def test_a_copy_has_the_same_hash(copy: Any) -> None:
    assert digest(copy) == digest(CONTENT)


@pytest.mark.parametrize(
    "other",
    [
        replace(CONTENT, golden="return 3.1 * r ** 2"),
        replace(CONTENT, golden=""),
        replace(CONTENT, tests={"tests/test_disc.py": "assert True"}),
        replace(CONTENT, broken_tree={"shapes/disc.py": CODE}),
        replace(CONTENT, broken_tree={**CONTENT.broken_tree, "notes.txt": "a"}),
        replace(CONTENT, broken_tree=CONTENT.tests, tests=CONTENT.broken_tree),
    ],
)
def test_another_task_has_another_hash(other: TaskContent) -> None:
    assert digest(other) != digest(CONTENT)


def test_the_kind_of_a_file_decides_even_when_its_text_was_seen_before() -> None:
    listed = [
        SimpleNamespace(task_id=path, broken_tree={path: "x # y"}) for path in ("a.py", "a.txt", "b.pyi")
    ]
    read = TaskReader(check_content=True).read(listed, "tasks")
    first, second, third = (task.entry.content_sha256 for task in read)
    assert first == third != second


def test_what_has_no_text_has_no_hash() -> None:
    assert digest(item(tests={"a.py": "x"})) is None
    assert digest(item(broken_tree={"a.py": " # only\n"}, golden="")) is None
    assert digest(item(broken_tree={"a.py": "x"})) is not None


@pytest.mark.parametrize("part", [{"golden": 3}, {"golden": b"x"}, {"broken_tree": {"a.py": b"x"}}])
def test_a_part_that_is_no_text_is_refused(part: dict[str, Any]) -> None:
    with pytest.raises(SplitRequestError, match="expected text"):
        digest(item(**part))
