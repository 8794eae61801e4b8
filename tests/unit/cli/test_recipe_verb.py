"""The verb ``recipe new``: a recipe that really trains, and the errors of ``train``."""

from __future__ import annotations

import argparse
import json
import shutil
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from composer_replication.cli import recipe_verb
from composer_replication.cli.main import main
from composer_replication.cli.recipe_verb import completion_tokens, recipe_text
from composer_replication.config import GuardSection, load_config, parse_config
from composer_replication.errors import MissingError
from composer_replication.trainer.run_setup import within_memory

Answer = Callable[..., tuple[int, dict[str, Any]]]
PINS = ["tinymath/numbers.py::clamp", "tinymath/text.py::initials", "tinymath/numbers.py::mean"]


@pytest.fixture(scope="module")
def built(build_tiny: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny(tmp_path_factory.mktemp("recipe") / "tasks", PINS)


@pytest.fixture
def store(built: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(built, tmp_path / "tasks"))


def new(answer: Answer, store: Path, *words: str) -> tuple[int, dict[str, Any]]:
    return answer("recipe", "new", "--tasks", str(store), *words)


@pytest.mark.long
def test_a_stored_split_is_used(store: Path, tmp_path: Path, answer: Answer) -> None:
    code, _ = answer("tasks", "split", str(store), "--heldout-fraction", "0.6", "--seed", "1")
    assert code == 0
    split = json.loads((store / "split.json").read_text())
    out = tmp_path / "deeper" / "run.toml"
    code, result = new(answer, store, "--model", "tiny-random", "--out", str(out))
    assert code == 0, result
    assert (result["train_tasks"], result["heldout_tasks"]) == (1, 2)
    config = load_config(out)
    assert config.heldout is not None
    assert config.heldout.fraction is None
    assert config.tasks.store == str(store)
    assert config.trl["per_device_train_batch_size"] == 8
    assert len(split["heldout"]) == 2


@pytest.mark.parametrize("is_link", [False, True])
def test_an_existing_file_stays(is_link: bool, tmp_path: Path, answer: Answer) -> None:
    out = tmp_path / "run.toml"
    if is_link:
        out.symlink_to(tmp_path / "nowhere")
    else:
        out.write_text("mine")
    code, result = new(answer, tmp_path, "--model", "tiny-random", "--out", str(out))
    assert (code, result["error"]["code"]) == (2, "CR0231")
    assert out.is_symlink() or out.read_text() == "mine"
    assert not (tmp_path / "nowhere").exists()


def test_errors_are_those_of_train(store: Path, tmp_path: Path, answer: Answer) -> None:
    out = str(tmp_path / "run.toml")
    (tmp_path / "file").write_text("")
    wrong: list[tuple[str, Path, list[str]]] = [
        ("CR0701", store, ["--model", str(tmp_path / "absent"), "--out", out]),
        ("CR0810", store, ["--model", "tiny-random", "--prompt-style", "chat", "--out", out]),
        ("CR0204", store, ["--model", "package:llm", "--out", out]),
        ("CR0204", store, ["--model", "tiny-random", "--seed", "-1", "--out", out]),
        ("CR0411", tmp_path, ["--model", "tiny-random", "--out", out]),
        ("CR0209", store, ["--model", "tiny-random", "--out", str(tmp_path / "file" / "run.toml")]),
    ]
    for expected, folder, words in wrong:
        code, result = new(answer, folder, *words)
        assert result["error"]["code"] == expected, words
        assert code in (2, 4)
    assert not Path(out).exists()


@pytest.mark.long
def test_where_it_does_not_fit_that_is_said(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recipe_verb, "available_memory_bytes", lambda: 1)
    out = tmp_path / "run.toml"
    words = ("recipe", "new", "--tasks", str(store), "--model", "tiny-random", "--out", str(out))
    assert main(words) == 0
    streams = capsys.readouterr()
    assert "It does not fit" in streams.err
    assert f"Next: composer-rl train {out}" in streams.err


def test_graphics_memory_that_runs_out_is_a_sentence() -> None:
    with pytest.raises(MissingError, match="CR0232"), within_memory("big"):
        raise torch.OutOfMemoryError("CUDA out of memory")
    with pytest.raises(RuntimeError, match="another"), within_memory("big"):
        raise RuntimeError("another")


# ---- the settings of a new recipe, by hand-computed numbers


def table_of(**changes: Any) -> dict[str, Any]:
    args = argparse.Namespace(tasks=Path("tasks"), model="tiny-random", sha256="", seed=0)
    args.prompt_style = "completion"
    sizes: dict[str, Any] = {"num_train": 10, "num_heldout": 4, "num_prompts": 2, "num_tokens": 24}
    return tomllib.loads(recipe_text(args, Path.cwd(), {**recipe_verb._UNTRIED, **sizes, **changes}))


@pytest.mark.parametrize(
    ("lengths", "as_chat", "tokens"),
    [
        ([10] * 9 + [100], False, 24),  # nearest rank 9 of 10 is 10: 12.5 + 8 = 20.5, up to 24
        ([10] * 8 + [100] * 2, False, 136),  # now it is 100: 125 + 8 = 133, up to 136
        ([32], False, 48),  # 40 + 8 = 48 exactly
        ([32], True, 160),  # 2 x 48 + 64
        ([1], False, 16),  # the floor
        ([5000], False, 1024),  # the ceiling
        ([5000], True, 1024),
    ],
)
def test_room_for_an_answer(lengths: list[int], as_chat: bool, tokens: int) -> None:
    assert completion_tokens(lengths, as_chat=as_chat) == tokens
    assert completion_tokens(lengths[::-1], as_chat=as_chat) == tokens


def test_what_is_written_is_a_recipe() -> None:
    config = parse_config(table_of(prefix_sharing="true"), where="here")
    assert (config.tasks.store, config.trainer.prefix_sharing) == ("tasks", True)
    assert (config.trl["per_device_train_batch_size"], config.trl["max_steps"]) == (16, 40)
    assert config.heldout is not None
    assert (config.heldout.fraction, config.heldout.sample_size) == (0.3, 0)
    assert config.heldout.before_and_after_samples == 4
    assert config.guard == GuardSection()
    assert config.model.lora is not None


def test_many_tasks_are_sampled_and_not_measured_twice() -> None:
    heldout = parse_config(table_of(num_train=100, num_heldout=17), where="here").heldout
    assert heldout is not None
    assert (heldout.sample_size, heldout.before_and_after_samples) == (16, 0)
