"""From ``trainer.preset`` and the keys beside it to TRL's arguments and our own options, and what cannot go together."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Final, NamedTuple

from composer_replication.config import PRESETS, RunConfig
from composer_replication.errors import UsageError
from composer_replication.trainer import setting_errors

_DEFINING = ["trl.loss_type", "trl.scale_rewards", "trl.importance_sampling_level", "trl.num_iterations"]
_DEFINING += ["trl.beta", "trainer.kl_in_reward"]
"""Keys without which a method is another one, where its preset has them; ``trl.beta`` where it is 0: that method has no KL."""
IMPORTANCE_CLIP = 2.0
"""Of every recipe; it acts with ``[agent]``: no other rollouts bring their sampler's log-probabilities."""


@dataclass(frozen=True, slots=True)
class PolicyOptions:
    """The policy-gradient channel's own settings, keys of ``[trainer]`` but for the last; with the defaults all is as in TRL.

    ``kl_in_reward``: ``args.beta`` times the summed log-ratio to the reference is taken off the reward, and TRL's KL in the loss
    is off. ``dynamic_sampling_rounds``: how often, at most, the groups of one generation whose rewards are all equal are replaced
    by fresh prompts. ``importance_clip``: largest importance weight of a token where a rollout function gave the sampler's
    log-probabilities; 0 corrects nothing.
    """

    kl_in_reward: bool = False
    effort_weight: float = 0.0
    dynamic_sampling_rounds: int = 0
    importance_clip: float = 0.0

    @property
    def has_reward_terms(self) -> bool:
        """Something is folded into the reward."""
        return self.kl_in_reward or self.effort_weight != 0.0


class ResolvedMethod(NamedTuple):
    """What a recipe's method comes to: keys of ``GRPOConfig``, the recipe's over the preset's, and what is ours.

    The last ``overlong_share`` of ``max_completion_length`` is punished; 0 is none.
    """

    trl: dict[str, Any]
    options: PolicyOptions
    overlong_share: float


def resolve_method(config: RunConfig) -> ResolvedMethod:
    """Lay the recipe's keys over those of its preset; what defines a method and is set otherwise is refused (CR0760)."""
    name, preset = config.trainer.preset, PRESETS.get(config.trainer.preset or "", {})
    given = {f"trl.{key}": value for key, value in config.trl.items()}
    for key in ("kl_in_reward", "effort_weight", "dynamic_sampling_rounds"):
        if (value := getattr(config.trainer, key)) is not None:
            given[f"trainer.{key}"] = value
    for key in _DEFINING:
        has_both = key in preset and key in given and (key != "trl.beta" or preset[key] == 0.0)
        if has_both and preset[key] not in (given[key], _scaling(given[key])):
            mine, other = json.dumps(preset[key]), json.dumps(given[key])
            words = f"the preset {name} has {key} = {mine} by definition, and the recipe sets {other}"
            fix = f"take {key} out, or take trainer.preset out and write the method's keys yourself."
            raise setting_errors.contradiction(words, where=key, fix=fix)
    tables: dict[str, dict[str, Any]] = {"trl": {}, "trainer": {"importance_clip": IMPORTANCE_CLIP}}
    for key, value in (preset | given).items():
        table, _, rest = key.partition(".")
        tables[table][rest] = value
    overlong_share = 0.2 if name == "dapo" else 0.0  # the paper's 4,096 of 20,480 tokens
    return ResolvedMethod(tables["trl"], PolicyOptions(**tables["trainer"]), overlong_share)


def _scaling(value: Any) -> Any:
    """``scale_rewards`` as TRL's word for it, where it takes a bool too; other values as they are."""
    return {True: "group", False: "none"}[value] if isinstance(value, bool) else value


def sampling_settings(config: RunConfig) -> SimpleNamespace:
    """How a recipe's answers are sampled: of TRL's arguments those that say so, its defaults for what is not set."""
    from trl import GRPOConfig

    names = ("temperature", "max_completion_length", "top_p", "top_k", "min_p", "repetition_penalty")
    given = resolve_method(config).trl
    if config.agent is not None:  # all that follows the first prompt of an episode is its completion
        given["max_completion_length"] = config.agent.max_context_tokens
    return SimpleNamespace(**{name: given.get(name, getattr(GRPOConfig, name)) for name in names})


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


def check_policy_options(options: PolicyOptions, args: Any) -> None:
    """Refuse what would give another gradient than it says: CR0760.

    A term in the reward is exact only while advantages are not divided by a standard deviation, and a KL in the reward of
    weight 0, which is TRL's own default, would hold the policy to nothing. ``args`` is TRL's ``GRPOConfig``, or None.
    """
    if not options.has_reward_terms:
        return
    term = "kl_in_reward" if options.kl_in_reward else "effort_weight"
    is_scaled = _scaling(getattr(args, "scale_rewards", "group")) != "none"
    if is_scaled or getattr(args, "multi_objective_aggregation", "") == "normalize_then_sum":
        key = "scale_rewards" if is_scaled else "multi_objective_aggregation"
        words = f"{term} is exact only where rewards are not divided by their standard deviation, "
        words += f"and trl.{key} is {getattr(args, key, 'group')!r}"
        fix = 'set trl.scale_rewards = "none" and trl.multi_objective_aggregation = "sum_then_normalize", '
        fix += f"or leave trainer.{term} out."
        raise setting_errors.contradiction(words, where=f"trainer.{term}, trl.{key}", fix=fix)
    if options.kl_in_reward and not getattr(args, "beta", 0.0):
        words = "kl_in_reward weighs the KL by trl.beta, which is 0: nothing would be taken off the reward"
        fix = "set trl.beta above 0, for example 0.001, or trainer.kl_in_reward = false."
        raise setting_errors.contradiction(words, where="trainer.kl_in_reward, trl.beta", fix=fix)


def check_arguments(config: RunConfig, arguments: Any, options: PolicyOptions) -> None:
    """What cannot go together in TRL's arguments and our options, before anything is loaded: CR0760."""
    check_policy_options(options, arguments)
    largest = arguments.epsilon if arguments.epsilon_high is None else arguments.epsilon_high
    if arguments.loss_type == "cispo" and largest < 1:  # where TRL clamps CISPO's ratio
        words = f"with loss_type cispo every ratio above {largest} is cut to it, so even on-policy gradients would shrink"
        fix = 'set trl.epsilon_high = 5.0, the largest ratio that may pass, or trainer.preset = "cispo".'
        raise setting_errors.contradiction(words, where="trl.epsilon_high", fix=fix)
    has_stop_rule = config.agent is None and config.rollouts.prompt_style == "completion"
    setting_errors.refuse_masked_stops(arguments, stops_rows=has_stop_rule and config.trainer.prefix_sharing)
    if options.dynamic_sampling_rounds:
        setting_errors.refuse_split_groups(
            arguments, arguments.num_generations, num_processes=arguments.world_size
        )


_TOKENS = {"thinking_token": 1.0, "tool_call_token": 1.0, "tool_output_token": 0.1, "final_token": 1.0}
EFFORT_UNITS: Final[Mapping[str, float]] = _TOKENS | {"tool_call": 20.0, "turn": 20.0}
"""What one of each kind adds to x, the effort of a rollout: a choice of ours, since the originals are not published."""
EFFORT_COLUMN = "effort_counts"
"""A rollout function returns under it one mapping of kind to number for each row."""


def effort_units(counts: Mapping[str, Any]) -> float:
    """``x``, the counts times ``EFFORT_UNITS``; kinds that are not given count 0."""
    for kind, number in counts.items():
        if kind not in EFFORT_UNITS or not 0 <= float(number) < float("inf"):
            words = f"effort_counts has {kind} = {number!r}; it needs numbers from 0 of {', '.join(EFFORT_UNITS)}."
            fix = "return one mapping of these kinds to numbers for each rollout."
            raise UsageError("CR0777", words, where="the rollout function's effort_counts", fix=fix)
    return sum(EFFORT_UNITS[kind] * float(number) for kind, number in counts.items())
