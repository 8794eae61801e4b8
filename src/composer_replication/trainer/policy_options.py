"""What the policy-gradient channel does beyond TRL, as one record, and what cannot go together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from composer_replication.config import EffortSection
from composer_replication.errors import UsageError
from composer_replication.trainer.setting_errors import TrainerSettingError

EFFORT_UNITS: Final[Mapping[str, float]] = {
    "thinking_token": 1.0,
    "tool_call_token": 1.0,
    "tool_output_token": 0.1,
    "final_token": 1.0,
    "tool_call": 20.0,
    "turn": 20.0,
}
"""What one of each kind adds to x, the effort of a rollout: a choice of ours, since the originals are not published."""


@dataclass(frozen=True, slots=True)
class PolicyOptions:
    """The policy-gradient channel's own settings; as they stand by default, nothing differs from TRL.

    Attributes:
        kl_in_reward: ``args.beta`` times the summed log-ratio to the reference is taken off the reward,
            centred in the group; TRL's own KL term in the loss is then off.
        effort: what effort costs; None is nothing.
        dynamic_sampling_rounds: how often, at most, the groups of one generation whose rewards are all equal
            are replaced by fresh prompts; not those that earned something and differ in effort.
        importance_clip: largest importance weight of a token where a rollout function gave the sampler's
            log-probabilities; 0 corrects nothing. (With vLLM TRL corrects by its own settings.)
    """

    kl_in_reward: bool = False
    effort: EffortSection | None = None
    dynamic_sampling_rounds: int = 0
    importance_clip: float = 0.0

    @property
    def has_reward_terms(self) -> bool:
        """Something is folded into the reward."""
        return self.kl_in_reward or (self.effort is not None and self.effort.weight != 0.0)


def check_policy_options(options: PolicyOptions, args: Any) -> None:
    """Refuse what would give another gradient than it says.

    Args:
        options: ours.
        args: TRL's ``GRPOConfig``; None where the trainer was given none.

    Raises:
        TrainerSettingError: a term in the reward while advantages are divided by a standard deviation (CR0760), or the
            KL in the reward with weight 0 (CR0760).
    """
    if not options.has_reward_terms:
        return
    scaling = getattr(args, "scale_rewards", "group")
    if isinstance(scaling, bool):  # TRL takes both
        scaling = "group" if scaling else "none"
    is_normalised = getattr(args, "multi_objective_aggregation", "") == "normalize_then_sum"
    if scaling == "none" and not is_normalised:
        if options.kl_in_reward and not getattr(
            args, "beta", 0.0
        ):  # TRL's own default: the policy would be held to nothing
            raise TrainerSettingError(
                "CR0760",
                "kl_in_reward weighs the KL by trl.beta, which is 0: nothing would be taken off the reward.",
                where="trainer.kl_in_reward, trl.beta",
                fix="set trl.beta above 0, for example 0.001, or trainer.kl_in_reward = false.",
            )
        return
    term = "kl_in_reward" if options.kl_in_reward else "effort"
    key = "multi_objective_aggregation" if scaling == "none" else "scale_rewards"
    raise TrainerSettingError(
        "CR0760",
        f"{term} is exact only where rewards are not divided by their standard deviation, "
        f"and trl.{key} is {getattr(args, key, 'group')!r}.",
        where=f"trainer.{term}, trl.{key}",
        fix='set trl.scale_rewards = "none" and trl.multi_objective_aggregation = "sum_then_normalize", '
        f"or leave trainer.{term} out.",
    )


EFFORT_COLUMN = "effort_counts"
"""Under this name a rollout function returns one mapping of kind to number for each row."""


def effort_units(counts: Mapping[str, Any]) -> float:
    """``x``, the counts times ``EFFORT_UNITS``; kinds that are not given count 0.

    Raises:
        UsageError: an unknown kind, or a number below 0 or not finite (CR0777).
    """
    for kind, number in counts.items():
        if kind not in EFFORT_UNITS or not 0 <= float(number) < float("inf"):
            raise UsageError(
                "CR0777",
                f"effort_counts has {kind} = {number!r}; it needs numbers from 0 of {', '.join(EFFORT_UNITS)}.",
                where="the rollout function's effort_counts",
                fix="return one mapping of these kinds to numbers for each rollout.",
            )
    return sum(EFFORT_UNITS[kind] * float(number) for kind, number in counts.items())
