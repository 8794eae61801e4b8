"""What a deletion does not concern stays byte for byte: seen line by line, without our own spans.

An edit can always be taken back with the original at hand, so going back proves nothing about what
else it touched. The lines that may change are found with ``ast`` alone.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from composer_replication.records import Edit
from composer_replication.tasks.planning.body_cuts import Deletion
from composer_replication.tasks.planning.candidates import find_deletions
from composer_replication.tasks.planning.edits import edited_files, edited_text, holes_of

TINY = Path(__file__).parents[3] / "recipes" / "tiny-cpu" / "project"
KNOWN = ("", "pass", "raise NotImplementedError", "()", ",", "try:", "except ImportError:")


def concerned(text: str, names: Collection[str]) -> set[int]:
    """The lines that may change, counted from 0: definitions of these names, imports, ``__all__``, blank, comments."""
    found: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        is_definition = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        is_ours = is_definition and node.name in names
        is_list = isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__"
        if is_ours or is_list or isinstance(node, ast.Import | ast.ImportFrom):
            first = min([node.lineno, *(one.lineno for one in getattr(node, "decorator_list", []))])
            found.update(range(first - 1, node.end_lineno))
    plain = (number for number, line in enumerate(text.split("\n")) if line.strip()[:1] in ("", "#"))
    return found.union(plain)


def stray(text: str, edits: Collection[Edit], names: Collection[str]) -> list[str]:
    """Lines that went or changed although no deletion of ``names`` concerns them, and text that nobody expects."""
    old, new = text.split("\n"), iter(edited_text(text, edits).split("\n"))
    may_change = concerned(text, names)
    lost = [line for number, line in enumerate(old) if number not in may_change and line not in new]
    said = [line.strip() for edit in edits for line in edit.text.splitlines()]
    return lost + [line for line in said if line not in KNOWN and not line.startswith(("import ", "from "))]


def names_of(deletion: Deletion) -> set[str]:
    """The definitions that change: of a method alone not its class."""
    symbols = [cut.symbol.partition("#")[0].split(".") for cut in deletion.bodies]
    if deletion.removal == "body" or deletion.granularity == "function":
        return {parts[-1] for parts in symbols}
    return {part for parts in symbols for part in parts}


def assert_rest_stays(files: dict[str, bytes]) -> int:
    """Every candidate applies, parses, goes back to the byte and touches nothing else; no two are the same."""
    found = find_deletions(files)
    contents = {(frozenset(deletion.edits), deletion.removed_files) for deletion in found}
    assert len(contents) == len(found)
    for deletion in found:
        assert deletion.bodies
        for edits, names in ((deletion.edits, names_of(deletion)), (deletion.test_edits, ())):
            for path, content in edited_files(files, edits).items():
                own = sorted((edit for edit in edits if edit.path == path), key=lambda e: (e.start, e.end))
                text, back = files[path].decode(), content.decode()
                ast.parse(back)
                assert stray(text, own, names) == [], (deletion.pin, path)
                for edit, hole in reversed(list(zip(own, holes_of(own), strict=True))):
                    back = back[: hole.start] + text[edit.start : edit.end] + back[hole.end :]
                assert back == text
    return len(found)


ODD_LAYOUT = '''"""Doc with  two  spaces."""
import os , sys   # kept as it is
from .b import (alpha,
        beta ,)   # and this
X = { 'a' :1,'b':2 }


@ property
def one ( x,y = 1 ) :
\tif x :
\t\treturn  [ alpha,y ]
\treturn   beta


Y=lambda x :  x+ 1;Z = "\\x0c"
class  Two ( object ) :
  """Doc."""
  def first ( self ): return  os . sep
  def second( self , ) :  # why
      return   sys. path
  third = 3   ;fourth=4


def three():
    return (Two ( ).first(),   X,Y , Z)
'''


def lines(text: str, end: str) -> bytes:
    return text.replace("\n", end).encode()


def small_package(end: str, last: str = "\n") -> dict[str, bytes]:
    helpers = (
        "def alpha(x):\n    y = x\n    return y\n\n\n# of beta\ndef beta (x) :\n  return  x\n\n\nrest = [  1,\n 2]"
        + last
    )
    tests = "from pkg.a import Two , three # both\nfrom pkg.b import alpha\n\n\ndef test_a( ):\n   assert  Two( ).first() and alpha(1)\n\n\ndef test_b( ):\n   assert three( )\n"
    return {
        "pkg/__init__.py": lines(
            "from .a import  Two,  three\n__all__ = [ 'Two',\n   'three' ]\nz =  3\n", end
        ),
        "pkg/a.py": lines(ODD_LAYOUT, end),
        "pkg/b.py": lines(helpers, end),
        "tests/test_a.py": lines(tests, end),
    }


@pytest.mark.parametrize("last", ["\n", "", "\n\n\n", "  # end"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_odd_layout_stays(end: str, last: str) -> None:
    assert assert_rest_stays(small_package(end, last)) >= 12


def test_a_real_project_stays() -> None:
    paths = [path for path in TINY.rglob("*") if path.suffix in (".py", ".toml", ".md")]
    files = {path.relative_to(TINY).as_posix(): path.read_bytes() for path in paths}
    assert assert_rest_stays(files) > 20


def pieces() -> Iterator[str]:
    yield "def {n}(x) :\n\treturn  {m} (x)"
    yield "class {n} ( dict ) :\n  def get2(self): return  {m}\n  def put2 ( self ) :\n    '''Doc.'''\n    return {m}"
    yield "if  True :\n  @staticmethod\n  def {n}(x, ) :\n     '''Ü  doc.'''\n     return {m}  # é"
    yield "# about {n}\n\n\n# more\nasync  def {n} ( ) :\n    return  [ {m},\n  1 ]"
    yield "{n}_k = {{ 1:2 ,3 : 4}} ;{n}_l=5"


@settings(max_examples=40)
@given(
    st.lists(st.tuples(st.sampled_from(list(pieces())), st.integers(0, 3), st.integers(0, 5)), min_size=1, max_size=6),
    st.sampled_from(["\n", "\r\n"]),
    st.booleans(),
)  # fmt: skip
def test_any_layout_stays(chosen: list[tuple[str, int, int]], end: str, closes: bool) -> None:
    texts = [
        piece.format(n=f"größe{number}", m=f"größe{used}") + "\n" * (1 + blank)
        for number, (piece, blank, used) in enumerate(chosen)
    ]
    text = "".join(texts) + ("" if closes else "w =  0")
    assert_rest_stays({"pkg/__init__.py": b"", "pkg/a.py": lines(text, end)})
