"""The verb ``recipe new``: a recipe that really trains, and the errors of ``train``."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from composer_replication.cli import doctor_verb
from composer_replication.cli.main import main
from composer_replication.config import load_config

PINS = ["tinymath/numbers.py::clamp", "tinymath/text.py::initials", "tinymath/numbers.py::mean"]


@pytest.fixture(scope="module")
def built(build_tiny: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny(tmp_path_factory.mktemp("recipe") / "tasks", PINS)


@pytest.fixture
def store(built: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(built, tmp_path / "tasks"))


def call(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, Any]]:
    code = main([*words, "--json", "--quiet"])
    value: dict[str, Any] = json.loads(capsys.readouterr().out)
    return code, value


def new(capsys: pytest.CaptureFixture[str], store: Path, *words: str) -> tuple[int, dict[str, Any]]:
    return call(capsys, "recipe", "new", "--tasks", str(store), *words)


@pytest.mark.long
def test_a_new_recipe_loads_and_trains_two_steps(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run.toml"
    code, result = new(capsys, store, "--model", "tiny-random", "--out", str(out))
    assert code == 0, result
    assert result["recipe"] == str(out)
    assert result["fits"] is True
    assert result["seconds_per_step"] > 0
    assert (result["train_tasks"], result["heldout_tasks"]) == (2, 1)
    config = load_config(out)
    assert config.tasks.store == "tasks"
    assert config.model.dtype == "float32"
    assert config.guard is not None
    assert config.trl["max_steps"] == result["steps"] == 30

    moved = tmp_path / "elsewhere"  # store and recipe side by side can be moved
    moved.mkdir()
    shutil.move(store, moved)
    shutil.move(out, moved)
    few = ("trl.max_steps=2", "heldout.before_and_after_samples=0", "heldout.samples_per_task=1")
    settings = [word for pair in few for word in ("--set", pair)]
    code, summary = call(capsys, "train", str(moved / "run.toml"), "--out", str(tmp_path / "run"), *settings)
    assert code == 0, summary
    assert summary["global_step"] == 2
    assert summary["heldout_last"] is not None


@pytest.mark.long
def test_a_stored_split_is_used(store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _ = call(capsys, "tasks", "split", str(store), "--heldout-fraction", "0.6", "--seed", "1")
    assert code == 0
    split = json.loads((store / "split.json").read_text())
    out = tmp_path / "deeper" / "run.toml"
    code, result = new(capsys, store, "--model", "tiny-random", "--out", str(out))
    assert code == 0, result
    assert (result["train_tasks"], result["heldout_tasks"]) == (1, 2)
    config = load_config(out)
    assert config.heldout is not None
    assert config.heldout.fraction is None
    assert config.tasks.store == str(store)
    assert config.trl["per_device_train_batch_size"] == 8
    assert len(split["heldout"]) == 2

    split["fingerprint"] = "0" * 64
    (store / "split.json").write_text(json.dumps(split))
    code, result = new(capsys, store, "--model", "tiny-random", "--out", str(tmp_path / "b.toml"))
    assert (code, result["error"]["code"]) == (4, "CR0504")


@pytest.mark.parametrize("is_link", [False, True])
def test_an_existing_file_stays(
    is_link: bool,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "run.toml"
    if is_link:
        out.symlink_to(tmp_path / "nowhere")
    else:
        out.write_text("mine")
    code, result = new(capsys, tmp_path, "--model", "tiny-random", "--out", str(out))
    assert (code, result["error"]["code"]) == (2, "CR0231")
    assert out.is_symlink() or out.read_text() == "mine"
    assert not (tmp_path / "nowhere").exists()


def test_errors_are_those_of_train(store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "run.toml")
    (tmp_path / "file").write_text("")
    wrong: list[tuple[str, Path, list[str]]] = [
        ("CR0701", store, ["--model", str(tmp_path / "absent"), "--out", out]),
        ("CR0810", store, ["--model", "tiny-random", "--prompt-style", "chat", "--out", out]),
        ("CR0204", store, ["--model", "package:llm", "--out", out]),
        ("CR0204", store, ["--model", "tiny-random", "--seed", "-1", "--out", out]),
        ("CR0410", tmp_path, ["--model", "tiny-random", "--out", out]),
        ("CR0209", store, ["--model", "tiny-random", "--out", str(tmp_path / "file" / "run.toml")]),
    ]
    for expected, folder, words in wrong:
        code, result = new(capsys, folder, *words)
        assert result["error"]["code"] == expected, words
        assert code in (2, 4)
    assert not Path(out).exists()


@pytest.mark.long
def test_where_it_does_not_fit_that_is_said(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor_verb, "available_memory_bytes", lambda: 1)
    out = tmp_path / "run.toml"
    words = ("recipe", "new", "--tasks", str(store), "--model", "tiny-random", "--out", str(out))
    assert main(words) == 0
    streams = capsys.readouterr()
    assert "It does not fit" in streams.out
    assert f"Next: composer-rl train {out}" in streams.err
