"""Copies of tests: doubles judge as their originals do, contraries cannot be passed honestly, names are fresh."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from composer_replication.tasks.sentinels import Copy, make_plan, possible_copies, without_assertions

TESTS = """\
# a comment
import unittest


def test_plain():
    assert double(2) == 4  # as it should be


def test_opposite():
    assert is_even(4)
    assert not is_even(3), "odd"


def test_both_sides(n=3):
    if n:
        assert double(n) == n + n


def test_argument(value=3, wanted=6):
    assert double(value) == wanted


def test_no_assertion():
    double(1)


def test_container():
    assert [double(1), -double(2)] == [2, -4]


class TestMethods(unittest.TestCase):
    def test_equal(self):
        self.assertEqual(double(5), 10)

    def test_true(self): self.assertTrue(is_even(2))


def test_twice():
    assert True


def test_twice():
    assert True


async def test_later():
    assert double(1) == 2"""
NAMES = ("plain", "opposite", "both_sides", "argument", "no_assertion", "container")
IDS = [f"t/test_x.py::test_{name}" for name in NAMES]
METHODS = ["t/test_x.py::TestMethods::test_equal", "t/test_x.py::TestMethods::test_true"]
FILES = {"t/test_x.py": TESTS.encode(), "x.py": b""}


@lru_cache(maxsize=4)
def module_of(text: str, double: Callable[[object], object]) -> dict[str, object]:
    space: dict[str, object] = {"double": double, "is_even": lambda n: n % 2 == 0, "__name__": "x"}
    exec(text, space)
    return space


def run(text: str, node_id: str, double: Callable[[object], object]) -> BaseException | None:
    """What a test function or method raises, by Python alone."""
    names = node_id.split("::")[1:]
    function = module_of(text, double)[names[0]]
    if len(names) == 2:
        assert isinstance(function, type)
        function = getattr(function(names[1]), names[1])
    assert callable(function)
    try:
        function()
    except (AssertionError, ValueError, pytest.fail.Exception) as error:
        return error
    return None


def right(n: object) -> object:
    assert isinstance(n, int)
    return 2 * n


def wrong(n: object) -> object:
    assert isinstance(n, int)
    return 2 * n + 1


@pytest.mark.long
@pytest.mark.promise
@given(st.integers())
def test_doubles_agree_and_contraries_fail_with_right_code(seed: int) -> None:
    draw = random.Random(seed)
    plan = make_plan(FILES, IDS + METHODS, possible_copies(FILES, IDS + METHODS), draw)
    text = plan.files["t/test_x.py"].decode()
    assert {copy.node_id for copy in plan.doubles.values()} == {*IDS, *METHODS}
    assert {copy.node_id for copy in plan.contraries.values()} == {*IDS, *METHODS}
    for sentinel, copy in plan.doubles.items():
        assert run(text, sentinel, right) is None
        wrongly = run(text, copy.node_id, wrong)
        assert type(run(text, sentinel, wrong)) is type(wrongly)
    for sentinel in plan.contraries:
        assert isinstance(run(text, sentinel, right), AssertionError)
    for sentinel in plan.must_fail:
        assert isinstance(run(text, sentinel, right), (AssertionError, ValueError, pytest.fail.Exception))


def test_the_real_tests_stay_as_they_are() -> None:
    plan = make_plan(FILES, IDS, possible_copies(FILES, IDS), random.Random(0))
    text = plan.files["t/test_x.py"].decode()
    for block in TESTS.split("\n\n\n"):
        assert block.strip() in text
    assert set(plan.files) == {"t/test_x.py"}


class EqualToEverything:
    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = object.__hash__


def test_what_equals_everything_passes_contraries() -> None:
    """The reason for contraries: here the double cannot tell, and they can."""
    copies = [Copy(IDS[0], "double"), Copy(IDS[0], "contrary", 0)]
    plan = make_plan(FILES, IDS, copies, random.Random(1))
    text = plan.files["t/test_x.py"].decode()
    for sentinel in (*plan.doubles, *plan.contraries):
        assert run(text, sentinel, lambda _: EqualToEverything()) is None


def test_an_argument_is_exchanged_no_earlier_than_its_assertion() -> None:
    """What is there and back again would equal any value that it began with."""
    text = "def test_back(value=3):\n    for _ in range(1):\n        there = double(value)\n        assert there[0] == value\n"
    copy = Copy("t.py::test_back", "contrary", 0)
    plan = make_plan({"t.py": text.encode()}, [copy.node_id], [copy], random.Random(0))
    (sentinel,) = plan.contraries
    assert isinstance(run(plan.files["t.py"].decode(), sentinel, lambda n: [n]), AssertionError)


def test_a_test_that_is_too_deep_has_no_copies() -> None:
    text = f"def test_deep():\n    assert {' + '.join(['1'] * 900)} == 900\n".encode()
    plan = make_plan(
        {"t.py": text}, ["t.py::test_deep"], [Copy("t.py::test_deep", "double")], random.Random(0)
    )
    assert dict(plan.doubles) == {}


def test_names_and_values_are_drawn_anew() -> None:
    copies = possible_copies(FILES, IDS)
    plans = [make_plan(FILES, IDS, copies, random.SystemRandom()) for _ in range(4)]
    names = [name for plan in plans for name in plan.node_ids]
    assert len(set(names)) == len(names)
    assert len({plan.files["t/test_x.py"] for plan in plans}) == 4


def test_an_assertion_that_is_added_is_met_however_the_test_ends() -> None:
    for last in ("return", "pytest.skip('not today')", "double(3)"):
        text = f"import pytest\n\n\ndef test_a():\n    double(2)\n    {last}\n"
        copy = Copy("t.py::test_a", "contrary")
        plan = make_plan({"t.py": text.encode()}, [copy.node_id], [copy], random.Random(0))
        (sentinel,) = plan.contraries
        assert isinstance(run(plan.files["t.py"].decode(), sentinel, right), AssertionError)


def test_which_values_are_exchanged() -> None:
    found = {
        (copy.node_id.rpartition("_")[2], copy.site): copy.has_value for copy in possible_copies(FILES, IDS)
    }
    assert found == {
        ("plain", -1): False, ("plain", 0): True,
        ("opposite", -1): False,
        ("sides", -1): False,
        ("argument", -1): False, ("argument", 0): True,
        ("assertion", -1): False,
        ("container", -1): False, ("container", 0): True,
    }  # fmt: skip


@pytest.mark.parametrize(
    "text",
    [
        b"def test_a():\n    assert 1\n\ndef test_a():\n    assert 1\n",  # which of the two?
        b"if True:\n    def test_a():\n        assert 1\n",  # not a direct child
        b"x = 1; test_a = lambda: None\n",
        b"def test_a(: broken",
        b"\xff\xfe",
    ],
)
def test_what_cannot_be_copied_gets_none(text: bytes) -> None:
    assert possible_copies({"test_a.py": text}, ["test_a.py::test_a"]) == []


def test_a_file_that_cannot_be_read_gets_no_sentinels() -> None:
    plan = make_plan({"test_a.py": b"\xff"}, ["test_a.py::test_a"], [], random.Random(0))
    assert (dict(plan.files), plan.node_ids) == ({}, ())


def test_other_values_stand_before_their_tests_and_behind_them_in_turn() -> None:
    """Whoever takes the first value that the text has for a question, or the last, is wrong once."""
    copies = [copy for copy in possible_copies(FILES, [*IDS, *METHODS]) if copy.has_value]
    for seed in range(9):
        plan = make_plan(FILES, IDS, copies, random.Random(seed))
        text = plan.files["t/test_x.py"].decode()
        sides = []
        for sentinel, copy in plan.contraries.items():
            there, original = (
                text.index(f"def {name.rpartition(':')[2]}(") for name in (sentinel, copy.node_id)
            )
            sides.append(there < original)
        assert sides in ([True, False] * 2, [False, True] * 2)


def test_an_argument_on_both_sides_is_not_exchanged() -> None:
    """What another value makes of both sides is chance."""
    text = b"def test_p(x):\n    assert double(x) == x\n"
    assert [copy.has_value for copy in possible_copies({"t.py": text}, ["t.py::test_p"])] == [False, False]


@pytest.mark.parametrize(
    ("head", "parameters", "is_changed"),
    [
        ("test_p(x, wanted)", "[2-4]", True),
        ("test_p(x, wanted, tmp_path)", "[2-4]", False),  # a fixture may have a part in the id
        ("test_p(x, wanted)", "[2-\\xe9]", False),
    ],
)
def test_a_row_of_a_parametrised_test_has_another_value(
    head: str, parameters: str, is_changed: bool, tmp_path: Path
) -> None:
    """Whoever reads the rows finds two answers to one question; the copy keeps its id."""
    text = f"import pytest\n\n\n@pytest.mark.parametrize('x, wanted', [(2, 4), (3, 6)])\ndef {head}:\n    assert 2 * x == wanted\n"
    copies = [Copy(f"t.py::test_p{parameters}", "contrary", 0)]
    plan = make_plan({"t.py": text.encode()}, [], copies, random.Random(0), num_plain_files=0)
    made = plan.files["t.py"].decode()
    assert made.count("(2, 4), (3, 6)") == (1 if is_changed else 2)
    if is_changed:
        (tmp_path / "t.py").write_text(made)
        command = [sys.executable, "-m", "pytest", "-q", "-pno:cacheprovider", "t.py", "-rf", "--tb=no"]
        said = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False).stdout
        assert "1 failed, 2 passed" in said
        assert all(f"FAILED {name} " in said for name in plan.contraries)


def test_a_row_with_a_star_in_it_stays() -> None:
    """Which cell is which argument's is not written there; grading once broke on it."""
    text = b"@pytest.mark.parametrize('x, y, wanted', [(*A, 3)])\ndef test_p(x, y, wanted):\n    assert x + y == wanted\n"
    copies = [Copy("t.py::test_p[1-2-3]", "contrary", 0)]
    plan = make_plan({"t.py": text}, [], copies, random.Random(0), num_plain_files=0)
    assert plan.files["t.py"].count(b"[(*A, 3)]") == 2


def test_what_hypothesis_calls_has_no_double_and_no_value_behind_a_condition() -> None:
    """A copy under another name has other examples."""
    text = b"@given(integers())\ndef test_p(x):\n    if x == 7:\n        assert f(x) == 1\n    assert g(x)\n"
    copies = possible_copies({"t.py": text}, ["t.py::test_p"])
    assert [(copy.kind, copy.site, copy.has_value) for copy in copies] == [("contrary", -1, False)]


def test_plain_sentinels_are_named_after_functions() -> None:
    """``python_functions`` says nothing of methods of unittest."""
    files = {
        "t.py": b"def check_it():\n    pass\n\n\nclass TestA(TestCase):\n    def test_a(self):\n        pass\n"
    }
    for seed in range(9):
        plan = make_plan(files, ["t.py::check_it", "t.py::TestA::test_a"], [], random.Random(seed))
        assert {name.rpartition("_")[0] for name in plan.node_ids} == {"t.py::check_it"}


def test_a_method_of_the_suite_is_no_assertion() -> None:
    """``self.check()`` without arguments was once taken for one, and grading broke on it."""
    text = b"import unittest\n\n\nclass TestIt(unittest.TestCase):\n    def test_a(self):\n        self.check()\n"
    copies = possible_copies({"tests/test_it.py": text}, ["tests/test_it.py::TestIt::test_a"])
    assert [(copy.kind, copy.site) for copy in copies] == [("double", -1), ("contrary", -1)]


# --- assertions that are evaluated and thrown away ---


@pytest.mark.parametrize(
    ("text", "weaker"),
    [
        ("assert x == 1\n", "x == 1\n"),
        ('def t():\n    assert f(2) == 5, "why"\n', "def t():\n    (f(2) == 5, 'why')\n"),
        ("assert (a ==\n        b)\n", "a == b\n"),
        ("self.assertEqual(f(1), 2)\n", "(f(1), 2)\n"),
        ("self.assertTrue(x)\n", "(x,)\n"),
        ("é = 1; assert é == 2\n", "é = 1\né == 2\n"),
        ("with self.assertRaises(E):\n    f()\n",) * 2,
        ("self.assertRaises(E, f)\n",) * 2,
        ("self.assertEqual(a, b, msg='x')\n",) * 2,
        ("self.assertEqual(*pair)\n",) * 2,
        ("other.assertEqual(a, b)\n",) * 2,
        ("x = 'assert y'\n# assert z\n", "x = 'assert y'\n"),
        ("def broken(:\n",) * 2,
    ],
)
def test_texts(text: str, weaker: str) -> None:
    assert without_assertions(text) == weaker


def test_what_was_judged_is_only_called() -> None:
    text = "def test(f):\n    assert f(2) == 4\n    assert f(3) == 9\n"
    scope: dict[str, object] = {}
    exec(compile(without_assertions(text), "t", "exec"), scope)
    test = scope["test"]
    assert callable(test)
    test(lambda x: "wrong")
    with pytest.raises(ZeroDivisionError):
        test(lambda x: x / 0)
