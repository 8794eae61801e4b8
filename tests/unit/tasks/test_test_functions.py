"""Hidden tests leave their files cleanly or not at all, can be met by who sees the tree alone, and cannot be read in it."""

from __future__ import annotations

import ast

import pytest

from composer_replication.records import Edit
from composer_replication.tasks.planning.edits import Changes, view_files
from composer_replication.tasks.test_functions import (
    Place,
    deleted_texts,
    deleted_words,
    function_shapes,
    function_texts,
    hold_back,
    is_named,
    known_words,
    places_to_show,
    remove_functions,
    words_of,
)

FILE = '''import pytest

VALUES = [1, 2]


def helper():
    return 1


# Secret words about the first test.
@pytest.mark.parametrize("x", VALUES)
def test_first(x):
    assert helper() == x


def test_second():
    assert helper()


class TestBoth:
    # only one here
    def test_third(self):
        assert True


class TestMore:
    """Doc."""

    def test_fourth(self):
        assert True

    async def test_fifth(self):
        assert False


if VALUES:

    def test_sixth():
        assert 6
'''


def line_of(fragment: str) -> int:
    return next(number for number, line in enumerate(FILE.splitlines(), start=1) if fragment in line)


PLACES = {
    "test_first": line_of("parametrize"),
    **{f"test_{name}": line_of(f"test_{name}") for name in ("second", "third", "fourth", "fifth", "sixth")},
}


def names_in(text: str) -> set[str]:
    return {
        node.name
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }


@pytest.mark.parametrize("gone", [{name} for name in PLACES] + [set(PLACES), {"test_first", "test_third"}])
def test_only_the_named_functions_go(gone: set[str]) -> None:
    """With decorators and the comments above."""
    shorter = remove_functions(FILE, [(PLACES[name], name) for name in gone])
    assert shorter is not None and "VALUES = [1, 2]" in shorter
    assert names_in(shorter) == {"helper", *PLACES} - gone
    assert ("Secret words" in shorter) is ("parametrize" in shorter) is ("test_first" not in gone)
    kept_lines = [line for line in shorter.splitlines() if line.strip() != "pass"]
    assert set(kept_lines) <= set(FILE.splitlines())


@pytest.mark.parametrize(
    ("text", "target"),
    [
        (FILE, (1, "test_first")),
        (FILE, (PLACES["test_first"], "test_second")),
        (FILE + "\n\ntest_alias = test_second\n", (PLACES["test_second"], "test_second")),
        (FILE + "\n\nTestBoth.test_third = 1\n", (PLACES["test_third"], "test_third")),
        ("def outer():\n    def test_in():\n        assert 1\n", (2, "test_in")),
        ("x = 1; y = 2\ndef test_a(): assert 1; assert 2\n", (3, "test_a")),
        ("def test_a(:\n", (1, "test_a")),
    ],
)
def test_what_cannot_go_cleanly_stays(text: str, target: tuple[int, str]) -> None:
    assert remove_functions(text, [target]) is None


def test_recursion_is_no_other_mention() -> None:
    text = "def test_a(n=1):\n    return n and test_a(n - 1)\n\n\ndef test_b():\n    assert 1\n"
    assert remove_functions(text, [(1, "test_a")]) == "def test_b():\n    assert 1\n"


def places(*names: str) -> list[tuple[str, int, str]]:
    return [("tests/test_x.py", PLACES[name], name) for name in names]


def test_as_many_functions_are_held_back_as_are_wanted_and_can_go() -> None:
    groups = places("test_first", "test_second", "test_third", "test_fifth")
    texts = {"tests/test_x.py": FILE, "package/code.py": FILE}
    for at_most in range(4):
        hidden, files = hold_back(groups, texts, at_most)
        assert hidden == frozenset(groups[:at_most])
        assert not {name for _, _, name in hidden} & names_in("".join(files.values()))
    outside = ("package/code.py", PLACES["test_second"], "test_second")  # no test file: it stays
    assert hold_back([outside, *groups], texts, 1)[0] == frozenset(groups[:1])
    hidden, files = hold_back(groups[1:], texts, 1, gone=groups[:1])
    assert hidden == frozenset(groups[1:2])
    assert not {"test_first", "test_second"} & names_in(files["tests/test_x.py"])


def test_the_text_of_each_function_is_found_by_its_place() -> None:
    texts = function_texts(FILE)
    first = '@pytest.mark.parametrize("x", VALUES)\ndef test_first(x):\n    assert helper() == x\n'
    assert (
        texts[line_of("parametrize"), "test_first"] == texts[line_of("def test_first"), "test_first"] == first
    )
    assert texts[line_of("test_third"), "test_third"] == "    def test_third(self):\n        assert True\n"
    assert texts[line_of("test_sixth"), "test_sixth"].endswith("assert 6\n")
    assert {name for _, name in texts} == {"helper", *PLACES}
    assert function_texts("def broken(:") == {}


# --- What must be shown.

SOURCE = b"""class Counter:
    def add(self, key):
        self.total = 1

    def get_rarity(self, key, *, at_most=3):
        return 0


def keep():
    return 1
"""
TESTS = b"""from package.code import Counter, keep


def test_add():
    Counter().add("a")


def test_rarity():
    assert Counter().get_rarity("a") == 0


def test_keyword(subject):
    assert subject(at_most=1) == 0


def test_by_text(subject):
    assert getattr(subject, "total") == 1


def test_keep():
    total = keep()
    assert str(total).upper() == "1"
"""
FILES = {"package/code.py": SOURCE, "tests/test_code.py": TESTS}
GONE = Changes((Edit("package/code.py", 0, SOURCE.index(b"def keep"), ""),))


def place(name: str) -> Place:
    return "tests/test_code.py", TESTS[: TESTS.index(f"def {name}(".encode())].count(b"\n") + 1, name


def without(names: list[str]) -> dict[str, bytes]:
    """The tree of a rollout without some test functions."""
    targets = [place(name)[1:] for name in names]
    shorter = remove_functions(TESTS.decode(), targets)
    assert shorter is not None
    return {**view_files(FILES, GONE, "rollout"), "tests/test_code.py": shorter.encode()}


def unfair(names: list[str], given: str = "") -> set[str]:
    places = [place(name) for name in names]
    deleted = deleted_words(GONE, FILES)
    found = places_to_show(places, FILES, without(names), deleted, words_of(given))
    return {name for _, _, name in found}


def test_a_name_that_only_the_deleted_code_says_is_not_asked_for() -> None:
    assert unfair(["test_rarity"]) == {"test_rarity"}
    assert unfair(["test_keyword"]) == {"test_keyword"}
    assert unfair(["test_by_text"]) == set()  # test_keep, which stays, has the word
    assert unfair(["test_by_text", "test_keep"]) == {"test_by_text"}  # its own variable asks for nothing


def test_what_the_tree_the_task_or_python_says_is_known() -> None:
    assert unfair(["test_add"]) == set()
    assert unfair(["test_rarity"], given="Counter.get_rarity") == set()
    assert unfair(["test_keep"]) == set()
    assert {"upper", "str", "package", "test_code"} <= known_words({"package/test_code.py": b""})


WORDED = b'''def cut(at):
    """Cut anything harmonious."""
    if at < 0:
        raise ValueError(f"cannot cut before {at}, dear user")
    return "knife"


def keep():
    return "plainly visible"
'''
CUT = Changes((Edit("package/code.py", WORDED.index(b"    if at"), WORDED.index(b"def keep"), "    ...\n"),))


@pytest.mark.parametrize(
    ("test", "is_shown"),
    [
        ("with raises(ValueError, match='cannot cut before'): cut(-1)", True),
        ("with raises(ValueError, match=r'Cannot +cut +before .*'): cut(-1)", True),
        ("assert str(error(cut, -1)).startswith('cannot cut before -1')", True),
        ("assert 'before' in error(cut, -1)", True),  # one long word
        ("with raises(ValueError, match='dear'): cut(-1)", False),  # a short one may stand anywhere
        ("with raises(ValueError): cut(-1)", False),
        ("assert cut(1) == 'knife'", False),  # five letters
        ("'cannot cut before'", False),  # says so and asks for nothing
        ("assert keep() == 'plainly visible'", False),  # not deleted
        ("assert 'harmonious'", False),  # in the docstring, which stays
    ],
)
def test_nobody_is_asked_for_the_words_of_a_deleted_message(test: str, is_shown: bool) -> None:
    text = f"def test_it():\n    {test}\n".encode()
    files = {"package/code.py": WORDED, "tests/test_code.py": text}
    at, tree = ("tests/test_code.py", 1, "test_it"), view_files({"package/code.py": WORDED}, CUT, "rollout")
    texts = deleted_texts(CUT, files)
    assert places_to_show([at], files, tree, frozenset(), texts=texts) == (
        frozenset([at]) if is_shown else set()
    )
    told = {**tree, "README.md": b"It answers: Cannot\n  cut before a cut.\n"}
    assert places_to_show([at], files, told, frozenset(), texts=texts) == frozenset()


def test_deleted_files_count_whole() -> None:
    changes = Changes((), removed_files=("package/code.py",))
    assert {"get_rarity", "keep"} <= deleted_words(changes, FILES)
    texts = deleted_texts(changes, {"package/code.py": WORDED})
    assert {("plainly",), ("visible",), ("cannot", "cut", "before")} <= texts
    assert ("harmonious",) not in texts


def test_a_copy_under_another_name_shows_a_hidden_test() -> None:
    tree = without(["test_add"])
    twin = b"def test_alike(self, subject):\n    assert subject(at_most=1)  ==  0\n"
    target = [place("test_keyword")]
    shown = {path: data for path, data in tree.items() if not path.startswith("tests/")}
    assert places_to_show(target, FILES, {**shown, "tests/test_more.py": twin}, frozenset()) == frozenset()
    same = twin.replace(b"self, ", b"")
    for path in ("tests/test_more.py", "package/checks.py"):
        assert places_to_show(target, FILES, {**shown, path: same}, frozenset()) == frozenset(target)
    assert places_to_show(target, FILES, {**shown, "notes.txt": same}, frozenset()) == frozenset()


def test_a_shape_is_what_a_function_does() -> None:
    one = function_shapes("def a(x):\n    '''Text.'''\n    return x + 1  # why\n")
    assert one == function_shapes("    def b(x):\n        import os\n        return x + 1\n")
    assert one.isdisjoint(function_shapes("@mark\ndef a(x):\n    return x + 1\n"))
    assert one.isdisjoint(function_shapes("def a(x):\n    return x + 2\n"))
    assert function_shapes("def a(:\n") == frozenset()


def test_recorded_behaviour_is_that_of_a_function_that_can_be_known() -> None:
    tree = {
        "package/other.py": b"from .code import shared\n",
        "package/third.py": b"def lonely(): pass\n",
        "notes.txt": b"code.lonely",
    }
    assert is_named("package/code.py", "shared", tree)
    assert not is_named("package/code.py", "lonely", tree)  # another module's
    assert is_named("package/code.py", "lonely", tree, words_of("package/code.py lonely"))
    assert is_named("package/code.py", "lonely", {"package/code.py": b"lonely()\n"})
    assert is_named("package/__init__.py", "top", {"t.py": b"import package\npackage.top()\n"})
    assert not is_named("package/code.py", "Kind.of", {"t.py": b"import code\n"})


TABLES = """import pytest

pytestmark = [pytest.mark.unit]
SHARED = [1, 2]
# What the first test is asked.
CASES = [
    ("Secret", "secret"),
]
MORE = (CASES, SHARED)
USED_TWICE = {"a": 1}
MADE = make_cases()
TWICE = [1]
TWICE = [2]


@pytest.mark.parametrize("case", MORE)
def test_first(case):
    assert case in USED_TWICE, (MADE, TWICE)


def test_second():
    assert SHARED and USED_TWICE
"""


def test_the_cases_of_hidden_tests_go_with_them() -> None:
    line = TABLES[: TABLES.index("@pytest.mark.param")].count("\n") + 1
    shorter = remove_functions(TABLES, [(line, "test_first")])
    assert shorter is not None
    assert "Secret" not in shorter and "MORE" not in shorter and "What the first" not in shorter
    for kept in ("pytestmark", "SHARED = ", "USED_TWICE", "MADE", "TWICE = [2]", "def test_second"):
        assert kept in shorter
    whole = remove_functions(TABLES, [(TABLES.count("\n") - 1, "test_second")])
    assert whole is not None and "CASES = [" in whole and "SHARED = " in whole
