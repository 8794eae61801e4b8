"""Whoever runs a repository's code without a jail must have said so, and the result says it again."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from composer_replication.cli.terminal import columns
from composer_replication.sandbox import acceptance
from composer_replication.tasks.store import TaskStore

TINY = Path(__file__).parents[3] / "recipes" / "tiny-cpu" / "project"
PIN = "tinymath/numbers.py::clamp"
Answer = Callable[..., tuple[int, dict[str, Any]]]
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(autouse=True)
def nothing_accepted() -> Iterator[None]:
    acceptance.forget()
    yield
    acceptance.forget()


def verbs(tmp_path: Path) -> list[list[object]]:
    """The four verbs that run a repository's code."""
    return [
        ["build", TINY, "--out", tmp_path / "out"],
        ["import", tmp_path / "set.jsonl", "--format", "swebench", "--out", tmp_path / "out"],
        ["validate", tmp_path / "store"],
        ["leakscan", tmp_path / "store"],
    ]


@pytest.mark.parametrize("verb", range(4))
def test_no_jail_is_refused_before_anything_is_read(answer: Answer, tmp_path: Path, verb: int) -> None:
    """Neither store nor set is there: they are not looked for."""
    code, result = answer("tasks", *verbs(tmp_path)[verb], "--backend", "none")
    assert (code, result["error"]["code"]) == (2, "CR0340")
    assert "--i-accept-no-isolation" in result["error"]["fix"]
    assert list(tmp_path.iterdir()) == []


def test_what_no_jail_can_give_is_said(answer: Answer, tmp_path: Path) -> None:
    for words in (
        ("leakscan", tmp_path / "store"),
        ("build", TINY, "--out", tmp_path / "out", "--ray", "ray://127.0.0.1:9"),
    ):
        code, result = answer("tasks", *words, "--backend", "none", "--i-accept-no-isolation")
        assert (code, result["error"]["code"]) == (2, "CR0340")
    assert not (tmp_path / "out").exists()


@pytest.mark.long
def test_an_accepted_one_builds_and_validates_the_same_tasks(
    answer: Answer, build_tiny: Callable[..., Path], tmp_path: Path
) -> None:
    accepted = ("--backend", "none", "--i-accept-no-isolation")
    out = tmp_path / "out"
    code, built = answer("tasks", "build", TINY, "--out", out, "--symbol", PIN, "--visible-only", *accepted)
    assert (code, built["tasks"], built["accepted_no_isolation"]) == (0, 1, ["everything"])
    assert json.loads((out / "summary.json").read_text())["accepted_no_isolation"] == ["everything"]
    assert "accepted no isolation everything" in " ".join(columns(built).split())
    jailed = TaskStore.open(build_tiny(tmp_path / "jailed", [PIN]))
    assert TaskStore.open(out).fingerprint == jailed.fingerprint
    code, result = answer("tasks", "validate", out, "--repeat", 1, *accepted)
    assert (code, result["passed"], result["accepted_no_isolation"]) == (0, 1, ["everything"])
    assert "accepted no isolation everything" in " ".join(columns(result).split())
