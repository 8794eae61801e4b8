"""One of two trainer processes that share one copy of the weights: ``sharded_worker.py FOLDER``; the rank comes from the environment.

FSDP2 as accelerate sets it up, over gloo: accelerate itself offers it on accelerators only, so it is told that this
is one. Everything behind that word is real: ``fully_shard``, DTensors, collectives, sharded checkpoints.

Writes ``rank-R.json``: what each scenario gave on this rank.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import sharded_runs as runs
import torch
import torch.distributed as dist
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from channel_runs import CHANNELS, trained
from tiny_trainer import build_trainer
from worker_runs import whole_and_resumed

from composer_replication.config import HintsSection
from composer_replication.trainer.model_modes import parameter_sha256

LAUNCH = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "false",
    "FSDP_OFFLOAD_PARAMS": "false",
}


def channels(folder: Path) -> dict[str, Any]:
    """The runs of ``channel_runs`` with a further channel on, and their whole weights."""
    hashes: dict[str, Any] = {}
    for channel in ("hints", "replay"):
        trainer = trained(folder / channel, channel, num_processes=2)
        hashes[channel] = parameter_sha256(trainer.model)
        torch.save(runs.weights_of(trainer.model), folder / f"{channel}-{dist.get_rank()}.pt")
    return hashes


def resumed_channels(folder: Path) -> dict[str, Any]:
    """The teacher and the first weights are in the checkpoint, too."""
    both = {**CHANNELS["hints"], **CHANNELS["replay"], **runs.SETTINGS}
    return whole_and_resumed(folder, gradient_accumulation_steps=1, **both)


def taught_by_the_bare_model(folder: Path) -> dict[str, Any]:
    """An adapter is trained, and the model without it is the teacher."""
    settings = {**CHANNELS["hints"], "hints": HintsSection(teacher="lora-off")}
    trainer = build_trainer(
        output_dir=folder,
        max_steps=3,
        num_prompts=8,
        lora_adapter=True,
        learning_rate=1e-2,
        **settings,
        **runs.SETTINGS,
    )
    trainer.train()
    lines = [line for line in trainer.state.log_history if "sdpo/divergence" in line]
    return {
        "divergence": [line["sdpo/divergence"] for line in lines],
        "sha256": parameter_sha256(trainer.model),
    }


def shard_the_weights() -> None:
    """As ``accelerate launch`` with FSDP2, where processors count as accelerators."""
    os.environ |= LAUNCH
    begin = PartialState.__init__

    def begin_as_accelerator(state: PartialState, *args: Any, **kwargs: Any) -> None:
        begin(state, *args, **kwargs)
        if state.distributed_type == DistributedType.MULTI_CPU:
            state.distributed_type = DistributedType.MULTI_GPU

    PartialState.__init__ = begin_as_accelerator  # type: ignore[method-assign]


def main(folder: Path) -> None:
    shard_the_weights()
    assert set(CHANNELS) == {"off", "hints", "replay"}
    scenarios = (
        runs.plain_run,
        channels,
        resumed_channels,
        taught_by_the_bare_model,
        runs.shared_prompts,
        runs.halting_run,
        runs.uneven_sampling,
        runs.chains_on_one_process,
    )
    runs.run_all(scenarios, folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
