"""Entry points of deleted symbols go from every file that declares them, and what is left can be read."""

from __future__ import annotations

import ast
import configparser
import tomllib
from itertools import combinations

import pytest

from composer_replication.tasks.planning.edits import edited_text
from composer_replication.tasks.planning.entry_points import entry_point_edits

NAMES = ("x", "y", "z")
ALL = [chosen for count in range(4) for chosen in combinations(NAMES, count)]


def without(path: str, text: str, *wanted: str) -> str:
    return edited_text(text, entry_point_edits(path, text.encode(), wanted))


def scripts_of(setup: str) -> list[str]:
    """The strings in the first list of a ``setup.py``."""
    found = next(node for node in ast.walk(ast.parse(setup)) if isinstance(node, ast.List))
    return [str(element.value) for element in found.elts if isinstance(element, ast.Constant)]


@pytest.mark.parametrize("gone", ALL)
@pytest.mark.parametrize(
    "setup",
    [
        "setup(entry_points={'console_scripts': ['x = m:x', 'y=m:y [extra]', 'z = m:z']})\n",
        "setup(entry_points={'console_scripts': ['x = m:x','y = m:y', 'z = m:z' , ]})\n",
        'setup(entry_points={\n    "console_scripts": [\n        "x = m:x",\n        "y = m:y",  # two\n        "z = m:z"]})\n',
        'setup(entry_points={"console_scripts": [\n    "x = m:x",\n\n    "y = m:y",\n    "z = m:z"\n]})\n',
    ],
)
def test_a_list_of_setup_py(setup: str, gone: tuple[str, ...]) -> None:
    left = scripts_of(without("setup.py", setup, *(f"m.{name}" for name in gone)))
    assert [entry[0] for entry in left] == [name for name in NAMES if name not in gone]


def test_a_text_of_setup_py() -> None:
    setup = 'setup(entry_points="""\n[console_scripts]\nx = m:x\ny = m:y\n""")\n'
    assert without("setup.py", setup, "m.x") == setup.replace("x = m:x\n", "")


def test_what_cannot_be_taken_out_of_setup_py_stays() -> None:
    for setup in (
        "setup(entry_points={'plugins': 'x = m:x', 'more': 1})\n",  # a value of a dict
        "setup(\n    scripts=\n    'x = m:x'\n)\n",  # nothing would be left of the argument
        "TARGETS = {'x': 'm:x'}\n",
    ):
        assert without("setup.py", setup, "m.x") == setup


@pytest.mark.parametrize("gone", ALL)
def test_a_table_on_one_line_of_pyproject(gone: tuple[str, ...]) -> None:
    text = '[project]\nscripts = { x = "m:x", y=\'m:y\', "z" = "m:z" }\n'
    left = tomllib.loads(without("pyproject.toml", text, *(f"m.{name}" for name in gone)))
    assert list(left["project"]["scripts"]) == [name for name in NAMES if name not in gone]


@pytest.mark.parametrize("gone", ALL)
def test_lines_of_pyproject_and_setup_cfg(gone: tuple[str, ...]) -> None:
    wanted = [f"m.{name}" for name in gone]
    table = "[project.scripts]\n" + "".join(f'{name} = "m:{name}"\n' for name in NAMES)
    left = tomllib.loads(without("pyproject.toml", table, *wanted))
    assert list(left["project"]["scripts"]) == [name for name in NAMES if name not in gone]
    config = configparser.ConfigParser()
    listed = "".join(f"  {name} = m:{name}\n" for name in NAMES)
    config.read_string(without("setup.cfg", f"[options.entry_points]\nconsole_scripts =\n{listed}", *wanted))
    shown = config["options.entry_points"]["console_scripts"].split("\n")
    assert [line[0] for line in shown if line] == [name for name in NAMES if name not in gone]


def test_a_symbol_is_meant_whole_and_with_what_is_in_it() -> None:
    text = '[project.scripts]\na = "pkg.cli:App.run"\nb = "pkg.cli:Apple"\nc = "pkg.client:App"\n'
    kept = '[project.scripts]\nb = "pkg.cli:Apple"\nc = "pkg.client:App"\n'
    assert without("pyproject.toml", text, "pkg.cli.App") == kept
    assert without("pyproject.toml", text, "pkg.cli") == '[project.scripts]\nc = "pkg.client:App"\n'
    assert entry_point_edits("pyproject.toml", b'\xff = "m:x"', ["m.x"]) == []


def test_a_plug_in_that_is_a_whole_module_goes_from_installed_metadata() -> None:
    text = "[pytest11]\nx = m.plugin\ny = m.other [extra]\n\n[console_scripts]\nz = m.plugin:main\n"
    path = "m-0.dist-info/entry_points.txt"
    assert without(path, text, "m.plugin") == "[pytest11]\ny = m.other [extra]\n\n[console_scripts]\n"
    assert without("setup.cfg", "[x]\nkey = m.plugin\n", "m.plugin") == "[x]\nkey = m.plugin\n"
