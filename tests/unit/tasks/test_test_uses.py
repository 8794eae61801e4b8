"""What visible tests need that a tree lacks, read from imports and attributes."""

from __future__ import annotations

import pytest

from composer_replication.tasks.instructions.missing_names import ModuleNames
from composer_replication.tasks.instructions.test_uses import MAX_USES, MissingUses, missing_uses

TREE = {
    "src/pkg/__init__.py": b"from pkg.a import *\nfrom .b import left as renamed\n",
    "src/pkg/a.py": b"def one():\n    inner = 1\n\nif True:\n    two = 2\nfor three in (): pass\nclass Four:\n    five = 5\n",
    "src/pkg/b.py": b"import os.path\nleft = os\n",
    "src/pkg/open.py": b"from elsewhere import *\n",
    "src/pkg/lazy.py": b"def __getattr__(name):\n    return 1\n",
    "src/pkg/wrong.py": b"def (",
    "src/spaced/part.py": b"x = 1\n",
}


@pytest.mark.parametrize(
    ("module", "name", "is_lacking"),
    [
        ("pkg.a", "one", False),
        ("pkg.a", "inner", True),
        ("pkg.a", "two", False),
        ("pkg.a", "three", False),
        ("pkg.a", "five", True),
        ("pkg", "one", False),  # by the star
        ("pkg", "renamed", False),
        ("pkg", "left", True),
        ("pkg", "a", False),  # a module
        ("pkg.b", "os", False),
        ("pkg.open", "anything", False),  # nobody knows
        ("pkg.lazy", "anything", False),
        ("pkg.wrong", "anything", False),
        ("os", "nothing", False),  # not of this tree
        ("spaced.part", "y", True),
    ],
)
def test_which_names_a_module_lacks(module: str, name: str, is_lacking: bool) -> None:
    assert ModuleNames(TREE).lacks_name(module, name) is is_lacking


@pytest.mark.parametrize(
    ("module", "is_lacking"),
    [("pkg.a", False), ("pkg.gone", True), ("pkg", False), ("os.gone", False), ("spaced", False)],
)
def test_which_modules_a_tree_lacks(module: str, is_lacking: bool) -> None:
    assert ModuleNames(TREE).lacks_module(module) is is_lacking


def test_a_circle_of_star_imports_ends() -> None:
    tree = {
        "p/__init__.py": b"",
        "p/a.py": b"from p.b import *\nx = 1\n",
        "p/b.py": b"from p.a import *\ny = 1\n",
    }
    names = ModuleNames(tree)
    assert not names.lacks_name("p.a", "y")
    assert names.lacks_name("p.a", "z")


def uses(test: str, symbol: str = "gone", line: int = 0) -> MissingUses:
    text = test.encode()
    number = line or next(i for i, row in enumerate(test.splitlines(), 1) if row.startswith("def test"))
    return missing_uses({**TREE, "tests/test_x.py": text}, [("tests/test_x.py", number, "test_x")], symbol)


def test_imports_at_the_top_are_cut_to_what_the_test_needs() -> None:
    found = uses(
        "from pkg import one, gone as g, other\nimport os\n\ndef test_x():\n    assert g(1, b=[2]) == one()\n"
    )
    assert found == MissingUses(("from pkg import gone as g",), ("gone",), ("g(1, b=[2])",))


def test_imports_inside_the_test() -> None:
    found = uses("def test_x():\n    from pkg.gone import f\n    f()[0].x\n    f(2)\n    f(2)\n", "")
    assert found == MissingUses(("from pkg.gone import f",), ("f",), ("f()[0].x", "f(2)"))


def test_attributes_of_modules() -> None:
    found = uses(
        "import pkg\nimport pkg.a as m\n\ndef test_x():\n    pkg.gone(1)\n    m.lost\n    pkg.one()\n    pkg.b.left\n"
    )
    assert found == MissingUses((), ("gone", "lost"), ("pkg.gone(1)", "m.lost"))


def test_a_module_that_is_gone() -> None:
    found = uses("import pkg.gone\n\ndef test_x():\n    pkg.gone.f(3)\n", "")
    assert found.imports == ("import pkg.gone",)
    assert found.uses == ("pkg.gone.f(3)",)


def test_a_method_is_an_attribute_of_anything() -> None:
    found = uses(
        "from pkg import one\n\ndef test_x(thing):\n    assert thing.name.lower() == one().name\n",
        "Four.name",
    )
    assert found == MissingUses((), (), ("thing.name.lower()", "one().name"))


def test_relative_imports_and_try_blocks() -> None:
    text = "try:\n    from pkg import gone\nexcept ImportError:\n    from pkg import lost as gone\n\ndef test_x():\n    gone()\n"
    assert uses(text).imports == ("from pkg import gone", "from pkg import lost as gone")
    tree = {
        "p/__init__.py": b"",
        "p/a.py": b"",
        "p/tests/__init__.py": b"",
        "p/tests/test_x.py": b"from ..a import f\ndef test_x():\n    f()\n",
    }
    assert missing_uses(tree, [("p/tests/test_x.py", 2, "test_x")], "f").imports == ("from ..a import f",)


def test_other_tests_of_the_file_tell_nothing() -> None:
    text = (
        "from pkg import gone, hush\n\ndef test_x():\n    gone(1)\n\ndef test_other():\n    hush(gone(2))\n"
    )
    assert uses(text) == MissingUses(("from pkg import gone",), ("gone",), ("gone(1)",))


def test_of_two_tests_of_one_name_the_line_decides() -> None:
    text = "from pkg import gone\n\nclass A:\n    def test_x(self):\n        gone(1)\n\nclass B:\n    def test_x(self):\n        gone(2)\n"
    assert uses(text, line=8).uses == ("gone(2)",)
    assert uses(text, line=99) == MissingUses((), (), ())


def test_many_and_long_uses_are_bounded() -> None:
    calls = "".join(f"    gone({i})\n" for i in range(50)) + f"    gone('{'a' * 200}')\n"
    found = uses(f"from pkg import gone\n\ndef test_x():\n    gone('{'a' * 200}')\n{calls}")
    assert found.uses == tuple(f"gone({i})" for i in range(MAX_USES))


def test_a_file_that_does_not_parse_tells_nothing() -> None:
    assert uses("def test_x(:\n", line=1) == MissingUses((), (), ())
