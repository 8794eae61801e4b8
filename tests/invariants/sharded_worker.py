"""One of two trainer processes that share one copy of the weights: ``sharded_worker.py FOLDER``; the rank comes from the environment.

FSDP2 as accelerate sets it up, over gloo: accelerate itself offers it on accelerators only, so it is told that this
is one. Everything behind that word is real: ``fully_shard``, DTensors, collectives, sharded checkpoints.

Writes ``rank-R.json``: what each scenario gave on this rank.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "trainer"))
sys.path.insert(0, str(Path(__file__).parent))

import torch
import torch.distributed as dist
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from channel_runs import CHANNELS, every_second_passes, roll_out, trained
from tiny_trainer import build_trainer
from worker_runs import under_a_falling_truth, whole_and_resumed

from composer_replication.channel_tables import HintsSection
from composer_replication.errors import ComposerError
from composer_replication.trainer import token_scores
from composer_replication.trainer.chained_rows import COLUMN
from composer_replication.trainer.episode_rollouts import EpisodeRollouts
from composer_replication.trainer.parameter_hash import parameter_sha256
from composer_replication.trainer.saved_model import gathered_weights, save_model

LAUNCH = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "false",
    "FSDP_OFFLOAD_PARAMS": "false",
}
SETTINGS: dict[str, Any] = {"rollout_func": roll_out, "reward": every_second_passes}


def plain_run(folder: Path) -> dict[str, Any]:
    """The run of ``channel_runs``; its whole weights are left beside, as tensors and as a model that anybody loads."""
    trainer = trained(folder / "off", "off", num_processes=2)
    whole = {name: weight.full_tensor().detach() for name, weight in trainer.model.named_parameters()}  # type: ignore[attr-defined]
    torch.save(whole, folder / f"off-{dist.get_rank()}.pt")
    gathered = gathered_weights(trainer)
    assert gathered is not None
    num_gathered = len(gathered)  # the writer takes them out
    if gathered:
        save_model(
            trainer.model, trainer.processing_class, folder / "model", lambda begun: None, weights=gathered
        )
    return {"sha256": parameter_sha256(trainer.model), "gathered": num_gathered}


def channels(folder: Path) -> dict[str, Any]:
    """The runs of ``channel_runs`` with a further channel on, and their whole weights."""
    hashes: dict[str, Any] = {}
    for channel in ("hints", "replay"):
        trainer = trained(folder / channel, channel, num_processes=2)
        hashes[channel] = parameter_sha256(trainer.model)
        whole = {name: weight.full_tensor().detach() for name, weight in trainer.model.named_parameters()}  # type: ignore[attr-defined]
        torch.save(whole, folder / f"{channel}-{dist.get_rank()}.pt")
    return hashes


def resumed_channels(folder: Path) -> dict[str, Any]:
    """The teacher and the first weights are in the checkpoint, too. No TAID: its target goes by ``max_steps``, which differ here."""
    both = {**CHANNELS["hints"], **CHANNELS["replay"], **SETTINGS}
    both["hints"] = HintsSection(ema_rate=0.5, turns_per_step=3)
    return whole_and_resumed(folder, gradient_accumulation_steps=1, **both)


def taught_by_the_bare_model(folder: Path) -> dict[str, Any]:
    """An adapter is trained, and the model without it is the teacher."""
    settings = {**CHANNELS["hints"], "hints": HintsSection(teacher="lora-off", turns_per_step=3)}
    trainer = build_trainer(
        output_dir=folder,
        max_steps=3,
        num_prompts=8,
        lora_adapter=True,
        learning_rate=1e-2,
        **settings,
        **SETTINGS,
    )
    trainer.train()
    lines = [line for line in trainer.state.log_history if "sdpo/divergence" in line]
    return {
        "divergence": [line["sdpo/divergence"] for line in lines],
        "sha256": parameter_sha256(trainer.model),
    }


def shared_prompts(folder: Path, **settings: Any) -> dict[str, Any]:
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
            **settings,
        )
        trainer.train()
        by_sharing[shares] = [weight.full_tensor() for weight in trainer.model.parameters()]
    pairs = zip(by_sharing[False], by_sharing[True], strict=True)
    apart = max(float((mine - theirs).abs().max()) for mine, theirs in pairs)
    return {"apart": apart, "off": trainer.prefix_sharing_off_reasons}


def packed_prompts(folder: Path) -> dict[str, Any]:
    return shared_prompts(folder, gradient_checkpointing=True)


def large_logits(folder: Path) -> dict[str, Any]:
    """As if no logits fitted: the head is gathered and applied in tiles, behind a cache and in packs."""
    apart, scored = {}, []
    sampled_logp, limit = token_scores.sampled_logp, token_scores.MAX_LOGITS_BYTES

    def counted(*args: Any, **kwargs: Any) -> Any:
        scored.append(args[1])
        return sampled_logp(*args, **kwargs)

    token_scores.sampled_logp, token_scores.MAX_LOGITS_BYTES = counted, 0  # type: ignore[assignment]
    try:
        for name, checkpoints in (("cache", False), ("packs", True)):
            scored.clear()
            result = shared_prompts(folder / name, gradient_checkpointing=checkpoints)
            apart[name] = (
                result["apart"],
                len(scored),
                all(hasattr(weight, "full_tensor") for weight in scored),
            )
    finally:
        token_scores.sampled_logp, token_scores.MAX_LOGITS_BYTES = sampled_logp, limit  # type: ignore[assignment]
    return apart


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
        "off": trainer.prefix_sharing_off_reasons,
        "sha256": parameter_sha256(trainer.model),
    }


def chains_on_one_process(folder: Path) -> dict[str, Any]:
    """Rows of the first process go on from a summary; the second forwards as many rows."""

    def chained(prompts: Any, trainer: Any) -> dict[str, Any]:
        output = roll_out(prompts, trainer)
        is_first = dist.get_rank() == 0
        output["env_mask"] = [[1] * len(ids) for ids in output["completion_ids"]]
        output[COLUMN] = [[len(ids)] if is_first else [] for ids in output["completion_ids"]]
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
    player: Any = None
    settings = SETTINGS | {"rollout_func": EpisodeRollouts(player)}
    try:
        build_trainer(output_dir=folder / "episodes", max_steps=1, **settings).train()
    except ComposerError as error:
        found["episodes"] = error.code
    return found


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
    torch.set_num_threads(1)
    shard_the_weights()
    assert set(CHANNELS) == {"off", "hints", "replay"}
    results: dict[str, Any] = {}
    for scenario in (
        plain_run,
        channels,
        resumed_channels,
        taught_by_the_bare_model,
        shared_prompts,
        packed_prompts,
        large_logits,
        resumed_run,
        halting_run,
        uneven_sampling,
        chains_on_one_process,
        refused,
    ):
        (folder / scenario.__name__).mkdir(exist_ok=True)
        results[scenario.__name__] = scenario(folder / scenario.__name__)
    (folder / f"rank-{dist.get_rank()}.json").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
