"""Hidden tests leave their files cleanly or not at all."""

from __future__ import annotations

import ast

import pytest

from composer_replication.tasks.test_functions import (
    count_functions,
    function_texts,
    part_tests,
    remove_functions,
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
    "test_second": line_of("test_second"),
    "test_third": line_of("test_third"),
    "test_fourth": line_of("test_fourth"),
    "test_fifth": line_of("test_fifth"),
    "test_sixth": line_of("test_sixth"),
}


def names_in(text: str) -> set[str]:
    return {
        node.name
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }


@pytest.mark.parametrize("gone", [{name} for name in PLACES] + [set(PLACES), {"test_first", "test_third"}])
def test_only_the_named_functions_go(gone: set[str]) -> None:
    shorter = remove_functions(FILE, [(PLACES[name], name) for name in gone])
    assert shorter is not None
    assert names_in(shorter) == {"helper", *PLACES} - gone
    kept_lines = [line for line in shorter.splitlines() if line.strip() != "pass"]
    assert set(kept_lines) <= set(FILE.splitlines())


def test_decorators_and_comments_above_go_too() -> None:
    shorter = remove_functions(FILE, [(PLACES["test_first"], "test_first")])
    assert shorter is not None
    assert "Secret words" not in shorter
    assert "parametrize" not in shorter
    assert "VALUES = [1, 2]" in shorter


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


def test_split_is_repeatable_and_depends_on_seed_and_task() -> None:
    groups = places("test_second", "test_third", "test_fourth", "test_fifth")
    texts = {"tests/test_x.py": FILE}
    made = [
        part_tests(groups, texts, hidden_share=0.5, seed=seed, salt=salt)[0]
        for seed in range(4)
        for salt in ("a", "b")
    ]
    again = part_tests(list(reversed(groups)), texts, hidden_share=0.5, seed=0, salt="a")[0]
    assert again == made[0]
    assert len(set(made)) > 1
    assert {len(hidden) for hidden in made} == {2}


@pytest.mark.parametrize(("share", "expected"), [(0.0, 0), (0.01, 1), (0.5, 1), (0.99, 2)])
def test_never_all_are_hidden(share: float, expected: int) -> None:
    groups = places("test_second", "test_third", "test_fourth")[: 3 if expected != 1 else 2]
    hidden, files = part_tests(groups, {"tests/test_x.py": FILE}, hidden_share=share, seed=0, salt="")
    assert len(hidden) == expected
    for path, text in files.items():
        assert path == "tests/test_x.py"
        assert not {name for _, _, name in hidden} & names_in(text)


def test_a_single_function_stays_visible() -> None:
    assert (
        part_tests(places("test_second"), {"tests/test_x.py": FILE}, hidden_share=0.9, seed=0, salt="")[0]
        == ()
    )


def test_functions_outside_test_files_stay_visible() -> None:
    groups = [("package/code.py", PLACES["test_second"], "test_second"), *places("test_fourth")]
    hidden, _ = part_tests(
        groups, {"package/code.py": FILE, "tests/test_x.py": FILE}, hidden_share=0.9, seed=0, salt=""
    )
    assert {path for path, _, _ in hidden} <= {"tests/test_x.py"}


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


def test_functions_are_counted_by_name() -> None:
    text = "def a():\n    def inner(): ...\n\n\n@decorated\ndef a(): ...\n\n\nclass C:\n    async def b(self): ...\n"
    assert count_functions(text) == {"a": 2, "b": 1}
    assert count_functions("def (") == {}


def test_a_table_that_a_text_names_stays() -> None:
    text = (
        "import sys\n\nCASES = [1]\nMORE = [2]\n\n\ndef test_a():\n    assert CASES and MORE\n\n\n"
        "def test_b():\n    assert getattr(sys.modules[__name__], 'CASES')\n"
    )
    shorter = remove_functions(text, [(7, "test_a")])
    assert shorter is not None and "CASES = [1]" in shorter and "MORE" not in shorter
