"""The chat templates of the unit tests are used here too, and the tiny recipe on tasks that are built once."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
sys.path.insert(0, str(TESTS / "unit" / "rollouts"))
RECIPE = TESTS.parent / "recipes" / "tiny-cpu" / "run.toml"


@pytest.fixture(scope="session")
def tiny_recipe(build_tiny: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recipe on tasks that are built once for all tests."""
    store = build_tiny(tmp_path_factory.mktemp("tasks") / "tasks")
    path, source = tmp_path_factory.mktemp("recipe") / "run.toml", 'source = ["project"]'
    assert RECIPE.read_text().count(source) == 1
    path.write_text(RECIPE.read_text().replace(source, f'store = "{store}"'))
    return path
