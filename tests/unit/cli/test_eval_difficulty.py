"""``eval --update-difficulty`` to its end: what a person reads afterwards with ``tasks show``."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from composer_replication.cli.main import main
from composer_replication.tasks.store import TaskStore

PINS = ("tinymath/numbers.py::clamp", "tinymath/text.py::initials")


@pytest.mark.long
def test_measured_pass_rates_are_kept_with_the_tasks(
    build_tiny: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = build_tiny(tmp_path / "tasks", PINS)

    def run(*words: str) -> Any:
        assert main([*words, "--quiet", "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    def measure() -> Any:
        words = ("eval", "tiny-random", "--tasks", str(folder), "--samples", "2", "--max-new-tokens", "4")
        return run(*words, "--update-difficulty")

    before = TaskStore.open(folder).fingerprint
    measure()
    first = measure()  # the same seed replaces
    assert list((folder / "difficulty").iterdir()) == [Path(first["difficulty"])]
    for row in first["by_task"]:
        (measured,) = run("tasks", "show", str(folder), row["task_id"])["tasks"][0]["difficulty"]
        assert (measured["policy"]["name"], measured["num_samples"]) == ("tiny-random", 2)
        assert row["visible"] == measured["num_passed"] == 0  # four random letters are no function
        assert measured["num_hidden_passed"] == row["hidden"]
        assert measured["ci95"] == pytest.approx([0.0, 0.657620], abs=1e-5)  # Wilson, 0 of 2, by hand
    assert TaskStore.open(folder).fingerprint == before
