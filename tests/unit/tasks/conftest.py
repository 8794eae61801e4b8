"""A small project on disk, the environment of the test runner, and a store of a few tasks."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from small_trees import contents, write_tree

from composer_replication.tasks.intake.environment import Environment, open_environment, resolve
from composer_replication.tasks.store import TaskStore

TINY = Path(__file__).parents[3] / "recipes" / "tiny-cpu" / "project"
TINY_PINS = (
    "tinymath/numbers.py::clamp",
    "tinymath/numbers.py::sign",
    "tinymath/text.py::initials",
    "tinymath/vector.py::Vector.length",
)
PYPROJECT = '[project]\nname = "planted"\nversion = "1.0"\n'

MakeProject = Callable[[Mapping[str, str]], Path]
BuildTiny = Callable[[Path, Sequence[str]], Path]


@pytest.fixture(scope="session")
def tiny_project() -> Path:
    return TINY


@pytest.fixture(scope="session")
def environment() -> Environment:
    return open_environment(resolve([], "the tests"))


@pytest.fixture(scope="session")
def tiny_store(build_tiny: BuildTiny, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TaskStore]:
    """A store that tests only read: in random order a change would reach others."""
    folder = build_tiny(tmp_path_factory.mktemp("store") / "tasks", TINY_PINS)
    before = contents(folder)
    yield TaskStore.open(folder)
    assert contents(folder) == before, "a test changed the store that all tests read"


@pytest.fixture
def make_project(tmp_path: Path) -> MakeProject:
    """Write a project; ``pyproject.toml`` comes along."""

    def make(files: Mapping[str, str]) -> Path:
        return write_tree(tmp_path / "planted", {"pyproject.toml": PYPROJECT, **files})

    return make


@pytest.fixture
def own_environment(environment: Environment, tmp_path: Path) -> Environment:
    """A copy of the environment that a test may plant into."""
    root = tmp_path / "environment"
    shutil.copytree(environment.root, root, symlinks=True)
    return replace(
        environment, root=root, python=root / "bin" / "python", read_only=(root, *environment.read_only[1:])
    )
