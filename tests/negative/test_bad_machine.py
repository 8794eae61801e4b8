"""A damaged cache and a poor machine through the command line: packages, sandbox, disk, rights, readers."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from finished import finished
from small_trees import flip_a_byte

from composer_replication.cli.machine_troubles import how_to_go_on, machine_error
from composer_replication.errors import InputError
from composer_replication.tasks.intake.cache import cache_folder
from composer_replication.tasks.intake.environment import resolve
from composer_replication.tasks.store import TaskStore

Command = Callable[..., Any]
TINY = Path(__file__).parents[2] / "recipes" / "tiny-cpu" / "project"


# --- the cache -------------------------------------------------------------------------------


@pytest.fixture
def private_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of its own that shares wheels and environments, which these tests do not change."""
    shared, cache = cache_folder(), tmp_path / "cache"
    resolve([], "the tests")  # the shared one has them now
    cache.mkdir()
    for name in ("wheels", "environments"):
        (shared / name).mkdir(exist_ok=True)
        (cache / name).symlink_to(shared / name)
    monkeypatch.setenv("COMPOSER_RL_CACHE", str(cache))
    return cache


@pytest.mark.long
def test_a_damaged_store_in_the_cache_is_said_and_pruned(
    command: Command, private_cache: Path, recipe: Path, store: Path, tmp_path: Path
) -> None:
    pins = json.dumps(["tinymath/text.py::initials"])
    table = f'source = ["{TINY}"]\nsymbols = {{ "{TINY}" = {pins} }}'
    text = recipe.read_text().replace(f'store = "{store}"', table)
    recipe.write_text(text + "[heldout]\n")  # one task cannot be parted: the run ends after the build

    def run() -> dict[str, Any]:
        answer = command("train", recipe, "--out", tmp_path / "run", "--resume")
        error: dict[str, Any] = answer.error
        return error

    def build() -> Path:
        assert run()["code"] in ("CR0503", "CR0604")
        (folder,) = (private_cache / "task-stores").iterdir()
        TaskStore.open(folder).verify()
        return folder

    folder = build()
    fingerprint = TaskStore.open(folder).fingerprint
    (folder / "journal.jsonl").write_text('{"an": "older format"}\nno json\n{}\n')
    assert TaskStore.open(build()).fingerprint == fingerprint
    flip_a_byte(max((folder / "objects").rglob("*"), key=lambda path: path.stat().st_size))
    error = run()
    assert error["code"] == "CR0411"
    assert "composer-rl cache prune" in error["fix"]
    command("cache", "prune", fails=False)
    assert TaskStore.open(build()).fingerprint == fingerprint


# --- the machine -----------------------------------------------------------------------------


def without(module: str, *words: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """The command in an interpreter that cannot import a module."""
    code = f"import sys; sys.modules[{module!r}] = None\nfrom composer_replication.cli.main import main\nsys.exit(main())"
    return finished(
        [sys.executable, "-c", code, *map(str, words), "--json", "--quiet"],
        timeout=500,
        env={**os.environ, **environment},
    )


@pytest.mark.parametrize(
    "module", ["torch", *(pytest.param(name, marks=pytest.mark.long) for name in ("trl", "datasets"))]
)
def test_training_without_its_packages(recipe: Path, tmp_path: Path, module: str) -> None:
    done = without(module, "train", recipe, "--out", tmp_path / "run")
    error = json.loads(done.stdout)["error"]
    assert (done.returncode, error["code"]) == (3, "CR0101"), done.stderr
    assert error["message"] == f"training needs {module}, which is not installed."
    assert error["fix"] == "pip install 'composer-replication[train]'"
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_a_recipe_is_refused_before_packages_are_missed(recipe: Path, tmp_path: Path) -> None:
    done = without("torch", "export-verl", recipe, "--out", tmp_path / "verl")
    error = json.loads(done.stdout)["error"]
    assert (done.returncode, error["code"]) == (2, "CR0951"), done.stderr


def test_no_sandbox_at_all(recipe: Path, tmp_path: Path) -> None:
    for words in (("tasks", "build", TINY), ("train", recipe)):
        done = without("sandlock", *words, "--out", tmp_path / "out", PATH=str(tmp_path))
        error = json.loads(done.stdout)["error"]
        assert (done.returncode, error["code"]) == (3, "CR0301"), done.stderr
        assert "bubblewrap" in error["fix"]
        assert "sandlock" in error["fix"]
        assert not (tmp_path / "out").exists()


def test_troubles_of_the_machine_are_told_from_bugs() -> None:
    full = OSError(errno.ENOSPC, "No space left on device", "/run/model")
    found = machine_error(full, ["train", "r.toml", "--out", "run"])
    assert found is not None
    assert (found.code, found.exit_code, found.where) == ("CR0104", 3, "/run/model")
    assert "composer-rl train r.toml --out run --resume" in found.fix
    library = RuntimeError("I/O error: No space left on device (os error 28)")
    taken_for_another = InputError("CR0701", "the model cannot be loaded.")
    taken_for_another.__cause__ = library
    for error in (library, taken_for_another):
        found = machine_error(error, [])
        assert found is not None
        assert found.code == "CR0104"
    found = machine_error(PermissionError(errno.EACCES, "Permission denied", "/cache"), [])
    assert found is not None
    assert (found.code, found.exit_code, found.where) == ("CR0209", 3, "/cache")
    found = machine_error(
        RuntimeError("gloo: Connection closed by peer [10.0.0.2]:28046"), ["train", "r.toml"]
    )
    assert found is not None
    assert (found.code, found.exit_code) == ("CR0106", 3)
    assert machine_error(FileNotFoundError(errno.ENOENT, "No such file", "/x"), []) is None
    assert machine_error(InputError("CR0401", "no space in this line."), []) is None


def test_how_to_go_on_depends_on_the_verb() -> None:
    assert how_to_go_on(["train", "r.toml"]).startswith("composer-rl train r.toml --resume goes on")
    assert how_to_go_on(["train", "my r.toml"]).startswith("composer-rl train 'my r.toml' --resume goes on")
    assert how_to_go_on(["train", "r.toml", "--resume"]).count("--resume") == 1
    for words in (["tasks", "build", "x", "--out", "y"], ["quickstart", "--quiet"]):
        assert how_to_go_on(words) == "the same command goes on where it stopped."
    assert how_to_go_on(["doctor"]) == "type the same command again."


def test_a_cache_that_may_not_be_written(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COMPOSER_RL_CACHE", "/sys/composer-rl")  # not even root makes folders there
    answer = command("tasks", "build", TINY, "--out", tmp_path / "out")
    assert (answer.exit_code, answer.error["code"]) == (3, "CR0209")
    assert answer.error["where"] == "/sys/composer-rl"
