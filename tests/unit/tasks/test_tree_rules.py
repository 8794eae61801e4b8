"""Real packages stay in a task tree whatever they are called; what leaks the code stays out; what is missed is named."""

from __future__ import annotations

import tarfile
import zipfile
from pathlib import Path, PurePosixPath

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_trees import commit_all, write_tree

from composer_replication.errors import InputError
from composer_replication.tasks.build import build_tasks
from composer_replication.tasks.intake.sources import open_source
from composer_replication.tasks.intake.tree_rules import TreeRules, folders_of_tests, is_subject_path

BASE = {
    "pyproject.toml": b'[project]\nname = "thing"\nversion = "1"\n',
    "foo/__init__.py": b"",
    "foo/a.py": b"def one():\n    return 1\n",
    "tests/test_a.py": b"import foo.a\n\n\ndef test_one():\n    assert foo.a.one() == 1\n",
}


def kept(*names: str) -> set[str]:
    """Which of these files are in the tree of a repository that has them and a package ``foo``."""
    rule = TreeRules({*names, "foo/__init__.py"}).belongs
    return {name for name in names if rule(PurePosixPath(name))}


@pytest.mark.parametrize("name", ["env", "venv", "tools"])
def test_a_package_is_one_whatever_it_is_called(name: str) -> None:
    for files in (
        (f"foo/{name}/__init__.py", f"foo/{name}/a.py", f"foo/{name}/deep/b.py", f"foo/{name}/c.json"),
        (f"foo/{name}/a.py", f"foo/{name}/deep/b.py"),  # a portion of a namespace, inside a package
        (f"{name}/__init__.py", f"{name}/a.py", f"src/{name}/__init__.py"),
        (f"tests/{name}/a.py", f"tests/{name}/b.txt"),
    ):
        assert kept(*files) == set(files)


@pytest.mark.parametrize("name", ["env", "venv", "virtualenv"])
def test_an_environment_at_the_top_stays_out_and_what_any_has_installed(name: str) -> None:
    assert kept(f"{name}/a.py", f"{name}/lib/python3.11/os.py", f"{name}/src/foo/__init__.py") == set()
    assert kept(f"foo/{name}/lib/python3.11/site-packages/foo/a.py", "py311/lib/site-packages/a.py") == set()


@pytest.mark.parametrize(
    "name",
    ["build", "dist", "_build", "doc", "docs", "site", "notebooks", "typings", "node_modules", "htmlcov", ".venv", "site-packages"],
)  # fmt: skip
def test_known_leaks_at_the_top_stay_out_with_every_look_of_a_package(name: str) -> None:
    files = {f"{name}/__init__.py", f"{name}/a.py", f"{name}/lib/foo/a.py"}
    assert kept(*files) == set()


def test_a_folder_at_the_top_is_kept_where_it_is_a_package(tmp_path: Path) -> None:
    package = {"tools/__init__.py": b"", "tools/a.py": b"x = 1\n"}
    write_tree(tmp_path, {**BASE, **package, "tests/test_b.py": b"def test_b():\n    pass\n"})
    source = open_source(str(tmp_path))
    assert package.keys() <= source.files.keys()
    assert source.left_out == ()
    (tmp_path / "tools" / "__init__.py").unlink()  # a folder of scripts
    assert open_source(str(tmp_path)).left_out == ("tools/a.py",)


DATA = "tests/data/a.log tests/data/poetry.lock tests/data/.env tests/a.zip".split()
NO_DATA = (
    *"foo/a.log foo/.env tests/a.xz tests/foo-1-py3-none-any.whl tests/old.diff tests/a.pickle".split(),
    *"tests/.a.py.swp tests/.pytest_cache/a.txt tests/__pycache__/a.pyc".split(),
)


def test_data_of_tests() -> None:
    assert {name for name in (*DATA, *NO_DATA) if kept(name)} == set(DATA)


NAMES = st.sampled_from(
    "foo tests env tools build a.py __init__.py a.zip a.log .env .git __pycache__ a.pyc src lib b.txt".split()
)


@given(st.sets(st.lists(NAMES, min_size=1, max_size=4).map("/".join), max_size=12))
def test_the_rule_is_the_same_for_what_it_kept(names: set[str]) -> None:
    """A tree is chosen twice, before and after reading; nothing of it may be lost between."""
    once = kept(*names)
    assert kept(*once) == once
    for name in once:
        parts = PurePosixPath(name).parts
        assert not {".git", "__pycache__"}.intersection(parts[:-1])
        assert parts[0] != "build" or len(parts) == 1
        assert not name.endswith(".pyc")
    assert not set(TreeRules(names).left_out(dict.fromkeys(once, b""))) & once


def test_what_is_left_out_is_told_the_likeliest_first() -> None:
    names = {
        *BASE, "foo/x.so", "tests/data/a.zip", "foo/__pycache__/a.cpython-311.pyc", ".git/objects/a", "docs/conf.py",
        "tools/a.py", "CHANGELOG.md", "tests/.coverage", "requirements.txt", "data/table.csv", ".venv/lib/a.py",
    }  # fmt: skip
    left_out = ("foo/x.so", "tests/.coverage", "tests/data/a.zip", "tools/a.py")
    assert TreeRules(names).left_out(BASE) == left_out
    reads = {**BASE, "foo/a.py": b"TABLE = open('data/table.csv').read()\n"}
    assert TreeRules(names).left_out(reads) == (*left_out, "data/table.csv")
    assert TreeRules({*names, "env/a.py", "._a.py"}).left_out(BASE) == left_out


LINKS = {
    "foo/b.py": "a.py",
    "more": "foo",
    "c.py": "foo/a.py",
    "tests/d.txt": "test_a.py",
    "NOTES.md": "README.md",
}


@pytest.mark.parametrize("kind", ["folder", "tar", "zip", "git"])
def test_links_that_a_test_may_miss_are_named_whatever_holds_them(tmp_path: Path, kind: str) -> None:
    root = tmp_path / "thing"
    write_tree(root, {**BASE, "docs/e.md": b"", "foo/__init__.py": b""})
    for name, target in {**LINKS, "docs/e.py": "e.md", ".venv": "foo"}.items():
        (root / name).symlink_to(target)
    source = str(root)
    if kind == "tar":
        source += ".tar.gz"
        with tarfile.open(source, "w:gz") as archive:
            archive.add(root, arcname="thing-1")
    elif kind == "zip":
        source += ".zip"
        with zipfile.ZipFile(source, "w") as archive:
            for path in root.rglob("*"):
                info = zipfile.ZipInfo(f"thing-1/{path.relative_to(root).as_posix()}")
                info.external_attr = 0o120777 << 16 if path.is_symlink() else 0
                if path.is_symlink() or path.is_file():
                    archive.writestr(info, str(path.readlink()) if path.is_symlink() else path.read_bytes())
    elif kind == "git":
        commit_all(root)
        source = f"git+file://{root}@main"
    found = open_source(source)
    assert not LINKS.keys() & found.files.keys()
    assert found.left_out == ("c.py (a link)", "foo/b.py (a link)", "more (a link)", "tests/d.txt (a link)")


def test_a_refused_build_says_which_files_its_tests_may_miss(tmp_path: Path) -> None:
    test = b"import tools.a\n\n\ndef test_one():\n    assert tools.a.x == 1\n"
    write_tree(tmp_path / "thing", {**BASE, "tests/test_a.py": test, "tools/a.py": b"x = 1\n"})
    with pytest.raises(InputError) as caught:
        build_tasks([str(tmp_path / "thing")], tmp_path / "out").require_tasks()
    assert caught.value.code == "CR0419"
    assert "No module named 'tools'" in caught.value.message
    assert "; left out: tools/a.py" in caught.value.message


@pytest.mark.parametrize(
    ("files", "found"),
    [
        (["spec/test_a.py", "spec/helpers.py", "spec/data.json"], {"spec"}),
        (["spec/deep/test_a.py"], {"spec/deep"}),
        (["lib/core.py", "lib/test_core.py"], set()),  # its own test beside it
        (["lib/core.py", "lib/core_test.py", "lib/test_more.py"], set()),
        (["lib/core.py", "lib/more.py", "lib/test_a.py"], set()),  # most are not tests
        (["src/test_a.py", "src/pkg/__init__.py", "src/pkg/core.py"], set()),  # a package below
        (["spec/test_a.py", "spec/data/one/__init__.py"], {"spec"}),  # what tests read
        (["pkg/__init__.py", "pkg/test_a.py"], set()),
        (["test_a.py", "core.py"], set()),
    ],
)
def test_a_folder_is_there_for_tests_where_nothing_in_it_is_tested(files: list[str], found: set[str]) -> None:
    tests = [path for path in files if "test" in path]
    assert folders_of_tests(tests, files) == found


def test_folders_of_tests_have_usual_names_and_a_product_may_have_test_in_its_name() -> None:
    products = "ab_testing/core.py flask_testing/utils.py pkg/test_utils/x.py contest/a.py unit/x.py".split()
    tests = (
        "test/x.py testing/x.py unit_tests/x.py tests-py3/x.py unittests/x.py unit_test/x.py integration-test/x.py"
        " test_suite/x.py test_data/x.py test_py3/x.py"
    ).split()
    assert [path for path in (*products, *tests) if is_subject_path(path)] == products


def test_a_repository_in_which_everything_is_among_tests_is_told_so(tmp_path: Path) -> None:
    root = tmp_path / "thing"
    files = {
        "pyproject.toml": '[project]\nname = "thing"\nversion = "1"\n[tool.pytest.ini_options]\npythonpath = ["spec"]\n',
        "spec/helpers.py": "def one():\n    return 11\n",
        "spec/test_a.py": "import helpers\n\n\ndef test_one():\n    assert helpers.one() == 11\n\n\ndef test_b():\n    pass\n",
    }
    write_tree(root, files)
    summary = build_tasks([str(root)], tmp_path / "out", jobs=1)
    with pytest.raises(InputError, match="no source file outside the folders of tests holds anything"):
        summary.require_tasks()


def test_data_of_namespace_packages_and_data_that_tests_name(tmp_path: Path) -> None:
    files = {
        "pyproject.toml": "",
        "src/acme/units.json": "",
        "src/acme/durations/core.py": "",
        "src/acme/durations/more/units.json": "",
        "xmltestdata/a.xml": "",
        "schemas/one.json": "",
        "schemas/two.json": "",
        "examples/run.py": "",
        "notes/plan.md": "",
        "docs/xmltestdata/b.xml": "",
        "xmltestdata/packed.zip": "",
        "tests.py": "def test_a():\n    open(join('xmltestdata', 'a.xml')), open('../schemas/one.json'), run(\"examples/run.py\")\n",
    }
    write_tree(tmp_path, files)
    source = open_source(str(tmp_path))
    gone = {"notes/plan.md", "docs/xmltestdata/b.xml"}
    assert files.keys() - source.files.keys() == gone


def test_packed_data_of_packages_and_tests_is_in_the_tree(tmp_path: Path) -> None:
    files = {
        "pyproject.toml": b"",
        "pkg/__init__.py": b"",
        "pkg/atlas.dat.gz": b"gz",
        "tests/test_a.py": b"def test_a(): pass",
        "tests/data/a.zip": b"PK",
        "tests/data/old-1.0.tar.xz": b"xz",
        "dist/a.zip": b"PK",
    }
    write_tree(tmp_path, files)
    source = open_source(str(tmp_path))
    assert files.keys() - source.files.keys() == {"tests/data/old-1.0.tar.xz", "dist/a.zip"}
    assert source.left_out == ("tests/data/old-1.0.tar.xz",)
