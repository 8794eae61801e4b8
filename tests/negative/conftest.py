"""The command line as a person meets it, a small real project, a store and a recipe of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from composer_replication.cli.main import main

PINS = ("tinymath/numbers.py::clamp", "tinymath/text.py::initials")
RECIPE = """
[model]
name = "tiny-random"
[tasks]
store = "{store}"
[reward]
function = "composer_replication.rollouts.rewards:easy_token_share"
[trainer]
checkpoint_every = 1
cpu_threads = 1
[trl]
max_steps = 1
per_device_train_batch_size = 2
num_generations = 2
max_completion_length = 4
beta = 0.0
"""


class Answer(NamedTuple):
    """What one command printed, and its exit code."""

    exit_code: int
    out: str
    err: str

    @property
    def error(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.out)["error"]
        return found


Command = Callable[..., Answer]


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs ``composer-rl WORDS --quiet --json`` here; an error must be one sentence with its next step."""

    def run(*words: object, fails: bool = True) -> Answer:
        capsys.readouterr()
        exit_code = main([*map(str, words), "--quiet", "--json"])
        answer = Answer(exit_code, *capsys.readouterr())
        if fails:
            error = answer.error
            assert answer.err.count("\n") == 1, answer.err
            assert answer.err.startswith(f"{error['code']}: ")
            assert error["fix"], answer.err
            assert "\n" not in error["message"]
        return answer

    return run


@pytest.fixture(scope="session")
def store(build_tiny: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of two tasks, to be read only."""
    return build_tiny(tmp_path_factory.mktemp("store") / "tasks", PINS)


@pytest.fixture(scope="session")
def write_recipe(store: Path) -> Callable[[Path], Path]:
    """Writes a recipe that trains one small step on the store."""

    def write(path: Path) -> Path:
        path.write_text(RECIPE.format(store=store))
        return path

    return write


@pytest.fixture
def recipe(tmp_path: Path, write_recipe: Callable[[Path], Path]) -> Path:
    return write_recipe(tmp_path / "run.toml")
