"""What a recipe alone can be refused for is refused before a model is loaded, not after the first measurement."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from composer_replication.cli import training_run
from composer_replication.cli.assembly import check_training
from composer_replication.config import RunConfig, load_config
from composer_replication.errors import UsageError
from composer_replication.run_folder import RunFolder
from composer_replication.trainer.setting_errors import refuse_split_groups

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
    arguments = SimpleNamespace(per_device_train_batch_size=6, steps_per_generation=1)
    refuse_split_groups(arguments, 4, num_processes=1)
    refuse_split_groups(arguments, 3, num_processes=2)
    with pytest.raises(UsageError, match=r"CR0760.*6 rows are not a multiple of 4"):
        refuse_split_groups(arguments, 4, num_processes=2)


def test_the_tasks_are_counted_before_the_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*_: Any, **__: Any) -> Any:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr(training_run, "load_model", load)
    rows = [{"prompt": f"def f{number}():", "task_id": str(number)} for number in range(12)]
    parts = training_run.assembly
    monkeypatch.setattr(parts, "training_rows", lambda *_: rows)
    for name in ("open_grader", "write_environment"):
        monkeypatch.setattr(parts, name, lambda *_, **__: SimpleNamespace())
    config: RunConfig = load_config(RECIPE, {"trl.per_device_train_batch_size": 128})
    folder = RunFolder(tmp_path)
    checked: Any = (None, {}, *check_training(config, folder), None)
    run = training_run.TrainingRun(config, RECIPE.parent, folder, True, *checked)
    run.store, run.tasks = parts, SimpleNamespace(train=(), split=None)  # type: ignore[assignment]
    with pytest.raises(UsageError, match="CR0760"):
        run._open_parts()


def test_no_run_sends_its_model_to_a_hub(tmp_path: Path) -> None:
    error = refused(tmp_path, {"trl.push_to_hub": True})
    assert (error.code, error.where) == ("CR0211", "trl.push_to_hub")
