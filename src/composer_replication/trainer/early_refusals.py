"""What the trainer would refuse at its first step, asked of the recipe alone: before a model is loaded or anything measured."""

from __future__ import annotations

from typing import Any

from transformers.utils.import_utils import is_liger_kernel_available

from composer_replication.config import RunConfig
from composer_replication.trainer.policy_options import PolicyOptions
from composer_replication.trainer.preset_settings import refuse_repeated_prompts
from composer_replication.trainer.setting_errors import TrainerSettingError


def check_arguments(config: RunConfig, arguments: Any, options: PolicyOptions) -> None:
    """What needs no task either.

    Args:
        config: the recipe.
        arguments: TRL's, made of it.
        options: ours, made of it.

    Raises:
        TrainerSettingError: a stop rule beside ``mask_truncated_completions`` (CR0760), groups that lie across processes
            under dynamic sampling (CR0760), Liger kernels that are not installed or fp16 on a processor (CR0211).
    """
    has_stop_rule = config.agent is None and config.rollouts.prompt_style == "completion"
    refuse_masked_stops(arguments, stops_rows=has_stop_rule and config.trainer.prefix_sharing)
    if options.dynamic_sampling_rounds:
        refuse_split_groups(arguments, arguments.num_generations, num_processes=arguments.world_size)
    if arguments.use_liger_kernel and not is_liger_kernel_available():
        raise TrainerSettingError(
            "CR0211",
            "trl.use_liger_kernel is set, and the package liger-kernel is not installed.",
            where="trl.use_liger_kernel",
            fix="type pip install liger-kernel, or take trl.use_liger_kernel out.",
        )
    if arguments.fp16 and arguments.device.type == "cpu":
        raise TrainerSettingError(
            "CR0211",
            "trl.fp16 does nothing on a processor: it needs a GPU.",
            where="trl.fp16",
            fix="take trl.fp16 out, or set trl.bf16 = true.",
        )


def check_num_prompts(config: RunConfig, arguments: Any, num_prompts: int) -> None:
    """What needs the number of training tasks.

    Raises:
        TrainerSettingError: fewer of them than one generation takes (CR0760).
        UsageError: more steps than a preset of one epoch has (CR0760).
    """
    refuse_few_prompts(arguments, arguments.num_generations, num_prompts)
    refuse_repeated_prompts(config, arguments, num_prompts)


def refuse_masked_stops(arguments: Any, *, stops_rows: bool) -> None:
    """A rule that ends single rows leaves them without an end-of-sequence token, so all would be masked.

    Raises:
        TrainerSettingError: CR0760.
    """
    if stops_rows and arguments.mask_truncated_completions:
        raise TrainerSettingError(
            "CR0760",
            "mask_truncated_completions takes the rows that is_finished (the end of the function) stopped for truncated ones.",
            where="trl.mask_truncated_completions, trainer.prefix_sharing",
            fix="set trl.mask_truncated_completions = false, or trainer.prefix_sharing = false.",
        )


def refuse_few_prompts(arguments: Any, num_generations: int, num_prompts: int) -> None:
    """A data set that does not fill one generation trains not one step.

    Raises:
        TrainerSettingError: CR0760.
    """
    per_generation = arguments.generation_batch_size // num_generations
    if num_prompts < per_generation:
        raise TrainerSettingError(
            "CR0760",
            f"one generation takes {per_generation} prompts, but there are only {num_prompts}: "
            "not one step could be trained.",
            where="trl.per_device_train_batch_size, trl.steps_per_generation, trl.num_generations",
            fix="lower the batch size or steps_per_generation, raise num_generations, or add tasks.",
        )


def refuse_split_groups(arguments: Any, num_generations: int, *, num_processes: int) -> None:
    """Dynamic sampling replaces groups, each within one process.

    Raises:
        TrainerSettingError: CR0760.
    """
    num_rows = arguments.per_device_train_batch_size * arguments.steps_per_generation
    if num_processes > 1 and num_rows % num_generations:
        raise TrainerSettingError(
            "CR0760",
            f"dynamic sampling needs whole groups on each process, and {num_rows} rows are not a "
            f"multiple of {num_generations} generations.",
            where="trl.per_device_train_batch_size, trl.num_generations",
            fix="make their product with steps_per_generation a multiple of num_generations.",
        )
