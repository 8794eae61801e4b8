"""Deleting a body and putting it back must be exact to the byte, for every form of function."""

from __future__ import annotations

import ast
from itertools import product

import pytest

from composer_replication.tasks.planning.body_cuts import MARKER_STATEMENT, BodyCut, fill, find_body_cuts
from composer_replication.tasks.planning.edits import edited_text, holes_of

STYLES = '''"""Many styles."""
import functools
from abc import abstractmethod
from typing import Protocol, overload


def plain(x):
    return x


def documented(x):
    """Doc."""
    y = x + 1
    return y  # the end


def multi_line(
    x: dict[str, int] = {"a": 1},
    key=lambda y: y,
) -> dict[str, int]:
    """Doc
    of two lines.
    """

    # a comment first
    if x:
        return x

    return {}


@functools.cache
def decorated():
    "single quotes"
    return [
        1,
    ]


async def waits(x):
    async with x:
        pass


def bracketed():
    (
        "a docstring in brackets"
    )
    return 1


def generates():
    yield 1


def commented_signature():  # noqa
    return "é" + "ü"


def commented_docstring():
    """Doc."""  # more
    return 1


def nested():
    def inner():
        return 1

    return inner()


class Box:
    def __init__(self):
        self.value = 1

    @property
    def value(self):
        """Doc."""
        return 1

    @value.setter
    def value(self, new):
        self._value = new

    class Deep:
        def bottom(self):
            return "bottom"


if True:
    def conditional():
        return 1
else:
    def conditional():
        return 2
'''

NO_CANDIDATES = '''from abc import abstractmethod
from typing import overload


@overload
def f(x: int) -> int: ...


@overload
def f(x: str) -> str:
    """Doc."""


class Abstract:
    @abstractmethod
    def b(self):
        pass

    def c(self):
        """Only words."""

    def d(self):
        raise NotImplementedError

    def e(self):
        raise NotImplementedError("later")


def one_liner(x): return x


def joined(): """Doc."""; return 1


lambda: 1
'''


def by_symbol(text: str) -> dict[str, BodyCut]:
    return {deletion.symbol: deletion for deletion in find_body_cuts("m.py", text)}


def assert_exact(text: str, deletion: BodyCut) -> None:
    broken = edited_text(text, [deletion.edit])
    (hole,) = holes_of([deletion.edit])
    assert broken[hole.start : hole.end] == deletion.marker
    assert deletion.marker.strip() == MARKER_STATEMENT
    assert fill(broken, hole, deletion.golden_body) == text
    ast.parse(broken)
    assert broken[hole.start - 1] in ":\"')"
    for expression in ("None", "True", "''"):
        ast.parse(fill(broken, hole, deletion.marker.replace(MARKER_STATEMENT, f"return {expression}")))


@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
@pytest.mark.parametrize("indent", ["    ", "\t"])
def test_every_style_restores_exactly(line_end: str, indent: str) -> None:
    text = STYLES.replace("    ", indent).replace("\n", line_end)
    found = by_symbol(text)
    assert set(found) == {
        *("plain", "documented", "multi_line", "decorated", "waits", "bracketed", "generates"),
        *("commented_signature", "commented_docstring", "nested", "Box.__init__", "Box.value"),
        *("Box.value#2", "Box.Deep.bottom", "conditional", "conditional#2"),
    }
    for deletion in found.values():
        assert_exact(text, deletion)
        assert deletion.marker.startswith(line_end + indent)


def test_hole_begins_at_the_docstring_or_the_colon() -> None:
    found = by_symbol(STYLES)
    assert STYLES[: found["documented"].start].endswith('    """Doc."""')
    assert STYLES[: found["plain"].start].endswith("def plain(x):")
    assert STYLES[: found["multi_line"].start].endswith('of two lines.\n    """')
    assert STYLES[: found["commented_signature"].start].endswith("def commented_signature():")
    assert found["documented"].golden_body == "\n    y = x + 1\n    return y  # the end"
    assert found["multi_line"].num_body_lines == 4
    assert STYLES.splitlines()[found["decorated"].first_line - 1] == "@functools.cache"


@pytest.mark.parametrize(
    "text", [NO_CANDIDATES, "def f(:\n", "\ufeffdef f():\n    return 1\n", "", "x = 1\n", "\0"]
)
def test_what_has_no_body_to_delete_or_does_not_parse_is_left_out(text: str) -> None:
    assert find_body_cuts("m.py", text) == []


BODIES = (
    "return 1",
    "x = 'é'; return x",
    "if x:\n{i}{i}return 2\n{i}return 3",
    "pass\n\n{i}return [\n1]",
    "return (  # c\n{i}{i}1)",
)
DOCSTRINGS = ("", '"""Doc."""', "'''Ü\n{i}two'''", "r'raw'", '"a" "b"')
SIGNATURES = ("()", "(x=lambda: 1)", "(x, *, y: dict = {1: 2})", "(x) -> 'dict[str, int]'", "(\n{i}x,\n)")


@pytest.mark.parametrize(
    ("indent", "line_end", "last"), [("  ", "\n", ""), ("\t", "\r\n", "\n"), ("    ", "\r\n", "")]
)
def test_any_mixture_restores_exactly(indent: str, line_end: str, last: str) -> None:
    for number, (signature, docstring, body) in enumerate(product(SIGNATURES, DOCSTRINGS, BODIES)):
        head = f"{'async ' * (number % 2)}def größe{signature}:"
        block = "\n".join([head, *([f"{{i}}{docstring}"] if docstring else []), f"{{i}}{body}"])
        text = f"{block}\n\n\n{block}{last}".replace("{i}", indent).replace("\n", line_end)
        found = find_body_cuts("m.py", text)
        assert [deletion.symbol for deletion in found] == ["größe", "größe#2"]
        for deletion in found:
            assert_exact(text, deletion)
