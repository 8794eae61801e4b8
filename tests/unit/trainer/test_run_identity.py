"""A checkpoint of another run that lies in this run's folder is refused by name, before anything is loaded."""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from composer_replication.cli import eval_verb, train_verb, training_run
from composer_replication.cli.assembly import recipe_sha256
from composer_replication.config import load_config, parse_config
from composer_replication.errors import InputError
from composer_replication.run_folder import RunFolder, read_json
from composer_replication.trainer import model_loading
from composer_replication.trainer.checkpoints import STATE_NAME, refuse_foreign_checkpoints, write_manifest

MakeTrainer = Callable[..., Any]
RECIPE = Path(__file__).parents[3] / "recipes" / "tiny-cpu" / "run.toml"
SAVING: dict[str, Any] = {"save_strategy": "steps", "save_steps": 1}


def saved(make_trainer: MakeTrainer, identity: str, **settings: Any) -> tuple[Any, Path]:
    trainer = make_trainer(max_steps=1, run_identity=identity, **SAVING, **settings)
    trainer.train()
    return trainer, Path(trainer.args.output_dir) / "checkpoint-1"


def test_only_the_checkpoint_of_the_same_run_is_gone_on_from(make_trainer: MakeTrainer) -> None:
    _, checkpoint = saved(make_trainer, "first")
    assert read_json(checkpoint / STATE_NAME)["run"] == {"recipe": "first"}
    same = make_trainer(max_steps=2, run_identity="first", **SAVING)
    same.train(resume_from_checkpoint=str(checkpoint))
    assert same.state.global_step == 2
    other = make_trainer(max_steps=2, run_identity="second", **SAVING)
    with pytest.raises(InputError) as caught:
        other.train(resume_from_checkpoint=str(checkpoint))
    assert (caught.value.code, caught.value.where) == ("CR0884", str(checkpoint))
    assert (
        caught.value.message == "checkpoint-1 is a checkpoint of another run: its recipe is not this run's."
    )


class Reached(Exception):
    """The run would go on with its tasks."""


def checkpoint_of(folder: Path, step: int, recipe: str) -> Path:
    checkpoint = folder / f"checkpoint-{step}"
    checkpoint.mkdir(parents=True)
    state = {"schema_version": 1, "run": {"recipe": recipe}}
    (checkpoint / STATE_NAME).write_text(json.dumps(state))
    write_manifest(checkpoint)
    return checkpoint


def test_all_whole_checkpoints_of_a_folder_are_looked_at(tmp_path: Path) -> None:
    refuse_foreign_checkpoints(tmp_path / "missing", "mine")
    checkpoint_of(tmp_path, 3, "mine")
    foreign = checkpoint_of(tmp_path, 9, "theirs")
    with pytest.raises(InputError, match="checkpoint-9 is a checkpoint of another run"):
        refuse_foreign_checkpoints(tmp_path, "mine")
    (foreign / "MANIFEST.json").unlink()  # half-written ones are never chosen
    refuse_foreign_checkpoints(tmp_path, "mine")


def test_train_refuses_it_before_tasks_and_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def reach(*_: Any) -> NoReturn:
        raise Reached

    monkeypatch.setattr(train_verb, "check_recipe", lambda *_: SimpleNamespace())
    monkeypatch.setattr(train_verb, "training_packages", lambda *_, **__: nullcontext())
    monkeypatch.setattr(train_verb, "check_training", lambda *_: (None, None, None))
    monkeypatch.setattr(training_run.assembly, "open_tasks", reach)
    folder, config = RunFolder(tmp_path / "run"), load_config(RECIPE)
    train_verb._keep_recipe(config, folder)

    def resume() -> None:
        with pytest.raises(Reached):
            train_verb.run_recipe(RECIPE, {}, folder.root, resume=True, quiet=True)

    checkpoint_of(folder.checkpoints, 2, recipe_sha256(config))
    resume()
    foreign = checkpoint_of(folder.checkpoints, 4, recipe_sha256(load_config(RECIPE, {"seed": 99})))
    with pytest.raises(InputError) as caught:
        train_verb.run_recipe(RECIPE, {}, folder.root, resume=True, quiet=True)
    assert (caught.value.code, caught.value.where) == ("CR0884", str(foreign))
    shutil.rmtree(foreign)
    resume()


def test_eval_of_a_run_refuses_it_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_loading, "load_checkpoint", lambda *_: ("model", "tokenizer"))
    folder, asked = (
        RunFolder(tmp_path / "run"),
        argparse.Namespace(model=str(tmp_path / "run"), endpoint=None, recipe=None, update_difficulty=False),
    )
    train_verb._keep_recipe(load_config(RECIPE), folder)
    config = eval_verb._recipe(asked)
    checkpoint_of(folder.checkpoints, 2, recipe_sha256(load_config(RECIPE)))
    assert eval_verb._open_model(asked, config) == ("model", "tokenizer")
    checkpoint_of(folder.checkpoints, 4, "of another run")
    with pytest.raises(InputError, match="checkpoint-4 is a checkpoint of another run"):
        eval_verb._open_model(asked, config)


def test_another_cluster_is_the_same_run() -> None:
    table = {"model": {"name": "tiny-random"}, "tasks": {"store": "tasks"}}
    plain = recipe_sha256(parse_config(table, where="here"))
    assert recipe_sha256(parse_config({**table, "ray": {"address": "auto"}}, where="here")) == plain
    assert recipe_sha256(parse_config({**table, "seed": 1}, where="here")) != plain


TORCHFT = {"transport": "torchft://node:2", "num_replicas": 2}
HELD = {"sample_size": 4, "has_sentinel": True}
OLDER: dict[str, dict[str, Any]] = {
    "ff282516": {"guard": {}, "heldout": HELD, "evidence": {"planned_evaluations": 9, "tolerated_gap": 0.1}},
    "aded4a53": {"replicas": TORCHFT},
}
"""By the beginning of its identity then: what had keys that it needed, and that have left."""


@pytest.mark.parametrize("began", OLDER)
def test_an_older_run_that_needed_keys_which_have_left_goes_on(began: str) -> None:
    table = {"model": {"name": "tiny-random"}, "tasks": {"store": "tasks"}, **OLDER[began]}
    config = parse_config(table, where="here")
    assert recipe_sha256(config).startswith(began)
    assert config.replicas is None or config.replicas.lighthouse == "node:2"
