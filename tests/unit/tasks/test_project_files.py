"""What a project declares is read from where its tools write it: one reader, nothing run, nothing guessed."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import Distribution
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet
from small_trees import write_tree

from composer_replication.rollouts.candidate_tree import TreeRule
from composer_replication.tasks.intake.project_files import (
    Project,
    bounds_of,
    find_projects,
    fits_python,
    import_folders,
    version_files,
)
from composer_replication.tasks.intake.sources import RepositorySource, open_source
from composer_replication.tasks.intake.tree_rules import folders_of_tree, recorded_folders
from composer_replication.tasks.planning.symbol_graph import SymbolGraph


def encoded(files: Mapping[str, str]) -> dict[str, bytes]:
    return {path: text.encode() for path, text in files.items()}


@pytest.mark.parametrize(
    ("text", "bounds"),
    [
        ("^1.2", ">=1.2,<2"),
        ("^0.2.3", ">=0.2.3,<0.3"),
        ("^0.0.3", ">=0.0.3,<0.0.4"),
        ("~1.2", ">=1.2,<1.3"),
        ("1.2.*", ">=1.2,<1.3"),
        ("^1.2.*", ">=1.2,<2"),
        (">=1.2.*", ">=1.2"),
        ("^1.x", ""),
        (">=1,!=1.5.*,<3", ">=1,!=1.5.*,<3"),
        ("1.2", "==1.2"),
        ("*", ""),
        (">=1,<2", ">=1,<2"),
        ("nonsense ^^", ""),
    ],
)
def test_a_range_of_poetry_keeps_its_upper_bound(text: str, bounds: str) -> None:
    versions = "0 0.0.3 0.0.4 0.2.3 0.2.9 0.3 1 1.1 1.2 1.2.1 1.3 1.5.1 1.9 2 3 4".split()
    assert [*SpecifierSet(bounds_of(text)).filter(versions)] == [*SpecifierSet(bounds).filter(versions)]


def test_of_alternative_pythons_the_one_that_runs_counts() -> None:
    assert list(map(fits_python, ["^3.8 || ^2.7", "^2.7", ">=3.8", "odd"])) == [True, False, True, True]


SOURCE = {"code/pkg/__init__.py": "", "tests/test_a.py": ""}


@pytest.mark.parametrize(
    "files",
    [
        {"pyproject.toml": '[tool.setuptools]\npackage-dir = {"" = "code"}'},
        {"pyproject.toml": '[tool.setuptools.packages.find]\nwhere = ["code"]'},
        {"setup.cfg": "[options]\npackage_dir =\n    =code\n"},
        {"setup.py": "setup(package_dir={'': 'code'})"},
        {"setup.py": "HERE = 'code'\nsetup(package_dir={'': HERE}, packages=find_packages(HERE))"},
        {"pyproject.toml": '[tool.poetry]\npackages = [{include = "pkg", from = "code"}]'},
        {"pyproject.toml": '[tool.hatch.build.targets.wheel]\npackages = ["code/pkg"]'},
        {"pyproject.toml": '[tool.hatch.build.targets.wheel]\nsources = ["code"]'},
        {"pyproject.toml": '[tool.hatch.build.targets.wheel.sources]\n"code" = ""'},
        {"pyproject.toml": '[tool.pdm.build]\npackage-dir = "code"'},
        {"pyproject.toml": '[tool.maturin]\npython-source = "code"'},
        {"pyproject.toml": '[tool.uv.build-backend]\nmodule-root = "code"'},
        {"pyproject.toml": '[tool.scikit-build]\nwheel.packages = ["code/pkg"]'},
    ],
)
def test_the_source_folder_is_what_the_build_backend_says(files: Mapping[str, str]) -> None:
    everything = encoded({**SOURCE, **files})
    assert import_folders(find_projects(everything), everything) == ["code", "."]


@pytest.mark.parametrize("folder", ["../elsewhere", "/etc", "missing", "."])
def test_a_source_folder_outside_of_the_tree_is_none(folder: str) -> None:
    everything = encoded({**SOURCE, "pyproject.toml": f'[tool.pdm.build]\npackage-dir = "{folder}"'})
    assert import_folders(find_projects(everything), everything) == ["."]


def test_members_of_a_workspace_and_projects_by_path_are_sources() -> None:
    files = encoded(
        {
            "pyproject.toml": '[project]\nname = "top"\ndependencies = ["one", "two"]\n[tool.uv.workspace]\nmembers = ["packages/*"]\nexclude = ["packages/old"]\n'
            '[tool.uv.sources]\none = {workspace = true}\ntwo = {path = "libs/two"}\n',
            "packages/one/pyproject.toml": '[project]\nname = "one"\ndependencies = ["alpha"]',
            "packages/one/src/one/__init__.py": "",
            "packages/three/pyproject.toml": '[project]\nname = "three"',
            "packages/three/three.py": "",
            "packages/three/tests/data/pyproject.toml": "",
            "packages/old/pyproject.toml": "",
            "libs/two/two.py": "",
        }
    )
    projects = find_projects(files)
    assert [one.folder for one in projects if one.is_needed] == ["", "packages/one", "libs/two"]
    assert [one.folder for one in projects if not one.is_needed] == ["packages/three"]
    assert import_folders(projects, files) == ["packages/one/src", "libs/two", "packages/three", "."]


@pytest.mark.parametrize("table", ["rye.workspace", "hatch.envs.default.workspace"])
def test_members_are_found_whichever_tool_names_them(table: str) -> None:
    top = f'[tool.{table}]\nmembers = ["packages/*"]\n'
    files = encoded({"pyproject.toml": top, "packages/one/setup.py": "", "packages/one/src/one.py": ""})
    assert import_folders(find_projects(files), files) == ["packages/one/src", "."]


POINT = {"pytest11": {"plug": "pkg.plugin"}}


@pytest.mark.parametrize(
    "files",
    [
        {"pyproject.toml": '[project.entry-points.pytest11]\nplug = "pkg.plugin"'},
        {"pyproject.toml": '[tool.poetry.plugins.pytest11]\nplug = "pkg.plugin"'},
        {"setup.cfg": "[options.entry_points]\npytest11 =\n    plug = pkg.plugin\n"},
        {"setup.py": "setup(entry_points={'pytest11': ['plug = pkg.plugin']})"},
        {"setup.py": "POINTS = {'pytest11': 'plug=pkg.plugin'}\nsetup(entry_points=POINTS)"},
        {"setup.py": "setup(entry_points='''\n[pytest11]\nplug = pkg.plugin\n''')"},
    ],
)
def test_own_entry_points_are_found_wherever_they_are_declared(files: Mapping[str, str]) -> None:
    assert find_projects(encoded(files))[0].entry_points == POINT


def test_an_entry_point_cannot_bring_lines_of_its_own() -> None:
    table = '[project.entry-points.pytest11]\n"a]\\n[b" = "x"\nc = "x\\ny = z"\nd = "pkg:go"'
    assert find_projects(encoded({"pyproject.toml": table}))[0].entry_points == {"pytest11": {"d": "pkg:go"}}


@pytest.mark.parametrize(
    "files",
    [
        {"pyproject.toml": '[tool.setuptools_scm]\nversion_file = "pkg/_version.py"'},
        {
            "pyproject.toml": '[tool.setuptools_scm]\nwrite_to = "pkg/_version.py"\n'
            "write_to_template = '__version__ = version = \"{version}\"\\nversion_tuple = {version_tuple}'"
        },
        {"setup.py": "scm = {'version_file': 'pkg/_version.py'}\nsetup(use_scm_version=scm)"},
        {"pyproject.toml": '[tool.hatch.build.hooks.vcs]\nversion-file = "pkg/_version.py"'},
        {"pyproject.toml": '[tool.pdm.version]\nsource = "scm"\nwrite_to = "pkg/_version.py"'},
        {"pyproject.toml": '[tool.poetry-dynamic-versioning.files."pkg/_version.py"]\n'},
        {"pyproject.toml": '[tool.versioneer]\nversionfile_source = "pkg/_version.py"'},
        {"pyproject.toml": '[tool.versioningit.write]\nfile = "pkg/_version.py"'},
        {"pyproject.toml": '[[tool.scikit-build.generate]]\npath = "pkg/_version.py"'},
        {"setup.cfg": "[versioneer]\nversionfile_source = pkg/_version.py\n"},
        {"pkg/meson.build": "custom_target('v', output: '_version.py', command: ['x'])"},
    ],
)
def test_a_version_file_of_a_build_is_written_with_version_0(files: Mapping[str, str]) -> None:
    read = Project(encoded({"README": "", "pkg/__init__.py": "", **files}))
    made = version_files(read, "0")
    assert list(made) == ["pkg/_version.py"]
    names: dict[str, object] = {}
    exec(made["pkg/_version.py"], names)
    assert (names["__version__"], names["version"], names["version_tuple"]) == ("0", "0", (0,))


def test_a_version_file_that_is_there_stays_and_none_lies_outside() -> None:
    table = '[tool.setuptools_scm]\nversion_file = "other/_version.py"\nwrite_to = "other"\n[tool.pdm.version]\nwrite_to = "../x.py"'
    files = encoded({"other/_version.py": "", "pyproject.toml": table})
    assert version_files(Project(files), "1.2") == {}
    table = '[tool.pdm.version]\nwrite_to = "pkg/VERSION"'
    text = encoded({"src/pkg/__init__.py": "", "pyproject.toml": table, "hatch_build.py": ""})
    text["pyproject.toml"] += b'\n[tool.hatch.build.hooks.custom]\npath = "hatch_build.py"\nfile = ""\n'
    assert version_files(Project(text), "1.2") == {"src/pkg/VERSION": b"1.2\n"}


def test_a_template_is_one_of_a_version_by_its_own_name() -> None:
    files = encoded({"conversion/__init__.py": "", "conversion/table.py.in": "rows = []\n"})
    assert version_files(Project(files), "1.2") == {}


def test_a_template_without_an_end_is_filled_at_once() -> None:
    table = (
        f'[tool.setuptools_scm]\nversion_file = "pkg/v.txt"\nversion_file_template = "{{{"a" * 300_000}"\n'
    )
    files = encoded({"pkg/__init__.py": "", "pyproject.toml": table})
    assert version_files(Project(files), "1.2") == {"pkg/v.txt": b"{" + b"a" * 300_000}


@pytest.mark.parametrize("build_file", ["meson.build", "pkg/meson.build"])
def test_a_template_of_meson_is_filled_where_it_is_imported_from(build_file: str) -> None:
    template = "version.py.in" if build_file.startswith("pkg") else "pkg/version.py.in"
    call = f"configure_file(input: '{template}', output: 'version.py', configuration: conf)"
    files = encoded({build_file: call, "pkg/version.py.in": 'short = "@VERSION@"\n'})
    assert version_files(Project(files), "1.2")["pkg/version.py"] == b'short = "1.2"\n'


def test_lines_of_requirement_files_are_read_as_pip_reads_them() -> None:
    files = encoded(
        {
            "reqs/a.txt": "-r b.txt\r\nfoo[x]>=1 ; python_version>'3' # why\nold;python_version<'3'\n-c bounds.txt\n-r a.txt\n",
            "reqs/bounds.txt": "unused<1\n",
            "reqs/b.txt": "-e ./libs/x[test]\ngit+https://h/o/foo.git@v1#egg=Bar\ngit+https://h/o/bare.git@v2\n./w/y-1.0.tar.gz\n../out\nz==1.0 \\\n"
            "  --hash=sha256:00\n--index-url https://x\nq @ file:///abs/x\nfile:./libs/k\nplain\n",
        }
    )
    found = Project(files).lines("-r reqs/a.txt")
    assert {one.name: one.url or str(one.specifier) for one in found} == {
        "x": "tree:libs/x",
        "Bar": "git+https://h/o/foo.git@v1#egg=Bar",
        "bare": "git+https://h/o/bare.git@v2",
        "y": "./w/y-1.0.tar.gz",
        "out": "../out",
        "z": "==1.0",
        "q": "file:///abs/x",
        "k": "tree:libs/k",
        "plain": "",
        "foo": ">=1",
    }


@pytest.mark.parametrize(
    "setup",
    [
        "".join(f"def f{n}():\n    return f{n + 1}()\n" for n in range(1500))
        + "setup(install_requires=f0())\n",
        "x, y = 'a', 0\nx = 'a'\ny = ['b']\n"
        + "x = x + x\ny = [*y, *y]\n" * 60
        + "setup(name='x', version=x)\n",
        "d = {}\n" + "d = {'a': d}\n" * 1200 + "setup(entry_points=d)\n",
        "d = {}\n" + "d = {'a': d, 'b': d}\n" * 60 + "setup(entry_points=d, use_scm_version=d)\n",
        "points = {}\npoints[1] = ['a=b:c']\nsetup(name='x', entry_points=points, extras_require=points)\n",
    ],
)
def test_a_setup_file_that_only_running_would_tell_is_opened(tmp_path: Path, setup: str) -> None:
    write_tree(tmp_path, {**SOURCE, "tests/test_a.py": "def test_a():\n    pass\n", "setup.py": setup})
    assert open_source(str(tmp_path)).files


# --- what an installation would show is in the tree ---

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
