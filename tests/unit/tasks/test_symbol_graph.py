"""What a repository's names denote, and what only one symbol needs: small repositories, answers by hand."""

from __future__ import annotations

import pytest

from composer_replication.tasks.planning.symbol_graph import Needs, SymbolGraph, module_name


def graph(**texts: str) -> SymbolGraph:
    """A package ``p``; ``b_c`` is the module ``p.b.c``."""
    files = {
        f"p/{name.replace('_', '/') if not name.startswith('__') else name}.py": text.encode()
        for name, text in texts.items()
    }
    return SymbolGraph({"p/__init__.py": b"", **files})


@pytest.mark.parametrize(
    ("path", "name"),
    [
        *(("p/a.py", "p.a"), ("p/__init__.py", "p"), ("src/p/b/__init__.py", "p.b"), ("lib/p/a.py", "p.a")),
        *(("src/space/p/a.py", "space.p.a"), ("one.py", "one"), ("src/one.py", "one"), ("src.py", "src")),
    ],
)
def test_module_names(path, name):
    assert module_name(path, ("lib", "src")) == name


def test_a_star_brings_what_all_lists_or_what_is_public():
    listed = graph(a="__all__ = ['f']\n__all__ += ('_h',)\ndef f(): pass\ndef g(): pass\ndef _h(): pass\n")
    assert [listed.star_exports("p.a", name) for name in ("f", "g", "_h")] == [True, False, True]
    plain = graph(a="def f(): pass\ndef _h(): pass\n")
    assert [plain.star_exports("p.a", name) for name in ("f", "_h")] == [True, False]


def test_a_module_is_reached_by_every_form_of_import():
    reach = graph(
        a="x = 1\n",
        b="import p.a\nimport p.a as m\nfrom p import a\nfrom . import a as n; from .a import x, y; from .a import *\n",
    ).reach([], ["p.a"])
    assert [imported.bound for imported in reach.aliases] == ["p", "m", "a", "n", "x", "y", "*"]
    assert reach.names == {("p.b", "m"), ("p.b", "a"), ("p.b", "n"), ("p.b", "x"), ("p.b", "y")}


def test_relative_imports_count_dots_from_modules_and_packages():
    files = {
        "p/__init__.py": b"from .a import x\n",
        "p/q/__init__.py": b"from ..a import x\nfrom . import r\n",
        "p/q/r.py": b"from ...z import y\nfrom . import s\n",
    }
    found = SymbolGraph(files)
    targets = {file.path: [imported.target for imported in file.imports] for file in found.files.values()}
    assert targets == {"p/__init__.py": ["p.a"], "p/q/__init__.py": ["p.a", "p.q"], "p/q/r.py": ["z", "p.q"]}


def needs(root: str, **texts: str) -> list[str]:
    module, name = root.split(".")
    found = Needs(graph(**texts)).of_name((f"p.{module}", name))
    return sorted(f"{where.removeprefix('p.')}.{what}" for where, what in found)


PRIVATE = "def _h(): pass\n"


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        ({"a": "def f(): _h()\n" + PRIVATE}, ["a.f", "a._h"]),
        ({"a": "def f(): _h()\ndef g(): _h()\n" + PRIVATE}, ["a.f"]),
        ({"a": "def f(): _h()\n" + PRIVATE + "_h()\n"}, ["a.f"]),
        (
            {"a": "from .b import h\ndef f(): h()\n", "b": "def h(): _i()\ndef _i(): pass\n"},
            ["a.f", "b._i", "b.h"],
        ),
        ({"a": "from .b import h as x\ndef f(): x()\ndef g(): x()\n", "b": "def h(): pass\n"}, ["a.f"]),
        ({"a": "from . import b\ndef f(): b.h()\n", "b": "def h(): pass\n"}, ["a.f", "b.h"]),
        ({"a": "from . import b\ndef f(): b.h()\n", "b": "def h(): pass\n", "c": "x = y.h\n"}, ["a.f"]),
        ({"a": "def f():\n    from .b import h\n    h()\n", "b": "def h(): pass\n"}, ["a.f", "b.h"]),
        ({"a": "def f(): _h()\n" + PRIVATE + "x = ['_h']\n"}, ["a.f", "a._h"]),
        ({"a": "def f(): h()\ndef h(): pass\n", "__init__": "from .a import f, h\n"}, ["a.f"]),
        ({"a": "def f(): h()\ndef h(): pass\n", "__init__": "from .a import *\n"}, ["a.f"]),
        # Two helpers that need each other stay.
        ({"a": "def f(): _h()\ndef _h(): _i()\ndef _i(): _h()\n"}, ["a.f"]),
        # A chain that breaks in the middle takes the rest along.
        ({"a": "def f(): _h()\ndef _h(): _i()\ndef _i(): pass\ndef g(): _h()\n"}, ["a.f"]),
        # A variable or an attribute of that name may be the helper.
        ({"a": "def f(): _h()\n" + PRIVATE, "b": "def g():\n    _h = 1\n    return _h\n"}, ["a.f"]),
        ({"a": "def f(): _h()\n" + PRIVATE + "class C:\n    def g(self): self._h()\n"}, ["a.f"]),
        ({"a": "class f:\n    def m(self): return _Part()\nclass _Part:\n    x = 1\n"}, ["a.f", "a._Part"]),
    ],
)
def test_what_only_one_symbol_needs(texts, expected):
    assert needs("a.f", **texts) == sorted(expected)


def test_tests_are_no_users():
    found = SymbolGraph(
        {
            "p/__init__.py": b"",
            "p/a.py": b"def f(): _h()\ndef _h(): pass\n",
            "tests/test_a.py": b"from p.a import _h\ndef test(): _h()\n",
        }
    )
    assert Needs(found).of_name(("p.a", "f")) == {("p.a", "f"), ("p.a", "_h")}
