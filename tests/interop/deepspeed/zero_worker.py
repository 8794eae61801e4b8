"""One of two trainer processes under DeepSpeed: ``zero_worker.py FOLDER``; rank and stage come from the environment.

accelerate offers DeepSpeed on accelerators only, so it is told that this is one. Everything behind that word is real:
DeepSpeed's engine, its optimizers of ZeRO-2 and ZeRO-3, its checkpoints, collectives over gloo.

Writes ``rank-R.json``: what each scenario gave on this rank.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "invariants"))

import sharded_runs as runs
import torch
import torch.distributed as dist
from accelerate.state import PartialState
from accelerate.utils import DeepSpeedPlugin, DistributedType
from callback_worker import halting_and_failing
from tiny_trainer import build_trainer, tiny_model
from transformers import AutoModelForCausalLM, TrainerCallback

from composer_replication.errors import InputError
from composer_replication.run_folder import RunFolder
from composer_replication.safety import HeldOutGuard
from composer_replication.trainer.model_modes import parameter_sha256

SIZES = {
    "stage3_param_persistence_threshold": 0,
    "reduce_bucket_size": 10_000,
    "allgather_bucket_size": 10_000,
}
"""Small weights are spread too, and buffers are not those of a GPU: by default each takes 2 GB."""


class Hashes(TrainerCallback):
    """The weights' hash after every step."""

    def __init__(self) -> None:
        self.hashes: list[str] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.hashes.append(parameter_sha256(kwargs["model"]))


def overflowing(steps: set[int]) -> Callable[..., list[float]]:
    """Rewards so large that the loss of these steps (from 0) overflows, on the second process alone."""

    def reward(completions: Sequence[str], trainer_state: Any, **kwargs: Any) -> list[float]:
        huge = 3e38 if trainer_state.global_step in steps and dist.get_rank() == 1 else 1.0
        return [huge * (number % 4 == 0) for number in range(len(completions))]

    return reward


def broken_steps(folder: Path) -> dict[str, Any]:
    """The second step and the last three are not finite."""
    hashes = Hashes()
    run = RunFolder(folder)
    trainer = build_trainer(
        output_dir=run.checkpoints,
        run_folder=run,
        max_steps=9,
        num_prompts=24,
        loss_type="dr_grpo",
        scale_rewards="none",
        weight_decay=0.1,
        lr_scheduler_type="linear",
        callbacks=[hashes],
        **runs.SETTINGS | {"reward": overflowing({1, 3, 4, 5})},
    )
    outcome = "finished"
    try:
        trainer.train()
    except InputError as error:
        outcome = error.code
    return {
        "outcome": outcome,
        "step": trainer.state.global_step,
        "hashes": hashes.hashes,
        "rates": [row["learning_rate"] for row in trainer.state.log_history if "learning_rate" in row],
        "said": [(finding.step, finding.name) for finding in trainer.checks.findings],
    }


def where_weights_lie(folder: Path) -> dict[str, Any]:
    """How many numbers of the weights this process holds between steps, and how many there are."""
    trainer = build_trainer(output_dir=folder, max_steps=1, num_prompts=8, **runs.SETTINGS)
    num_whole = sum(part.numel() for part in trainer.model.parameters())
    trainer.train()
    parts = list(trainer.model.parameters())
    return {
        "whole": num_whole,
        "held": sum(part.numel() for part in parts),
        "part": sum(part.ds_tensor.numel() for part in parts if hasattr(part, "ds_tensor")),
    }


def reference_run(folder: Path) -> dict[str, Any]:
    """Beta above 0, as in the recipe: the guard's KL is to a reference model, which is spread too."""
    initial = folder / "initial"
    tiny_model().save_pretrained(initial)  # the first process writes
    dist.barrier()
    guard = HeldOutGuard(min_steps=99)
    trainer = build_trainer(
        output_dir=folder,
        max_steps=3,
        num_prompts=16,
        model=AutoModelForCausalLM.from_pretrained(initial),
        beta=0.001,
        learning_rate=1e-2,
        heldout_guard=guard,
        heldout_eval_fn=lambda: 0.5,
        prefix_sharing=True,
        **runs.SETTINGS,
    )
    trainer.train()
    kls = [row["kl"] for row in trainer.state.log_history if "kl" in row]
    return {"kls": kls, "guard": guard.state_dict(), "path": trainer.guard_hook.kl_path.value}


def channels(folder: Path) -> dict[str, Any]:
    """The further loss channels, which need whole weights; what they trained is left beside."""
    for channel in ("hints", "replay"):
        trainer = runs.trained(folder / channel, channel, num_processes=2)
        torch.save(runs.weights_of(trainer.model), folder / f"{channel}-{dist.get_rank()}.pt")
    return {}


def half_precision(folder: Path) -> dict[str, Any]:
    """In bf16, as the recipe trains."""
    os.environ["ACCELERATE_MIXED_PRECISION"] = "bf16"
    trainer = build_trainer(
        output_dir=folder, max_steps=2, num_prompts=16, bf16=True, prefix_sharing=True, **runs.SETTINGS
    )
    trainer.train()
    whole = runs.weights_of(trainer.model)
    os.environ["ACCELERATE_MIXED_PRECISION"] = "no"
    return {
        "dtypes": sorted({str(weight.dtype) for weight in whole.values()}),
        "is_finite": all(bool(weight.isfinite().all()) for weight in whole.values()),
        "off": trainer.shared_prompts.off_reasons,
        "sha256": parameter_sha256(trainer.model),
    }


def callback_runs(folder: Path) -> dict[str, Any]:
    """The guard's callback under transformers' own Trainer."""
    return halting_and_failing(folder)


def use_deepspeed_on_processors() -> None:
    """As ``accelerate launch`` with DeepSpeed, where processors count as accelerators."""
    os.environ |= {"DS_ACCELERATOR": "cpu", "ACCELERATE_TORCH_DEVICE": "cpu"}
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = (
        False  # gloo alone: it would be compiled at the start
    )
    begin, fill_in = PartialState.__init__, DeepSpeedPlugin.__post_init__

    def begin_as_accelerator(state: PartialState, cpu: bool = False, **kwargs: Any) -> None:
        begin(state, cpu=False, **kwargs)

    def suit_a_tiny_model(plugin: DeepSpeedPlugin) -> None:
        fill_in(plugin)
        plugin.deepspeed_config["zero_optimization"] |= SIZES

    PartialState.__init__ = begin_as_accelerator
    PartialState._prepare_backend = lambda *args, **kwargs: ("gloo", DistributedType.MULTI_GPU)
    DeepSpeedPlugin.__post_init__ = suit_a_tiny_model


ALWAYS = (
    where_weights_lie,
    runs.plain_run,
    runs.shared_prompts,
    runs.resumed_run,
    runs.halting_run,
    reference_run,
    callback_runs,
    broken_steps,
    half_precision,
)
BY_STAGE: dict[str, tuple[Any, ...]] = {
    "2": (channels,),
    "3": (runs.uneven_sampling, runs.chains_on_one_process, runs.refused),
}


def main(folder: Path) -> None:
    use_deepspeed_on_processors()
    runs.run_all((*ALWAYS, *BY_STAGE[os.environ["ACCELERATE_DEEPSPEED_ZERO_STAGE"]]), folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
