"""Everything about a recipe that can be refused before tasks are built and a run folder is begun.

Building tasks may take an hour, so what is cheap to try is tried first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from composer_replication.channel_tables import HintsSection
from composer_replication.cli.agent_assembly import check_agent, refuse_unfit_engines
from composer_replication.cli.assembly import accept_recipe, make_guard, pair_rows
from composer_replication.cli.launched_process import shards_by_fsdp2, shards_weights
from composer_replication.cli.ray_cluster import check_cluster, cluster_options
from composer_replication.config import RunConfig
from composer_replication.errors import UsageError, needs_extra
from composer_replication.rollouts.hints.layers import open_layers
from composer_replication.rollouts.rewards import load_reward_rule
from composer_replication.run_folder import RunFolder
from composer_replication.safety import CombinedGuard, HeldOutGuard
from composer_replication.sandbox import choose_backend
from composer_replication.traces.pair_files import PairRow


@dataclass(frozen=True, slots=True)
class CheckedRecipe:
    """What was made to check a recipe: the run uses these very things."""

    guard: HeldOutGuard | CombinedGuard | None
    pairs: Mapping[str, PairRow]


def check_recipe(config: RunConfig, recipe_folder: Path) -> CheckedRecipe:
    """What needs none of the training packages.

    Raises:
        UsageError: a guard out of range (CR0204), a reward that cannot be used (CR0210), a
            loss channel without anything to learn from (CR0755) or with spread weights (CR0757), hints that nobody can write
            (CR0221), an unknown sandbox (CR0305), none that nobody accepted (CR0340), an
            acceptance of no guard (CR0340), a key or a dialect that the agent loop cannot follow (CR0211, CR0818), a
            sampling server that does not fit (CR0826),
            spread weights with ``[agent]`` (CR0873).
        InputError: a file of preference pairs that cannot be used (CR0881).
        MissingError: no sandbox works here (CR0301), no sampling server answers (CR0824); with ``[ray]`` none is needed, but a cluster, and as ``check_cluster``.
    """
    checked = CheckedRecipe(make_guard(config), pair_rows(config, recipe_folder))
    _refuse_empty_channels(config)
    check_agent(config)
    refuse_unfit_engines(config)
    load_reward_rule(config.reward.function)
    accept_recipe(config)
    if config.ray is None:
        choose_backend(config.sandbox.backend or None)
    else:
        check_cluster(config.ray.address, "training on a Ray cluster")
        cluster_options(config)
    return checked


def _refuse_empty_channels(config: RunConfig) -> None:
    """A recipe's hints come from its own rollouts; its preference pairs from a file, from siblings, or from both.

    Neither channel can be trained where the weights are spread over processes by anything but FSDP2.
    """
    is_trainable = not shards_weights() or shards_by_fsdp2()
    if not is_trainable and (config.trainer.alpha_sdpo != 0.0 or config.trainer.beta_replay != 0.0):
        raise UsageError(
            "CR0757",
            "hint distillation and replay cannot train this model: its weights are to be spread over processes, and not by FSDP2.",
            where="trainer.alpha_sdpo, trainer.beta_replay",
            fix="set both weights to 0, or launch with fsdp_version: 2, or without FSDP and ZeRO-3.",
        )
    if config.trainer.alpha_sdpo != 0.0:
        open_layers((config.hints or HintsSection()).writing)
    replay = config.replay
    if config.trainer.beta_replay != 0.0 and not (replay and (replay.sibling_pairs or replay.pairs)):
        raise UsageError(
            "CR0755",
            "beta_replay is not 0, but there is no preference pair to learn from.",
            where="trainer.beta_replay",
            fix="name a file of pairs in replay.pairs, set replay.sibling_pairs = true, or beta_replay to 0.",
        )


def check_training(config: RunConfig, folder: RunFolder) -> tuple[Any, Any]:
    """What the training packages say: TRL's arguments and the method of the recipe.

    Raises:
        UsageError: a ``[trl]`` table that TRL refuses (CR0211), a method that contradicts itself or that
            ``check_arguments`` refuses (CR0760).
        MissingError: a package is missing (CR0101).
    """
    with needs_extra("train", "training"):
        import composer_replication.trainer.composer_trainer  # noqa: F401  # the heaviest import of all
        from composer_replication.trainer.preset_settings import check_arguments, resolve_method
        from composer_replication.trainer.run_setup import lora_config, trl_arguments

        lora_config(config.model.lora)
    arguments, method = trl_arguments(config, folder), resolve_method(config)
    check_arguments(config, arguments, method.options)
    return arguments, method
