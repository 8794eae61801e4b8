"""Every candidate: the broken texts by hand, byte for byte, and what must be no candidate."""

from __future__ import annotations

import pytest

from composer_replication.tasks.planning.body_cuts import Deletion
from composer_replication.tasks.planning.candidates import find_deletions
from composer_replication.tasks.planning.edits import edited_files

INIT = b'''"""A package."""
from .areas import (
    area,  # in square metres
    volume as space,
)
from .words import shout, whisper

__all__ = [
    "area",
    "shout",
    "space",
    "whisper",
]
'''
AREAS = b'''"""Areas."""
import math
from functools import lru_cache

from .rounding import nearest


# Area of a circle.
# In square metres.
@lru_cache(
    maxsize=None,
)
def area(radius):
    """Area.

    >>> area(0)
    0
    """
    return nearest(math.pi * _square(radius))


def _square(x):
    return x * x


def volume(radius):
    return 4 / 3 * radius**3
'''
ROUNDING = b'''"""Rounding."""


def nearest(x):
    return _half_up(x)


def _half_up(x):
    return int(x + 0.5)
'''
WORDS = b'''"""Words."""


def shout(text):
    return text.upper()


class Voice:
    """A voice."""

    def __init__(self, pitch):
        self._pitch = pitch

    @property
    def pitch(self):
        return self._pitch

    # The other half.
    @pitch.setter
    def pitch(self, value):
        self._pitch = value

    def say(self):
        return self._pitch


def whisper(text):
    area = text.lower()
    return area
'''
TEST_AREAS = b'''from pkg import area, shout
import pytest


def test_area():
    """Doc."""
    assert area(0) == 0


def test_shout():
    assert shout("a") == "A"


class TestBoth:
    def test_both(self):
        # both
        assert shout(str(area(1))) == "3"
'''
README = b"# pkg\n\n* `area` - of a circle\n"
PACKAGE = {
    "README.md": README,
    "src/pkg/__init__.py": INIT,
    "src/pkg/areas.py": AREAS,
    "src/pkg/rounding.py": ROUNDING,
    "src/pkg/words.py": WORDS,
    "tests/test_areas.py": TEST_AREAS,
}


OPEN = "try:\n    {}\nexcept ImportError:\n    pass\n"
"""An import that may fail."""


def every(files: dict[str, bytes]) -> dict[str, Deletion]:
    return {deletion.pin: deletion for deletion in find_deletions(files)}


def whole(files: dict[str, bytes | str], pin: str) -> dict[str, str]:
    """All edited files of one candidate as text, tests included."""
    found = {path: text.encode() if isinstance(text, str) else text for path, text in files.items()}
    deletion = every(found)[pin]
    edited = edited_files(found, [*deletion.edits, *deletion.test_edits])
    return {path: content.decode() for path, content in edited.items()}


def test_the_plan_of_a_small_package():
    found = every(PACKAGE)
    assert sorted(found) == sorted(
        [
            *(f"src/pkg/areas.py::{name}" for name in ("area", "_square", "volume")),
            *(f"src/pkg/areas.py::{name}@function/whole" for name in ("area", "_square", "volume")),
            *(f"src/pkg/rounding.py::{name}" for name in ("nearest", "_half_up")),
            *(f"src/pkg/rounding.py::{name}@function/whole" for name in ("nearest", "_half_up")),
            *(f"src/pkg/words.py::{name}" for name in ("shout", "whisper", "Voice.__init__", "Voice.pitch")),
            *(f"src/pkg/words.py::{name}" for name in ("Voice.pitch#2", "Voice.say")),
            *(f"src/pkg/words.py::{name}@function/whole" for name in ("shout", "whisper", "Voice.__init__")),
            *(f"src/pkg/words.py::{name}@function/whole" for name in ("Voice.pitch", "Voice.say")),
            "src/pkg/words.py::Voice@class/body",
            "src/pkg/words.py::Voice@class/whole",
            "src/pkg/areas.py::pkg.areas@module/body",
            "src/pkg/areas.py::pkg.areas@module/whole",
            "src/pkg/rounding.py::pkg.rounding@module/body",
            "src/pkg/rounding.py::pkg.rounding@module/whole",
            "src/pkg/words.py::pkg.words@module/body",
            "src/pkg/words.py::pkg.words@module/whole",
            "src/pkg/areas.py::area@feature/body",
            "src/pkg/areas.py::area@feature/whole",
            "src/pkg/rounding.py::nearest@feature/whole",
        ]
    )
    # `nearest` and `_half_up` are all that their module holds: their bodies are the module's, said once.
    bodies = found["src/pkg/areas.py::area@feature/body"].bodies
    assert {(cut.path, cut.first_line) for cut in bodies} == {
        ("src/pkg/areas.py", 10),
        ("src/pkg/areas.py", 22),
        ("src/pkg/rounding.py", 4),
        ("src/pkg/rounding.py", 8),
    }


def test_a_whole_feature_goes_from_every_file():
    assert whole(PACKAGE, "src/pkg/areas.py::area@feature/whole") == {
        "src/pkg/__init__.py": '''"""A package."""
from .areas import (
    volume as space,
)
from .words import shout, whisper

__all__ = [
    "shout",
    "space",
    "whisper",
]
''',
        "src/pkg/areas.py": '''"""Areas."""
import math
from functools import lru_cache


def volume(radius):
    return 4 / 3 * radius**3
''',
        "src/pkg/rounding.py": '"""Rounding."""\n',
        "tests/test_areas.py": TEST_AREAS.decode().replace(
            "from pkg import area, shout\n", OPEN.format("from pkg import area") + "from pkg import shout\n"
        ),
    }


def test_a_property_goes_with_its_setter():
    text = whole(PACKAGE, "src/pkg/words.py::Voice.pitch@function/whole")["src/pkg/words.py"]
    assert text == WORDS.decode().replace(
        """    @property
    def pitch(self):
        return self._pitch

    # The other half.
    @pitch.setter
    def pitch(self, value):
        self._pitch = value

""",
        "",
    )


def test_a_whole_module_goes_with_its_imports():
    deletion = every(PACKAGE)["src/pkg/words.py::pkg.words@module/whole"]
    assert deletion.removed_files == ("src/pkg/words.py",)
    edited = whole(PACKAGE, deletion.pin)
    assert edited["src/pkg/__init__.py"] == INIT.decode().replace(
        "from .words import shout, whisper\n", ""
    ).replace('    "shout",\n', "").replace('    "whisper",\n', "")
    opened = OPEN.format("from pkg import shout") + "from pkg import area\nimport pytest\n"
    assert edited["tests/test_areas.py"].startswith(opened)


def module(text: str, **others: str) -> dict[str, bytes]:
    return {
        "pkg/__init__.py": b"",
        "pkg/a.py": text.encode(),
        **{f"pkg/{name}.py": other.encode() for name, other in others.items()},
    }


FUNCTION = "def gone(x):\n    return x + 1\n"
PIN = "pkg/a.py::gone@function/whole"


FILES_WITHOUT = {
    "first": (FUNCTION + "\n\ny = 1\n", "y = 1\n"),
    "last": ("y = 1\n\n\n" + FUNCTION, "y = 1\n"),
    "between": ("y = 1\n\n\n" + FUNCTION + "\n\nz = 1\n", "y = 1\n\n\nz = 1\n"),
    "crlf": ("y = 1\r\n\r\n\r\ndef gone(x):\r\n    return x\r\n", "y = 1\r\n"),
    "tabs": ("if 1:\n\tdef gone(x):\n\t\treturn x\n", "if 1:\n\tpass\n"),
    "form feed": ("y = 1\n\x0c\ndef gone(x):\n    return x\n", "y = 1\n"),
    "wide characters": ("y = 'ä𝒳'; z = 2\n" + FUNCTION, "y = 'ä𝒳'; z = 2\n"),
    "deep comment": ("def f():\n    pass\n    # not its\n" + FUNCTION, "def f():\n    pass\n    # not its\n"),
    "overloads": (
        "y = 1\n\n@overload\ndef gone(x: int) -> int: ...\n@overload\n"
        "def gone(x: str) -> str: ...\n" + FUNCTION,
        "y = 1\n",
    ),
    "conditional": (
        (
            "import sys\nif sys.platform == 'win32':\n    def gone(x):\n        return 1\nelse:\n"
            "    # here\n    def gone(x):\n        return 2\n"
        ),
        "import sys\nif sys.platform == 'win32':\n    pass\nelse:\n    pass\n",
    ),
    "main": (
        FUNCTION + "if __name__ == '__main__':\n    gone(1)\n",
        "if __name__ == '__main__':\n    gone(1)\n",
    ),
    "call time": (FUNCTION + "def f():\n    return gone(1)\n", "def f():\n    return gone(1)\n"),
    "all first": ("__all__ = ['gone', 'y']\n" + FUNCTION, "__all__ = ['y']\n"),
    "all tuple of lines": ("__all__ = (\n 'y',\n 'z',\n 'gone')\n" + FUNCTION, "__all__ = (\n 'y',\n 'z')\n"),
    "all +=": ("__all__ = ['y']\n__all__ += ['gone']\n" + FUNCTION, "__all__ = ['y']\n__all__ += []\n"),
    "an import": ("import re\n" + FUNCTION, "import re\n"),
}


@pytest.mark.parametrize(("before", "after"), FILES_WITHOUT.values(), ids=FILES_WITHOUT)
def test_a_whole_function_goes_out_of_its_file(before, after):
    edited = whole(module(before), PIN)
    assert edited["pkg/a.py"] == after


IMPORTS_WITHOUT = {
    "alone": ("from .a import gone\n", ""),
    "aliased": ("from .a import gone as other\n", ""),
    "absolute": ("from pkg.a import gone, y\n", "from pkg.a import y\n"),
    "comment": ("from .a import y, gone  # noqa\n", "from .a import y  # noqa\n"),
    "backslash": ("from .a import y, \\\n    gone\n", "from .a import y\n"),
    "backslash after": ("from .a import y, gone, \\\n    z\n", "from .a import y, z\n"),
    "brackets": ("from .a import (y, gone,\n    z)\n", "from .a import (y, z)\n"),
    "brackets last": ("from .a import (y,  # why\n    gone)\n", "from .a import (y)\n"),
    "one each": (
        "from .a import (\n    y,\n    gone,  # g\n    z,\n)\n",
        "from .a import (\n    y,\n    z,\n)\n",
    ),
    "dotted": ("import pkg.a\nfrom .a import gone\n", "import pkg.a\n"),
    "block": ("if 1:\n    from .a import gone\n", "if 1:\n    pass\n"),
    "inside": ("def f():\n    from .a import gone\n    return gone(1)\n", "def f():\n    return gone(1)\n"),
}


@pytest.mark.parametrize(("before", "after"), IMPORTS_WITHOUT.values(), ids=IMPORTS_WITHOUT)
def test_imports_in_other_files_go(before, after):
    assert whole(module(FUNCTION, b=before), PIN)["pkg/b.py"] == after


@pytest.mark.parametrize(
    "other",
    [
        "import os; from .a import gone; z = 1\n",
        "if TYPE_CHECKING: from .a import gone\n",
        "from .a import gone, y\n__all__ = ('y', 'gone')\n",
        "from .a import gone\n__all__ = 'gone',\n",
    ],
)
def test_what_shares_a_line_or_leaves_no_tuple_is_no_whole_candidate(other):
    assert PIN not in every(module(FUNCTION, b=other))


def test_a_chain_of_re_exports_goes():
    files = module(
        FUNCTION,
        b="from .a import gone as there\n__all__ = ['there', 'more']\nmore = 1\n",
        c="from .b import *\n__all__ = ['there']\n",
        d="from pkg.c import there, more\n",
    )
    assert whole(files, PIN) == {
        "pkg/a.py": "",
        "pkg/b.py": "__all__ = ['more']\nmore = 1\n",
        "pkg/c.py": "from .b import *\n__all__ = []\n",
        "pkg/d.py": "from pkg.c import more\n",
    }


def test_the_constants_of_a_feature_stay():
    text = "_DIGITS = '0123456789'\n\n\ndef gone(x):\n    return _inner(x) in _DIGITS\n\n\ndef _inner(x):\n    return x\n"
    assert whole(module(text), "pkg/a.py::gone@feature/whole") == {"pkg/a.py": "_DIGITS = '0123456789'\n"}
    assert "pkg/a.py::gone@feature/body" not in every(
        module(text.replace("_inner(x) in", "x in"))
    )  # one body is no feature


METHODS = """from .b import halve


class C:
    def m(self):
        return halve(self._part())

    def _part(self):
        return 2
"""


def test_a_method_takes_the_helpers_that_only_it_needs_and_no_other_method():
    files = module(METHODS, b="def halve(x):\n    return x / 2\n")
    found = every(files)
    deletion = found["pkg/a.py::C.m@feature/body"]
    assert [cut.pin for cut in deletion.bodies] == ["pkg/a.py::C.m", "pkg/b.py::halve"]
    assert whole(files, "pkg/a.py::C.m@feature/whole") == {
        "pkg/a.py": "class C:\n    def _part(self):\n        return 2\n",
        "pkg/b.py": "",
    }


TESTS = "tests/test_a.py"


TESTS_WITHOUT = {
    "through the module": ("import pkg.a as m\ndef test(): assert m.gone\n", None),
    "star": ("from pkg.a import *\ndef test(): assert gone\n", None),
    "guarded": ("try:\n    from pkg.a import gone\nexcept ImportError:\n    gone = 1\n", None),
    "one line": ("from pkg.a import gone; x = 1\n", None),
    "one of two names": (
        "from pkg.a import (gone as g,\n  y)  # both\ndef test():\n    assert g(1)\n",
        OPEN.format("from pkg.a import gone as g")
        + "from pkg.a import y  # both\ndef test():\n    assert g(1)\n",
    ),
    "each alone": (
        "from pkg.a import gone, gone as other\n",
        OPEN.format("from pkg.a import gone") + OPEN.format("from pkg.a import gone as other"),
    ),
    "line ends": (
        "from pkg.a import gone\r\ndef test():\r\n\tgone()\r\n",
        (OPEN.format("from pkg.a import gone") + "def test():\n\tgone()\n").replace("\n", "\r\n"),
    ),
}


@pytest.mark.parametrize(("before", "after"), TESTS_WITHOUT.values(), ids=TESTS_WITHOUT)
def test_the_imports_of_tests_may_fail(before, after):
    files = {**module(FUNCTION), TESTS: before.encode()}
    edited = whole(files, PIN)
    assert edited.get(TESTS) == after


def test_a_test_may_import_a_module_that_is_gone():
    files = {
        **module(FUNCTION + "\n\ndef other():\n    return 1\n"),
        TESTS: b"import pkg.a\nimport pkg.a as m\n",
    }
    edited = whole(files, "pkg/a.py::pkg.a@module/whole")
    assert edited[TESTS] == OPEN.format("import pkg.a") + OPEN.format("import pkg.a as m")


def test_a_long_chain_of_conditions_may_stand_beside_what_goes() -> None:
    chain = "def other(x):\n    if x:\n        return 1\n" + "    elif x:\n        return 1\n" * 1500
    edited = whole(module(f"{FUNCTION}\n\n{chain}"), PIN)
    assert edited["pkg/a.py"] == chain


# --- files without candidates ---


@pytest.mark.parametrize(
    "content",
    [
        b"\xef\xbb\xbfdef f():\n    return 1\n",
        "# coding: latin-1\ndef f():\n    return 'é'\n".encode("latin-1"),
        b"print 'two'\n",
        b"def f(:\n",
        b"def f():\n    return 1\n\x00",
        b"def f(x):\n    return 1\nif 0:\n    pass\n" + b"elif 1:\n    pass\n" * 1500,  # too deep
    ],
)
def test_a_file_that_cannot_be_cut_gives_nothing(content: bytes) -> None:
    found = every({**module("def f():\n    return 1\n"), "pkg/b.py": content})
    assert found
    assert not any(pin.startswith("pkg/b.py") for pin in found)
