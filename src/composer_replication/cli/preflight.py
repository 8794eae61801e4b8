"""Everything about a recipe that can be refused before tasks are built and a run folder is begun.

Building tasks may take an hour, so what is cheap to try is tried first.
"""

from __future__ import annotations

from composer_replication.cli.needed_packages import needs_extra
from composer_replication.cli.run_parts import accept_recipe, make_guard
from composer_replication.config import RunConfig
from composer_replication.rollouts.rewards import load_reward_rule
from composer_replication.run_folder import RunFolder
from composer_replication.sandbox import choose_backend


def check_recipe(config: RunConfig) -> None:
    """What needs none of the training packages.

    Raises:
        UsageError: a guard out of range (CR0204), a reward that cannot be used (CR0210), a
            loss channel that does not exist (CR0711), an unknown sandbox (CR0305), none that nobody accepted (CR0340), an
            acceptance of no guard (CR0341).
        MissingError: no sandbox works here (CR0301).
    """
    from composer_replication.trainer.setting_errors import ChannelNotBuiltError

    make_guard(config)
    for name in ("alpha_sdpo", "beta_replay"):
        if getattr(config.trainer, name) != 0.0:
            raise ChannelNotBuiltError(name)
    load_reward_rule(config.reward.function)
    accept_recipe(config)
    choose_backend(config.sandbox.backend or None)


def check_training(config: RunConfig, folder: RunFolder) -> None:
    """What the training packages say.

    Raises:
        UsageError: a ``[trl]`` table that TRL refuses (CR0211).
        MissingError: a package is missing (CR0101).
    """
    with needs_extra("train", "training"):
        import composer_replication.trainer.composer_trainer  # noqa: F401  # the heaviest import of all
        from composer_replication.trainer.run_setup import lora_config, trl_arguments

        lora_config(config.model.lora)
    trl_arguments(config, folder)
