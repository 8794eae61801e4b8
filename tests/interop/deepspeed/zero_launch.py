"""Starts a worker twice, as ``accelerate launch`` would with the recipe's file for ZeRO-3."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[2] / "invariants"))

from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_deepspeed_cmd_env
from two_processes import both_ranks

RECIPE = Path(__file__).parents[3] / "recipes" / "eight-gpus" / "zero3.yaml"
Ranks = tuple[Path, list[dict[str, Any]]]


def launch_environment(stage: str) -> dict[str, str]:
    """What ``accelerate launch`` makes of the recipe's file, but for the stage, two processes and float32."""
    flags = ["--zero_stage", stage, "--num_processes", "2", "--mixed_precision", "no"]
    args = launch_command_parser().parse_args(["--config_file", str(RECIPE), *flags, "script.py"])
    _validate_launch_command(args)
    args.deepspeed_fields_from_accelerate_config = "zero_stage"  # as the command itself notes it
    _, environment = prepare_deepspeed_cmd_env(args)
    return {name: text for name, text in environment.items() if name.startswith("ACCELERATE_")}


def launched(worker: str, stage: str, folder: Path, *words: str) -> Ranks:
    """The folder, and what each rank of ``WORKER WORDS FOLDER`` wrote there under this stage."""
    with mock.patch.dict(os.environ, launch_environment(stage)):
        return folder, both_ranks(Path(__file__).with_name(worker), folder, *words)
