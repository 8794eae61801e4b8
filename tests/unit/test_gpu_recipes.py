"""The recipes for GPUs as far as a processor can tell: the recipe, what TRL makes of it, what accelerate makes of its files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import FullyShardedDataParallelPlugin
from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env

from composer_replication.cli.assembly import check_recipe, check_training
from composer_replication.config import load_config
from composer_replication.run_folder import RunFolder
from composer_replication.trainer.run_setup import trl_arguments

RECIPES = Path(__file__).parents[2] / "recipes"
EIGHT = RECIPES / "eight-gpus"
SERVER = {"trl.vllm_mode": "server", "trl.vllm_server_base_url": "http://127.0.0.1:8000"}


def arguments(name: str, folder: Path, overrides: dict[str, Any] | None = None) -> Any:
    """What a run of the recipe would give TRL, after all that is refused before a run."""
    recipe = RECIPES / name / "run.toml"
    config = load_config(recipe, overrides or {})
    check_recipe(config, recipe.parent)
    check_training(config, RunFolder(folder))
    return trl_arguments(config, RunFolder(folder))[0]


def launched(file: str, *flags: str) -> Any:
    """accelerate's own reading of a file, as ``accelerate launch`` does it."""
    parser = launch_command_parser()
    args = parser.parse_args(["--config_file", str(EIGHT / file), *flags, "script.py"])
    _validate_launch_command(args)
    return args


@pytest.mark.parametrize("name", ["one-gpu", "eight-gpus"])
@pytest.mark.parametrize("overrides", [{}, SERVER], ids=["colocated", "server"])
def test_vllm_reaches_trl(name: str, overrides: dict[str, Any], tmp_path: Path) -> None:
    built = arguments(name, tmp_path, overrides)
    assert built.use_vllm
    assert built.vllm_mode == overrides.get("trl.vllm_mode", "colocate")
    assert built.vllm_server_base_url == overrides.get("trl.vllm_server_base_url")
    assert built.vllm_importance_sampling_mode == "token_truncate"
    assert built.vllm_importance_sampling_clip_max == 2.0
    assert built.vllm_enable_sleep_mode
    assert built.vllm_max_model_length > built.max_completion_length
    assert (built.loss_type, built.scale_rewards) == ("dr_grpo", "none")
    assert (built.bf16, built.gradient_checkpointing) == (True, True)


@pytest.mark.parametrize(
    ("name", "num_processes"), [("one-gpu", 1), ("eight-gpus", 8), ("eight-gpus", 6)], ids=str
)
def test_a_batch_holds_whole_groups(name: str, num_processes: int) -> None:
    """Six train where two serve; TRL itself counts its processes, so a lone one cannot ask it."""
    trl = load_config(RECIPES / name / "run.toml").trl
    batch = num_processes * trl["per_device_train_batch_size"] * trl["gradient_accumulation_steps"]
    assert batch % trl["num_generations"] == 0
    assert num_processes % trl.get("vllm_tensor_parallel_size", 1) == 0


@pytest.mark.parametrize(("flags", "num_processes"), [((), 8), (("--num_processes", "6"), 6)], ids=str)
def test_accelerate_makes_fsdp2_of_its_file(flags: tuple[str, ...], num_processes: int) -> None:
    args = launched("fsdp2.yaml", *flags)
    assert args.use_fsdp
    assert (args.num_processes, args.mixed_precision) == (num_processes, "bf16")
    environment = prepare_multi_gpu_env(args)
    assert environment["ACCELERATE_USE_FSDP"] == "true"
    with mock.patch.dict(os.environ, environment):
        plugin = FullyShardedDataParallelPlugin()
    assert plugin.fsdp_version == 2
    assert plugin.reshard_after_forward is True
    assert not plugin.cpu_ram_efficient_loading
    assert not plugin.activation_checkpointing  # TRL's own, and never both
    assert str(plugin.state_dict_type).endswith("SHARDED_STATE_DICT")
    assert type(plugin.cpu_offload).__name__ == "OffloadPolicy"  # weights stay on the card


def test_accelerate_makes_zero3_of_its_file() -> None:
    args = launched("zero3.yaml")
    assert args.use_deepspeed
    assert args.num_processes == 8
    args.deepspeed_fields_from_accelerate_config = "zero_stage"  # as the command itself notes it
    _, environment = prepare_deepspeed_cmd_env(args)
    assert environment["ACCELERATE_USE_DEEPSPEED"] == "true"
    assert environment["ACCELERATE_DEEPSPEED_ZERO_STAGE"] == "3"
    assert environment["ACCELERATE_MIXED_PRECISION"] == "bf16"
