"""A second copy of a module, metadata of any shape, and the first cause of a red baseline."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from hypothesis import given
from hypothesis import strategies as st
from packaging.requirements import Requirement

from composer_replication.tasks.intake.environment import Environment, UnusableRepository
from composer_replication.tasks.intake.licences import read_licence
from composer_replication.tasks.intake.requirements import explain, read_requirements, refuse_second_copy
from composer_replication.tasks.intake.sources import RepositorySource


def source(*paths: str, **metadata: bytes) -> RepositorySource:
    named = {name.replace("_", "."): data for name, data in metadata.items()}
    code = b"x = 1\nfrom .core import brought\n"
    return RepositorySource("x", "x", "1", "0" * 64, dict.fromkeys(paths, code), named)


def environment(root: Path, *paths: str) -> Environment:
    for path in paths:
        file = root / "lib" / "python3.11" / "site-packages" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("")
    return Environment("f", root / "python", root, (), ())


SECOND_COPIES = [
    ("thing.py", "other.py", ""),
    ("thing.py", "thing.py", "thing"),
    ("src/thing/__init__.py", "thing/__init__.py", "thing"),
    ("thing/__init__.py", "thing/other.py", "thing"),  # a regular package hides a namespace
    ("thing/part.py", "thing/__init__.py", "thing"),
    ("space/one.py", "space/two.py", ""),
    ("src/space/one/__init__.py", "space/two/__init__.py", ""),
    ("space/one.py", "space.two-1.0.dist-info/METADATA", ""),
    ("space/one.py", "space.two-1.0-nspkg.pth", ""),
    ("space/one.py", "space/one.cpython-311-x86_64-linux-gnu.so", "space.one"),
    ("space/one.py", "space/one.py", "space.one"),
    ("space/deep/one.py", "space/deep/one/__init__.py", "space.deep.one"),
    ("space/one/a.py", "space/one/__init__.py", "space.one"),
    ("tests/thing.py", "tests/thing.py", ""),  # nothing is deleted from tests
]


@pytest.mark.parametrize(("own", "installed", "clash"), SECOND_COPIES)
def test_a_second_copy(tmp_path: Path, own: str, installed: str, clash: str) -> None:
    found = environment(tmp_path, installed, "pytest/__init__.py", "x-1.dist-info/METADATA")
    words = f"runner-dependency: the environment holds a module {clash}, too"
    with pytest.raises(UnusableRepository, match=words) if clash else nullcontext():
        refuse_second_copy(source(own), found)


values = st.recursive(
    st.one_of(st.integers(-5, 5), st.booleans(), st.sampled_from(["", "x", ">=1", "a b", "x[y]>=1; extra == 'z'", "MIT"])),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["a", "python", "include-group", "version"]), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip


@st.composite
def tables(draw: Any) -> dict[str, Any]:
    """Tables whose keys are those that are read, with anything in them."""
    inner = st.dictionaries(
        st.sampled_from(
            ["name", "version", "license", "classifiers", "dependencies", "optional-dependencies", "group", "test", "poetry",
             "dev-dependencies", "deps"]
        ),
        values, max_size=4,
    )  # fmt: skip
    keys = st.sampled_from(["project", "tool", "dependency-groups", "build-system"])
    return draw(
        st.dictionaries(
            keys, inner | values | st.dictionaries(st.sampled_from(["poetry", "hatch"]), inner), max_size=4
        )
    )


@pytest.mark.long
@given(tables())
def test_metadata_of_any_shape_is_read(table: dict[str, Any]) -> None:
    found = source("x.py", pyproject_toml=tomli_w.dumps(table).encode())
    wanted = read_requirements(found)
    assert all(isinstance(one, Requirement) for one in wanted.required.values())
    assert isinstance(read_licence({}, found.metadata).note, str)


@pytest.mark.parametrize(
    ("said", "reason", "words"),
    [
        ("E   ImportError: cannot import name '_version' from 'pkg' (/x)", "generated-file", "pkg._version"),
        ("E   ModuleNotFoundError: No module named 'pkg._version'", "generated-file", "pkg._version"),
        ("E   ModuleNotFoundError: No module named 'numpy.linalg'", "missing-requirement", "module numpy"),
        ("E   ModuleNotFoundError: No module named 'wanted_one'", "missing-requirement", "wanted_one"),
        ("E   ModuleNotFoundError: No module named 'addressed'", "dependency-by-url", "addressed"),
        ("E   ImportError: cannot import name 'helper' from 'pkg.core'", "red-baseline", "helper"),
        ("cannot import name 'brought' from partially initialized module 'pkg'", "red-baseline", "brought"),
        ("E   AssertionError", "red-baseline", "AssertionError"),
        ("E   FileNotFoundError: '/x/tests/data/b.zip'", "red-baseline", "left out: tests/data/b.zip, a.py"),
    ],
)
def test_a_red_baseline_is_told_by_its_first_cause(said: str, reason: str, words: str) -> None:
    declared = b'[dependency-groups]\ntest = ["wanted-one"]\ndocs = ["addressed @ git+https://h/x"]\n'
    found = source("pkg/__init__.py", "pkg/core.py", pyproject_toml=declared)
    found = replace(found, left_out=("a.py", "tests/data/b.zip"))
    error = explain(
        UnusableRepository("red-baseline", f"0 of 3 tests are green; the first says: {said}"), found
    )
    assert (error.reason, words in error.detail) == (reason, True)


def test_a_setup_file_that_may_compute_requirements_is_named() -> None:
    found = source("pkg/__init__.py", setup_py=b"setup(install_requires=compute())")
    error = explain(UnusableRepository("red-baseline", "0 of 3 are green: No module named 'absent'"), found)
    assert "what a setup.py computes is not read" in error.detail
