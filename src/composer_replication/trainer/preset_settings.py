"""From ``trainer.preset`` and the keys beside it to TRL's arguments and our own options."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from composer_replication.config import PRESETS, EffortSection, RunConfig, TrainerSection
from composer_replication.errors import UsageError
from composer_replication.trainer.policy_options import (
    PolicyOptions,
    check_policy_options,
)
from composer_replication.trainer.setting_errors import (
    refuse_few_prompts,
    refuse_masked_stops,
    refuse_split_groups,
)

_DEFINING = ("trl.loss_type", "trl.scale_rewards", "trl.importance_sampling_level", "trl.num_iterations")
"""Keys without which a method is another one; each preset has those of them that define it. So is ``trl.beta`` where it
is 0: that method has no KL."""


AGENT_IMPORTANCE_CLIP = 2.0
"""Of a recipe with ``[agent]`` that says nothing: over many turns sampler and trainer drift apart, as no single answer does."""

_EPOCHS = "trl.num_train_epochs"


@dataclass(frozen=True, slots=True)
class ResolvedMethod:
    """What a recipe's method comes to.

    Attributes:
        trl: keys of ``GRPOConfig``, the recipe's over the preset's.
        options: what the trainer takes beside them.
        overlong_share: last share of ``max_completion_length`` that is punished; 0 is none.
    """

    trl: dict[str, Any]
    options: PolicyOptions
    overlong_share: float


def sampling_settings(config: RunConfig) -> SimpleNamespace:
    """How a recipe's answers are sampled: of TRL's arguments those that say so, its defaults for what is not set.

    Raises:
        UsageError: the recipe's method contradicts itself (CR0760).
    """
    from trl import GRPOConfig

    names = ("temperature", "max_completion_length", "top_p", "top_k", "min_p", "repetition_penalty")
    given = resolve_method(config).trl
    if config.agent is not None:  # all that follows the first prompt of an episode is its completion
        given = {**given, "max_completion_length": config.agent.max_context_tokens}
    return SimpleNamespace(**{name: given.get(name, getattr(GRPOConfig, name)) for name in names})


def resolve_method(config: RunConfig) -> ResolvedMethod:
    """Lay the recipe's keys over those of its preset.

    Raises:
        UsageError: a key of the recipe contradicts the preset (CR0760), a KL or effort term in the reward with
            scaled rewards (CR0760), a KL in the reward of weight 0 (CR0760), or ``loss_type = "cispo"`` whose ratios would be
            cut below 1 (CR0760).
    """
    name = config.trainer.preset
    preset = PRESETS[name] if name else {}
    _refuse_contradictions(name or "", preset, config.trl)
    _refuse_other_reward(name or "", preset, config.trainer)
    _refuse_second_epoch(name or "", preset, config.trl)
    trl = {key.removeprefix("trl."): value for key, value in preset.items() if key.startswith("trl.")}
    trl |= config.trl
    own = {key: _own_value(config.trainer, preset, key) for key in _OWN_KEYS}
    if own["importance_clip"] is None and config.agent is not None:
        own["importance_clip"] = AGENT_IMPORTANCE_CLIP
    effort: EffortSection | None = own["effort"]
    options = PolicyOptions(
        kl_in_reward=bool(own["kl_in_reward"]),
        effort=effort,
        dynamic_sampling_rounds=int(own["dynamic_sampling_rounds"] or 0),
        importance_clip=float(own["importance_clip"] or 0.0),
    )
    _check_reward_terms(options, trl)
    _refuse_small_cispo(trl)
    return ResolvedMethod(trl, options, float(own["overlong_share"] or 0.0))


def overlong_punishment(method: ResolvedMethod, args: Any) -> list[Callable[..., Any]]:
    """DAPO's soft punishment as a further reward function, TRL's own; none where the share is 0.

    0 up to ``max_completion_length - cache`` tokens, then falling to -1, ``cache`` being the share of
    that length, at least one token (2503.14476, equation 13).
    """
    if not method.overlong_share:
        return []
    from trl.rewards import get_soft_overlong_punishment

    longest = int(args.max_completion_length)
    return [get_soft_overlong_punishment(longest, max(round(method.overlong_share * longest), 1))]


_OWN_KEYS = ("kl_in_reward", "effort", "dynamic_sampling_rounds", "importance_clip", "overlong_share")


def _own_value(section: TrainerSection, preset: Mapping[str, Any], key: str) -> Any:
    """The recipe's value, else the preset's, else None."""
    value = getattr(section, key)
    if value is None:
        value = preset.get(f"trainer.{key}")
    return EffortSection(**value) if isinstance(value, dict) else value


def _refuse_contradictions(name: str, preset: Mapping[str, Any], table: Mapping[str, Any]) -> None:
    has_no_kl = preset.get("trl.beta") == 0.0
    for key in (*_DEFINING, *(["trl.beta"] if has_no_kl else [])):
        own = key.removeprefix("trl.")
        if key not in preset or own not in table:
            continue
        value = _unscaled(table[own]) if own == "scale_rewards" else table[own]
        if value != preset[key]:
            raise _contradiction(name, key, preset[key], table[own])


def _refuse_other_reward(name: str, preset: Mapping[str, Any], section: TrainerSection) -> None:
    """A method that folds the KL into the reward is another one with it in the loss; what its effort costs is free."""
    key, value = "trainer.kl_in_reward", section.kl_in_reward
    if value is not None and preset.get(key, value) != value:
        raise _contradiction(name, key, preset[key], value)


def _contradiction(name: str, key: str, defined: Any, found: Any) -> UsageError:
    return UsageError(
        "CR0760",
        f"the preset {name} has {key} = {_as_toml(defined)} by definition, and the recipe sets {_as_toml(found)}.",
        where=key,
        fix=f"take {key} out, or take trainer.preset out and write the method's keys yourself.",
    )


def _as_toml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(value)


def _refuse_second_epoch(name: str, preset: Mapping[str, Any], table: Mapping[str, Any]) -> None:
    """A preset that sets the number of epochs is defined by training on each prompt once; less than one is no second."""
    most, asked = preset.get(_EPOCHS), table.get("num_train_epochs")
    if most is not None and isinstance(asked, int | float) and asked > most:
        raise UsageError(
            "CR0760",
            f"the preset {name} trains on each prompt once by definition, and the recipe sets {_EPOCHS} = {asked}.",
            where=_EPOCHS,
            fix=f"take {_EPOCHS} out, or take trainer.preset out and write the method's keys yourself.",
        )


def check_arguments(config: RunConfig, arguments: Any, options: PolicyOptions) -> None:
    """What the trainer would refuse at its first step, and what needs no task.

    Args:
        config: the recipe.
        arguments: TRL's, made of it.
        options: ours, made of it.

    Raises:
        TrainerSettingError: a stop rule beside ``mask_truncated_completions`` (CR0760), or groups that lie across processes
            under dynamic sampling (CR0760).
    """
    has_stop_rule = config.agent is None and config.rollouts.prompt_style == "completion"
    refuse_masked_stops(arguments, stops_rows=has_stop_rule and config.trainer.prefix_sharing)
    if options.dynamic_sampling_rounds:
        refuse_split_groups(arguments, arguments.num_generations, num_processes=arguments.world_size)


def check_num_prompts(config: RunConfig, arguments: Any, num_prompts: int) -> None:
    """What needs the number of training tasks.

    ``max_steps`` goes round the data as often as it takes, so a preset of one epoch is compared with it, too.

    Raises:
        TrainerSettingError: fewer of them than one generation takes (CR0760).
        UsageError: the steps of a preset of one epoch take more prompts than there are (CR0760).
    """
    refuse_few_prompts(arguments, arguments.num_generations, num_prompts)
    name = config.trainer.preset
    if not name or _EPOCHS not in PRESETS[name] or config.curriculum is not None:
        return  # a curriculum draws by what it knows of each task, and is asked for by a table of its own
    per_generation = arguments.generation_batch_size // arguments.num_generations
    micro_steps = num_prompts // per_generation * arguments.steps_per_generation
    most = math.ceil(
        micro_steps / arguments.gradient_accumulation_steps
    )  # an epoch may end with a short step
    if arguments.max_steps > most:
        raise UsageError(
            "CR0760",
            f"the preset {name} trains on each prompt once by definition, and {arguments.max_steps} steps go round "
            f"{num_prompts} tasks more than once.",
            where="trl.max_steps",
            fix=f"set trl.max_steps to at most {most} or take it out, add tasks, or take trainer.preset out.",
        )


def _unscaled(value: Any) -> Any:
    return {True: "group", False: "none"}[value] if isinstance(value, bool) else value


def _check_reward_terms(options: PolicyOptions, trl: Mapping[str, Any]) -> None:
    known = {"scale_rewards": "group", "multi_objective_aggregation": "sum_then_normalize", "beta": 0.0}
    check_policy_options(options, SimpleNamespace(**{key: trl.get(key, known[key]) for key in known}))


def _refuse_small_cispo(trl: Mapping[str, Any]) -> None:
    """TRL clamps CISPO's ratio at ``epsilon_high`` itself, and where that is unset at epsilon, 0.2."""
    if trl.get("loss_type") != "cispo":
        return
    largest = trl.get("epsilon_high", trl.get("epsilon", 0.2))
    if isinstance(largest, int | float) and largest < 1:
        raise UsageError(
            "CR0760",
            f"with loss_type cispo every ratio above {largest} is cut to it, so even on-policy gradients would "
            f"shrink {1 / max(largest, 1e-9):.3g}-fold.",
            where="trl.epsilon_high",
            fix='set trl.epsilon_high = 5.0, the largest ratio that may pass, or trainer.preset = "cispo".',
        )
