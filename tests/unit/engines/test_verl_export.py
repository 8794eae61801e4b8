"""What is handed to verl, read back from disk; verl itself runs it in tests/interop/verl."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pyarrow.parquet as pq
import pytest

from composer_replication.cli.main import main
from composer_replication.cli.verl_parts import open_agent_loop, open_guard
from composer_replication.config import TasksSection, dump_config, load_config
from composer_replication.engines import verl_plugin
from composer_replication.engines.verl_export import FOLDER_VARIABLE
from composer_replication.errors import MissingError, UsageError

RECIPE = Path(__file__).parents[3] / "recipes" / "tiny-tools" / "run.toml"
SMALL = ("--set", "agent.max_context_tokens=2048", "--set", "agent.max_new_tokens=16")


def test_a_recipe_becomes_a_folder_for_verl(
    build_tiny: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pins = [f"tinymath/numbers.py::{name}" for name in ("absolute", "clamp", "sign", "square")]
    tables = load_config(RECIPE).model_copy(
        update={"tasks": TasksSection(store=str(build_tiny(tmp_path / "tasks", pins)))}
    )
    recipe, out = tmp_path / "run.toml", tmp_path / "verl"
    recipe.write_text(dump_config(tables))
    assert main(["--json", "export-verl", str(recipe), "--out", str(out), *SMALL]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["train"], told["heldout"], told["not_carried"]) == (3, 1, [])
    for side, number, source in (("train", 3, "composer-train"), ("heldout", 1, "composer-heldout")):
        rows = pq.read_table(out / f"{side}.parquet").to_pylist()
        assert [row["data_source"] for row in rows] == [source] * number
        assert all(row["extra_info"]["is_heldout"] == (side == "heldout") for row in rows)
        assert all(row["agent_name"] == "composer" and row["prompt"][0]["role"] == "user" for row in rows)
    script = (out / "run.sh").read_text()
    words = shlex.split(script.replace("\\\n", " "))
    assert "algorithm.adv_estimator=composer" in words
    assert "actor_rollout_ref.actor.policy_loss.loss_mode=composer" in words
    assert f"actor_rollout_ref.model.path={out}/model" in words
    assert (out / "model" / "config.json").is_file()
    limits = dict(word.split("=") for word in words if word.startswith("data.max_"))
    assert int(limits["data.max_prompt_length"]) + int(limits["data.max_response_length"]) == 2048
    assert main(["export-verl", str(recipe), "--out", str(out)]) == 2
    assert "CR0231" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("recipe", "setting", "said"),
    [
        ("tiny-cpu", "seed=1", "no [agent] table"),
        ("tiny-tools", "agent.summary_tokens=1000", "goes on in new conversations"),
    ],
)
def test_what_verl_cannot_carry_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], recipe: str, setting: str, said: str
) -> None:
    path = RECIPE.parents[1] / recipe / "run.toml"
    assert main(["export-verl", str(path), "--out", str(tmp_path / "x"), "--set", setting]) == 2
    error = capsys.readouterr().err
    assert "CR0951" in error and said in error


def test_verl_without_our_plugin_is_told_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    algorithms = ModuleType("core_algos")
    algorithms.ADV_ESTIMATOR_REGISTRY, algorithms.POLICY_LOSS_REGISTRY = {}, {}  # type: ignore[attr-defined]
    monkeypatch.setattr(verl_plugin.importlib, "import_module", lambda name: algorithms)
    with pytest.raises(MissingError, match=r"CR0951.*verl has not loaded our plug-in"):
        open_agent_loop(SimpleNamespace(config=None), None, None)


def test_a_job_that_was_not_started_by_run_sh_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COMPOSER_RL_VERL", raising=False)
    with pytest.raises(UsageError, match=r"CR0951.*COMPOSER_RL_VERL"):
        open_guard()


def test_the_entry_point_alone_registers(tmp_path: Path) -> None:
    """The agent loop imports ``verl_parts`` by itself: if that registered, it would never find us missing."""
    program = (
        "import sys, importlib\n"
        "for name in ('verl_parts', 'verl_entry'):\n"
        "    importlib.import_module(f'composer_replication.cli.{name}')\n"
        "    print(any(type(each).__name__ == '_Waiting' for each in sys.meta_path))"
    )
    environment = {**os.environ, FOLDER_VARIABLE: str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["False", "True"]
