"""Runs of two processes that share one copy of the weights, whoever spreads them: FSDP2 or DeepSpeed."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState
from channel_runs import every_second_passes, roll_out, trained
from tiny_trainer import build_trainer
from worker_runs import under_a_falling_truth, whole_and_resumed

from composer_replication.errors import ComposerError
from composer_replication.trainer.episode_rollouts import model_sampler
from composer_replication.trainer.generation import SEGMENT_STARTS
from composer_replication.trainer.model_loading import gathered_weights, save_model
from composer_replication.trainer.model_modes import parameter_sha256, whole_tensors

SETTINGS: dict[str, Any] = {"rollout_func": roll_out, "reward": every_second_passes}


def weights_of(model: Any) -> dict[str, torch.Tensor]:
    """All weights, whole, on every process."""
    return {name: weight.clone() for name, weight in whole_tensors(model)}


def plain_run(folder: Path) -> dict[str, Any]:
    """The run of ``channel_runs``; its whole weights are left beside, as tensors and as a model that anybody loads."""
    trainer = trained(folder / "off", "off", num_processes=2)
    torch.save(weights_of(trainer.model), folder / f"off-{dist.get_rank()}.pt")
    gathered = gathered_weights(trainer)
    num_gathered = None if gathered is None else len(gathered)  # the writer takes them out
    if dist.get_rank() == 0:
        save_model(
            trainer.model, trainer.processing_class, folder / "model", lambda begun: None, weights=gathered
        )
    return {"sha256": parameter_sha256(trainer.model), "gathered": num_gathered}


def shared_prompts(folder: Path) -> dict[str, Any]:
    by_sharing: dict[bool, Any] = {}
    for shares in (False, True):
        trainer = build_trainer(
            output_dir=folder / str(shares),
            max_steps=1,
            optim="sgd",
            max_grad_norm=0.0,
            prefix_sharing=shares,
            num_prompts=16,
            learning_rate=1e-2,
            **SETTINGS,
        )
        trainer.train()
        by_sharing[shares] = weights_of(trainer.model)
    plain, shared = by_sharing[False], by_sharing[True]
    apart = max(float((shared[name] - weight).abs().max()) for name, weight in plain.items())
    return {"apart": apart, "off": trainer.shared_prompts.off_reasons}


def resumed_run(folder: Path) -> dict[str, Any]:
    return whole_and_resumed(folder, gradient_accumulation_steps=1, **SETTINGS)


def halting_run(folder: Path) -> dict[str, Any]:
    """Every process evaluates, since a forward needs them all; the first one's reading counts."""
    trainer, result = under_a_falling_truth(folder, num_prompts=16, **SETTINGS)
    return {**result, "adapter": gathered_weights(trainer)}


def uneven_sampling(folder: Path) -> dict[str, Any]:
    """Rows of the first process stop after one token, those of the second never do."""
    trainer = build_trainer(
        output_dir=folder,
        max_steps=2,
        num_prompts=8,
        prefix_sharing=True,
        is_finished=lambda text: dist.get_rank() == 0,
        max_completion_length=5,
    )
    trainer.train()
    lengths = [row["completions/mean_length"] for row in trainer.state.log_history if "loss" in row]
    return {
        "lengths": lengths,
        "off": trainer.shared_prompts.off_reasons,
        "sha256": parameter_sha256(trainer.model),
    }


def chains_on_one_process(folder: Path) -> dict[str, Any]:
    """Rows of the first process go on from a summary; the second forwards as many rows."""

    def chained(prompts: Any, trainer: Any) -> dict[str, Any]:
        output = roll_out(prompts, trainer)
        is_first = dist.get_rank() == 0
        output["env_mask"] = [[1] * len(ids) for ids in output["completion_ids"]]
        output[SEGMENT_STARTS] = [[len(ids)] if is_first else [] for ids in output["completion_ids"]]
        for ids, mask in zip(output["completion_ids"], output["env_mask"], strict=True):
            if is_first:
                ids += [70, 71, 72, 73]
                mask += [0, 0, 1, 1]
        return output

    trainer = build_trainer(
        output_dir=folder, max_steps=2, num_prompts=16, **SETTINGS | {"rollout_func": chained}
    )
    trainer.train()
    return {"steps": trainer.state.global_step, "sha256": parameter_sha256(trainer.model)}


def refused(folder: Path) -> dict[str, Any]:
    """What sharded weights cannot do says so before the first step."""
    found: dict[str, Any] = {}
    for channel in ("hints", "replay"):
        try:
            trained(folder / channel, channel, num_processes=2)
        except ComposerError as error:
            found[channel] = error.code
    settings = SETTINGS | {"rollout_func": lambda prompts, trainer: model_sampler(trainer.model, trainer)}
    try:
        build_trainer(output_dir=folder / "episodes", max_steps=1, **settings).train()
    except ComposerError as error:
        found["episodes"] = error.code
    return found


def run_all(scenarios: tuple[Callable[[Path], dict[str, Any]], ...], folder: Path) -> None:
    """One after the other, each as in a launch of its own; ``rank-R.json`` has what each gave on this rank."""
    torch.set_num_threads(1)
    results: dict[str, Any] = {}
    for scenario in scenarios:
        AcceleratorState._reset_state()  # DeepSpeed's settings are filled in by the first trainer
        (folder / scenario.__name__).mkdir(exist_ok=True)
        results[scenario.__name__] = scenario(folder / scenario.__name__)
        gc.collect()  # engines and their trainers hold each other
    (folder / f"rank-{dist.get_rank()}.json").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()
