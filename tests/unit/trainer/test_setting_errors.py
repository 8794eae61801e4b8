"""What settings alone are refused for, before a model is loaded, and what the training libraries say."""

from __future__ import annotations

import inspect
import logging
import re
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
from trl.trainer import grpo_trainer

from composer_replication.cli import training_run
from composer_replication.cli.assembly import check_training
from composer_replication.config import RunConfig, load_config
from composer_replication.errors import UsageError
from composer_replication.rollouts.rewards import visible_tests_pass
from composer_replication.run_folder import RunFolder
from composer_replication.trainer import preset_settings
from composer_replication.trainer.preset_settings import calm_libraries, refusals, refuse_split_groups

RECIPE = Path(__file__).parents[3] / "recipes" / "tiny-cpu" / "run.toml"


def refused(tmp_path: Path, overrides: dict[str, Any]) -> UsageError:
    with pytest.raises(UsageError) as caught:
        check_training(load_config(RECIPE, overrides), RunFolder(tmp_path))
    assert caught.value.fix and "\n" not in str(caught.value)
    return caught.value


@pytest.mark.parametrize("masks", [{"trl.mask_truncated_completions": True}, {"trainer.preset": "dapo"}])
def test_a_stop_rule_and_masked_truncation(tmp_path: Path, masks: dict[str, Any]) -> None:
    table = {"trl.scale_rewards": "group", "trl.loss_type": "dapo", **masks}
    assert refused(tmp_path, {"trainer.prefix_sharing": True, **table}).code == "CR0760"
    check_training(load_config(RECIPE, {"trainer.prefix_sharing": False, **table}), RunFolder(tmp_path))
    chat = {"trainer.prefix_sharing": True, "rollouts.prompt_style": "chat", **table}
    check_training(load_config(RECIPE, chat), RunFolder(tmp_path))  # no stop rule there


def test_groups_that_lie_across_processes() -> None:
    of_three, of_four = (
        SimpleNamespace(per_device_train_batch_size=6, steps_per_generation=1, num_generations=number)
        for number in (3, 4)
    )
    refuse_split_groups(of_four, num_processes=1)
    refuse_split_groups(of_three, num_processes=2)
    with pytest.raises(UsageError, match=r"CR0760.*6 rows are not a multiple of 4"):
        refuse_split_groups(of_four, num_processes=2)


def test_what_is_copied_of_trl_is_what_trl_has() -> None:
    """Its defaults of sampling, and the words that its loss compares ``loss_type`` and the level of the ratio with."""
    from trl import GRPOConfig

    assert {name: getattr(GRPOConfig, name) for name in preset_settings.SAMPLING} == preset_settings.SAMPLING
    source = inspect.getsource(grpo_trainer)
    for field in ("loss_type", "importance_sampling_level"):
        compared = re.findall(rf"self\.{field} (?:==|!=|in|not in) (\[[^]]*\]|\"[a-z_]+\")", source)
        known = set(get_args(preset_settings._KINDS[field]))
        assert {word for found in compared for word in re.findall(r'"([a-z_]+)"', found)} == known, field


def test_the_tasks_are_counted_before_the_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*_: Any, **__: Any) -> Any:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr(training_run.model_loading, "load_model", load)
    rows = [{"prompt": f"def f{number}():", "task_id": str(number)} for number in range(12)]
    parts = training_run.assembly
    monkeypatch.setattr(parts, "training_rows", lambda *_: rows)
    for name in ("open_grader", "write_environment"):
        monkeypatch.setattr(parts, name, lambda *_, **__: SimpleNamespace())
    config: RunConfig = load_config(RECIPE, {"trl.per_device_train_batch_size": 128})
    folder = RunFolder(tmp_path)
    checked = parts.Checked(None, {}, visible_tests_pass, None, None, None, *check_training(config, folder))
    run = training_run.TrainingRun(config, RECIPE.parent, folder, True, checked, None)
    run.store, run.tasks = parts, SimpleNamespace(train=(), split=None)  # type: ignore[assignment]
    with pytest.raises(UsageError, match="CR0760"):
        run._open_parts()


def test_no_run_sends_its_model_to_a_hub(tmp_path: Path) -> None:
    error = refused(tmp_path, {"trl.push_to_hub": True})
    assert (error.code, error.where) == ("CR0211", "trl.push_to_hub")


def raise_in(module: str, error: Exception) -> None:
    """Raise it in a function of that module."""
    names = {"__name__": module, "error": error}
    exec("def start():\n    raise error", names)
    names["start"]()  # type: ignore[operator]


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("Device string must not be empty\nmore lines"),
        ValueError("No available memory for the cache blocks. Try increasing gpu_memory_utilization."),
        ModuleNotFoundError("No module named 'flashinfer'"),
    ],
)
def test_a_vllm_that_does_not_start_is_named(error: Exception) -> None:
    with pytest.raises(UsageError) as told, refusals():
        raise_in("vllm.entrypoints.llm", error)
    assert told.value.code == "CR0211"
    assert told.value.message == f"vLLM did not start: {str(error).splitlines()[0].rstrip('.')}."
    assert told.value.where == "trl.use_vllm"
    assert "composer-rl doctor" in told.value.fix


def test_what_no_setting_can_cause_stays_what_it_is() -> None:
    with pytest.raises(RuntimeError, match="a bug"), refusals():
        raise_in("trl.trainer", RuntimeError("a bug"))
    with pytest.raises(UsageError, match="the training libraries refuse"), refusals():
        raise_in("trl.trainer", ValueError("beta must not be negative"))


def test_notices_are_off_inside_and_back_outside(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.utils import logging as transformers_logging

    monkeypatch.setattr("sys.warnoptions", [])
    logging.getLogger("transformers").setLevel(logging.WARNING)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        with calm_libraries():
            assert not transformers_logging.is_progress_bar_enabled()
            warnings.warn("old name", FutureWarning, stacklevel=1)
            logging.getLogger("transformers.trainer").warning("a hint")
            logging.getLogger("composer_replication.trainer").warning("ours")
        assert [str(warning.message) for warning in seen] == []
        warnings.warn("old name", FutureWarning, stacklevel=1)
        assert [str(warning.message) for warning in seen] == ["old name"]
    assert [record.message for record in caplog.records] == ["ours"]
    assert logging.getLogger("transformers").level == logging.WARNING


def test_quiet_keeps_our_own_notices_back_but_no_error(caplog: pytest.LogCaptureFixture) -> None:
    ours = logging.getLogger("composer_replication.trainer")
    with calm_libraries(quiet=True):
        ours.warning("a notice")
        ours.error("a trouble")
    assert [record.message for record in caplog.records] == ["a trouble"]
