"""Which files lose code: bodies and definitions count, re-exports, constants and texts do not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from composer_replication.errors import InputError
from composer_replication.records import Edit
from composer_replication.tasks.deleted_code import files_of_deleted_code, num_features_in_two_files
from composer_replication.tasks.store import TaskStore

MakeStore = Callable[..., TaskStore]
INIT = 'from pkg.a import first\nfrom pkg.b import second\n\n__all__ = ["first", "second"]\n'
A = '''LIMIT = 3


def first(x):
    """Do."""
    return helper(x)


class Part:
    limit = 1

    def own(self):
        return 1

    def own_too(self):
        return 2
'''
B = '''import os

KNOWN = ("a",)


def second(x):
    def inner(y):
        return y

    return inner(x)


if os.sep == "/":

    def either(x):
        return 1
else:

    def either(x):
        return 2


class PlainError(Exception):
    """Nothing in it."""
'''
FILES = {
    "pkg/__init__.py": INIT,
    "pkg/a.py": A,
    "pkg/b.py": B,
    "pkg/names.py": "import os\n\nNAMES = (os.sep,)\n",
    "pkg/odd.py": "print 'of another version'\n\n\ndef third():\n    pass\n",
    "tests/support.py": "def fourth():\n    return 4\n",
    "README.md": "Call `first`.\n\ndef first(x):\n",
}
FIRST = A[A.index("def first") : A.index("class Part")]
OWN = A[A.index("    def own(") : A.index("    def own_too")]
INNER = B[B.index("    def inner") : B.index("    return inner")]
SECOND_BRANCH = B[B.index("    def either(x):\n        return 2") : B.index("class Plain")]
ERROR = B[B.index("\n\nclass Plain") :]


def without(path: str, *pieces: str) -> str:
    text = FILES[path]
    for piece in pieces:
        assert text.count(piece) == 1
        text = text.replace(piece, "")
    return text


Hand = Callable[..., TaskStore]


@pytest.fixture
def store_of(make_store: MakeStore, sized_tasks: dict[str, Any]) -> Hand:
    """A store of one feature over the files."""

    def make(removal: str, **what: Any) -> TaskStore:
        task = type(sized_tasks["t-feature-body"])("t", "pkg/a.py", "first", "feature", removal, **what)
        return make_store(task, files={path: text.encode() for path, text in FILES.items()})

    return make


@pytest.mark.parametrize(
    ("texts", "files"),
    [
        ({"pkg/a.py": without("pkg/a.py", FIRST)}, ["pkg/a.py"]),
        ({"pkg/a.py": without("pkg/a.py", FIRST), "pkg/b.py": without("pkg/b.py", INNER)}, ["pkg/a.py", "pkg/b.py"]),
        ({"pkg/a.py": without("pkg/a.py", OWN)}, ["pkg/a.py"]),
        ({"pkg/b.py": without("pkg/b.py", ERROR)}, ["pkg/b.py"]),
        ({"pkg/b.py": without("pkg/b.py", SECOND_BRANCH).replace("else:\n", "else:\n    pass\n")}, ["pkg/b.py"]),
        ({"pkg/a.py": without("pkg/a.py", "LIMIT = 3\n"), "pkg/b.py": without("pkg/b.py", "import os\n")}, []),
        ({"pkg/a.py": without("pkg/a.py", '    """Do."""\n'), "pkg/b.py": B.replace("return 1", "return 3")}, []),
        ({"pkg/__init__.py": without("pkg/__init__.py", "from pkg.a import first\n", '"first", ')}, []),
        ({"README.md": "Nothing.\n", "tests/support.py": "\n"}, []),
        ({"pkg/odd.py": "print 'of another version'\n"}, []),
        ({"pkg/a.py": "LIMIT = 3\n\ndef first(x:\n"}, []),
    ],
)  # fmt: skip
def test_whole_definitions(store_of: Hand, texts: dict[str, str], files: list[str]) -> None:
    store = store_of("whole", texts=texts)
    assert list(files_of_deleted_code(store, store.record("t"))) == files
    assert num_features_in_two_files(store) == (len(files) == 2)


def test_files_that_are_gone(store_of: Hand) -> None:
    gone = ("pkg/b.py", "pkg/names.py", "README.md", "tests/support.py")
    store = store_of("whole", removed_files=gone, texts={"pkg/a.py": without("pkg/a.py", FIRST)})
    assert files_of_deleted_code(store, store.record("t")) == ("pkg/a.py", "pkg/b.py")
    assert num_features_in_two_files(store) == 1


def test_bodies(store_of: Hand) -> None:
    one = store_of("body", functions=("pkg/a.py::first", "pkg/a.py::Part.own"))
    assert files_of_deleted_code(one, one.record("t")) == ("pkg/a.py",)
    assert num_features_in_two_files(one) == 0
    two = store_of("body", functions=("pkg/a.py::first", "pkg/b.py::second"))
    assert files_of_deleted_code(two, two.record("t")) == ("pkg/a.py", "pkg/b.py")
    assert num_features_in_two_files(two) == 1


def test_only_features_are_counted(store_of: Hand) -> None:
    store = store_of("body", functions=("pkg/a.py::first", "pkg/b.py::second"))
    record = store.record("t")
    for granularity in ("module", "class", "function"):
        store.put_task(replace(record, granularity=granularity), store.secret("t"))
        assert num_features_in_two_files(store) == 0


@pytest.mark.parametrize("edit", [Edit("pkg/a.py", 0, 10**6, ""), Edit("pkg/gone.py", 0, 1, "")])
def test_edits_that_do_not_fit_are_damage(store_of: Hand, edit: Edit) -> None:
    store = store_of("whole", texts={"pkg/a.py": without("pkg/a.py", FIRST)})
    store.put_task(replace(store.record("t"), edits=(edit,)), store.secret("t"))
    with pytest.raises(InputError, match="CR0411"):
        num_features_in_two_files(store)
