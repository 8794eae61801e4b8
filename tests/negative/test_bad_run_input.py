"""Bad models, settings, rewards and checkpoints through ``train`` and ``eval``."""

from __future__ import annotations

import json
import resource
import shutil
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from small_trees import flip_a_byte

from composer_replication.run_folder import RunFolder, write_json

Command = Callable[..., Any]


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of tiny models, each with one thing wrong; to ``good`` only a chat template is missing."""
    from transformers import BertConfig, BertLMHeadModel, T5Config

    from composer_replication.trainer.tiny_models import make_tiny_model

    root = tmp_path_factory.mktemp("models")
    model, tokenizer = make_tiny_model(0)
    for name in "good no-weights no-tokenizer other-tokenizer torn-weights bert t5 empty".split():
        (root / name).mkdir()
        if name in ("good", "no-tokenizer", "torn-weights"):
            model.save_pretrained(root / name)
        if name not in ("no-tokenizer", "empty"):
            tokenizer.save_pretrained(root / name)
    model.config.save_pretrained(root / "no-weights")
    model.resize_token_embeddings(100)
    model.save_pretrained(root / "other-tokenizer")
    weights = root / "torn-weights" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    BertLMHeadModel(BertConfig(vocab_size=258, **sizes)).save_pretrained(root / "bert")
    T5Config(d_model=16, num_layers=1, num_heads=2, d_ff=16).save_pretrained(root / "t5")
    return root


@pytest.mark.parametrize(
    ("name", "code", "words"),
    [
        ("absent", "CR0701", "there is no folder"),
        ("empty", "CR0701", "the model cannot be loaded"),
        ("no-weights", "CR0701", "the weights of the model cannot be loaded"),
        ("torn-weights", "CR0701", "the weights of the model cannot be loaded"),
        ("no-tokenizer", "CR0701", "the model's tokenizer cannot be loaded"),
        ("other-tokenizer", "CR0701", "it has 258 tokens and the model knows 100"),
        ("bert", "CR0701", "a bert model is not a causal language model"),
        ("t5", "CR0701", "a t5 model is not a causal language model"),
        ("good", "CR0810", "no chat template"),
    ],
)
def test_a_model_that_cannot_be_used(
    command: Command, store: Path, models: Path, tmp_path: Path, name: str, code: str, words: str
) -> None:
    chat = tmp_path / "chat.toml"
    chat.write_text('[model]\nname = "-"\n[tasks]\nstore = "-"\n[rollouts]\nprompt_style = "chat"\n')
    answer = command("eval", models / name, "--tasks", store, "--recipe", chat)
    assert (answer.exit_code, answer.error["code"]) == (4, code)
    assert words in answer.error["message"]
    assert name in answer.error["where"]


@pytest.mark.parametrize(
    ("settings", "where", "words"),
    [
        (("trl.max_stepz=1",), "trl.max_stepz", "the nearest known key is trl.max_steps"),
        (("trl.output_dir=x",), "trl.output_dir", "set by the run itself"),
        (("trl.max_steps=two",), "trl.max_steps", "'two': it must be a valid integer"),
        (("trl.num_generations=1",), "[trl]", "at least 2"),
        (("trl.per_device_train_batch_size=3",), "[trl]", "must be divisible by num_generations"),
        (("trl.optim=foo",), "[trl]", "foo is not a valid OptimizerNames"),
    ],
)
def test_values_that_trl_refuses_begin_no_run(
    command: Command, recipe: Path, settings: tuple[str, ...], where: str, words: str
) -> None:
    flags = [part for setting in settings for part in ("--set", setting)]
    answer = command("train", recipe, "--out", recipe.parent / "run", *flags)
    assert (answer.exit_code, answer.error["code"], answer.error["where"]) == (2, "CR0211", where)
    assert words in answer.error["message"]
    assert not (recipe.parent / "run").exists()


@pytest.mark.long
def test_values_that_only_the_trainer_can_refuse(command: Command, recipe: Path) -> None:
    run = recipe.parent / "run"
    for setting, code in (
        ("trl.reward_weights=[1.0, 2.0]", "CR0211"),
        ("trl.learning_rate=-1.0", "CR0211"),
        ("trl.per_device_train_batch_size=64", "CR0760"),
    ):
        answer = command("train", recipe, "--out", run, "--set", setting, "--resume")
        assert (answer.exit_code, answer.error["code"]) == (2, code), answer.err
    # Nothing was trained yet, so the corrected recipe takes the folder over.
    write_json(run / "split.json", {"fingerprint": "of another recipe"})
    answer = command("train", recipe, "--out", run, "--resume", "--set", "heldout.fraction=0.5", fails=False)
    assert (answer.exit_code, json.loads(answer.out)["global_step"]) == (0, 1)
    assert answer.err == ""


REWARDS = """
def raises(text, answer, score):
    return 1 / 0
def is_text(text, answer, score):
    return "0.5"
def fills_the_disk(text, answer, score):
    import resource
    resource.setrlimit(resource.RLIMIT_FSIZE, (150_000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    return 0.5
"""


@pytest.fixture
def rewards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A module of reward functions that a person might write."""
    (tmp_path / "my_rewards.py").write_text(REWARDS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_rewards", raising=False)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield tmp_path / "my_rewards.py"
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize(
    ("function", "words", "where"),
    [
        ("raises", "raised ZeroDivisionError: division by zero", "my_rewards.py:3"),
        ("is_text", "returned '0.5', which is not a finite number", "reward.function"),
    ],
)
def test_a_reward_that_fails_is_the_users(
    command: Command, recipe: Path, rewards: Path, function: str, words: str, where: str
) -> None:
    setting = f"reward.function=my_rewards:{function}"
    answer = command("train", recipe, "--out", recipe.parent / "run", "--set", setting)
    assert (answer.exit_code, answer.error["code"]) == (2, "CR0210")
    assert answer.error["message"] == f"the reward function my_rewards:{function} {words}."
    assert answer.error["where"].endswith(where)


@pytest.mark.long
def test_a_full_disk_in_training_is_resumable(command: Command, recipe: Path, rewards: Path) -> None:
    run = recipe.parent / "run"
    setting = ("--set", "reward.function=my_rewards:fills_the_disk")
    answer = command("train", recipe, "--out", run, *setting)
    assert (answer.exit_code, answer.error["code"]) == (3, "CR0104")
    assert "--resume" in answer.error["fix"]
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    rewards.write_text(REWARDS.replace("150_000", str(2**40)))
    sys.modules.pop("my_rewards")
    answer = command("train", recipe, "--out", run, *setting, "--resume", fails=False)
    assert (answer.exit_code, json.loads(answer.out)["global_step"]) == (0, 1), answer.err


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, write_recipe: Callable[[Path], Path]) -> Path:
    """A run of two steps with two checkpoints; beside it its recipe."""
    from composer_replication.cli.main import main

    root = tmp_path_factory.mktemp("finished")
    text = write_recipe(root / "run.toml").read_text()
    (root / "run.toml").write_text(text.replace("max_steps = 1", "max_steps = 2"))
    assert main(["train", str(root / "run.toml"), "--out", str(root / "run"), "--quiet"]) == 0
    return root


@pytest.fixture
def stopped(finished: Path, tmp_path: Path) -> Path:
    """A copy of that run as if it had been killed before its end."""
    shutil.copytree(finished, tmp_path / "copy")
    (tmp_path / "copy" / "run" / "summary.json").unlink()
    return tmp_path / "copy"


def resume(command: Command, root: Path, *more: str, fails: bool = True) -> Any:
    return command("train", root / "run.toml", "--out", root / "run", "--resume", *more, fails=fails)


def test_a_finished_run_is_neither_repeated_nor_overwritten(command: Command, finished: Path) -> None:
    answer = command("train", finished / "run.toml", "--out", finished / "run")
    assert (answer.exit_code, answer.error["code"]) == (2, "CR0231")
    assert "--resume" in answer.error["fix"]
    answer = resume(command, finished, fails=False)
    assert (answer.exit_code, json.loads(answer.out)["global_step"]) == (0, 2)


def test_a_run_is_not_resumed_with_another_recipe(command: Command, stopped: Path) -> None:
    answer = resume(command, stopped, "--set", "trl.learning_rate=0.5")
    assert (answer.exit_code, answer.error["code"]) == (2, "CR0208")
    assert "trl.learning_rate is 0.5 now and was not set" in answer.error["message"]
    (stopped / "run" / "run.toml").write_text("[torn")
    answer = resume(command, stopped)
    assert (answer.exit_code, answer.error["code"]) == (2, "CR0201")


def test_a_damaged_checkpoint_is_not_trained_on(command: Command, stopped: Path) -> None:
    weights = stopped / "run" / "checkpoints" / "checkpoint-2" / "model.safetensors"
    flip_a_byte(weights)
    for answer in (resume(command, stopped), command("eval", stopped / "run", "--tasks", store_of(stopped))):
        assert (answer.exit_code, answer.error["code"]) == (4, "CR0706")
        assert answer.error["where"] == str(weights)
        assert str(weights.parent) in answer.error["fix"]


def store_of(root: Path) -> str:
    line = next(row for row in (root / "run.toml").read_text().splitlines() if row.startswith("store"))
    return line.split('"')[1]


# --- a cluster that cannot be joined ---------------------------------------------------


@pytest.fixture
def nobody() -> str:
    """An address at which nothing answers."""
    pytest.importorskip("ray", reason="the extra ray is not installed")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def test_training_on_a_cluster_that_is_not_there_begins_nothing(
    command: Command, recipe: Path, tmp_path: Path, nobody: str
) -> None:
    words = ("train", recipe, "--out", tmp_path / "run")
    for more in (("--ray", nobody), ("--set", f"ray.address={nobody}")):
        answer = command(*words, *more)
        assert (answer.exit_code, answer.error["code"]) == (3, "CR0490")
        assert "the Ray cluster cannot be joined" in answer.error["message"]
        assert not RunFolder(tmp_path / "run").is_occupied
    answer = command(*words, "--ray", "the cluster")
    assert (answer.exit_code, answer.error["code"]) == (2, "CR0490")
