"""What a package asks of its own metadata it is told, wherever the project writes its name and version."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import Distribution
from pathlib import Path

import pytest
from small_trees import write_tree

from composer_replication.rollouts.candidate_tree import TreeRule
from composer_replication.tasks.intake.sources import RepositorySource, open_source
from composer_replication.tasks.intake.tree_rules import folders_of_tree, recorded_folders
from composer_replication.tasks.planning.symbol_graph import SymbolGraph

CODE = {"pkg/__init__.py": "", "tests/test_a.py": "def test_a():\n    pass\n"}


def opened(tmp_path: Path, files: Mapping[str, str]) -> RepositorySource:
    root = tmp_path / "folder"
    write_tree(root, {**CODE, **files})
    return open_source(str(root))


def found_version(source: RepositorySource, name: str, folder: Path) -> str | None:
    """What ``importlib.metadata`` finds in the task tree."""
    write_tree(folder, source.files)
    return next((one.version for one in Distribution.discover(name=name, path=[str(folder)])), None)


@pytest.mark.parametrize(
    ("files", "version"),
    [
        ({"pyproject.toml": '[project]\nname = "Some-Thing.x"\nversion = "2.1"\n'}, "2.1"),
        ({"pyproject.toml": '[project]\nname = "some.thing_x"\ndynamic = ["version"]\n'}, "0"),
        ({"pyproject.toml": '[project]\nname = "some-thing-x"\n[tool.poetry]\nversion = "3.0"\n'}, "3.0"),
        ({"setup.cfg": "[metadata]\nname = some-thing-x\nversion = attr: pkg.__version__\n"}, "0"),
        ({"setup.cfg": "[metadata]\nname = some-thing-x\n", "setup.py": 'setup(version="4")\n'}, "4"),
        ({"setup.py": 'import setuptools\nsetuptools.setup(name="some-thing-x", version="5.1")\n'}, "5.1"),
        ({"setup.py": 'setup(name="some-thing-x", version=read_it())\n'}, "0"),
    ],
)
def test_a_package_finds_its_own_version(tmp_path: Path, files: Mapping[str, str], version: str) -> None:
    source = opened(tmp_path, files)
    assert source.name == "some-thing-x"
    assert found_version(source, "some-thing-x", tmp_path / "tree") == version


def test_entry_points_and_a_version_file_are_in_the_tree_as_if_it_were_installed(tmp_path: Path) -> None:
    table = """
[project]
name = "pytest-thing"
dynamic = ["version"]
[project.entry-points.pytest11]
thing = "pkg.plugin"
[project.scripts]
thing = "pkg:main"
[tool.setuptools_scm]
version_file = "pkg/_version.py"
[tool.setuptools]
package-dir = {"" = "."}
"""
    source = opened(tmp_path, {"pyproject.toml": table})
    assert found_version(source, "pytest-thing", tmp_path / "tree") == "0"
    found = next(Distribution.discover(name="pytest-thing", path=[str(tmp_path / "tree")]))
    assert {(one.group, one.name, one.value) for one in found.entry_points} == {
        ("pytest11", "thing", "pkg.plugin"),
        ("console_scripts", "thing", "pkg:main"),
    }
    assert b'version = "0"' in source.files["pkg/_version.py"]
    # Nothing of the package itself stands in what is written.
    assert {path for path in source.files if ".dist-info/" in path} == {
        "pytest_thing-0.dist-info/METADATA",
        "pytest_thing-0.dist-info/entry_points.txt",
    }


def test_places_of_import_stand_in_the_tree_where_no_attempt_can_change_them(tmp_path: Path) -> None:
    table = '[project]\nname = "thing"\n[tool.setuptools.package-dir]\n"" = "code"\n'
    modules = {"code/thing/__init__.py": "", "lib/more/__init__.py": ""}
    source = opened(tmp_path, {"pyproject.toml": table, **modules})
    assert recorded_folders(source.files) == ["code", "lib", "."]
    # The repository itself says nothing in that file.
    assert folders_of_tree(tmp_path / "folder") == ["lib", "."]
    found_version(source, "thing", tmp_path / "tree")
    assert folders_of_tree(tmp_path / "tree") == ["code", "lib", "."]
    rule = TreeRule(frozenset(), frozenset({"thing"}), frozenset({"json"}), roots=("code", "lib"))
    assert not rule.takes("thing-0.dist-info/source_folders.txt")
    assert not rule.takes("code/json.py")
    assert rule.takes("code/other.py")
    assert SymbolGraph(source.files).by_module.keys() >= {"thing", "more"}
    # Where the places of import are the usual ones nothing is written, so trees of earlier versions stay.
    plain = opened(tmp_path / "plain", {"pyproject.toml": '[project]\nname = "thing"\n'})
    assert {path for path in plain.files if ".dist-info/" in path} == {"thing-0.dist-info/METADATA"}
