"""Every check: its name, stable code and what to do."""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

Level = Literal["note", "warning", "error"]


class CheckText(NamedTuple):
    """Code, level and remedy of one check; the sentence is made of the numbers."""

    code: str
    level: Level
    fix: str


CATALOGUE: Final[dict[str, CheckText]] = {
    "token_drift": CheckText(
        "CR0765",
        "warning",
        "compare temperature, chat template and weights of the sampler with the trainer's.",
    ),
    "groups_without_signal": CheckText(
        "CR0766",
        "warning",
        "set trainer.dynamic_sampling_rounds, choose tasks that are neither solved nor out of reach, or stop.",
    ),
    "effective_sample_size": CheckText(
        "CR0767",
        "warning",
        "lower trl.learning_rate, trl.num_iterations or trl.steps_per_generation, or sync the sampler more often.",
    ),
    "entropy_collapse": CheckText(
        "CR0768",
        "warning",
        "lower trl.learning_rate, set trl.beta or trl.entropy_coef, or stop: nothing new will be sampled.",
    ),
    "length_collapse": CheckText(
        "CR0769", "warning", "read the rollouts: the reward may pay for short answers; see trainer.effort."
    ),
    "non_finite": CheckText(
        "CR0770",
        "error",
        "look at the saved batch; lower trl.learning_rate, or train in float32 or bf16 instead of fp16.",
    ),
    "zero_channel": CheckText(
        "CR0773",
        "warning",
        "see whether the channel gets data at all; take its weight out if it is not meant to be on.",
    ),
    "reward_and_mask": CheckText(
        "CR0774", "warning", "correct the rollout function's env_mask and completion ids, or the collator."
    ),
    "truncated_groups": CheckText(
        "CR0775",
        "warning",
        "raise trl.max_completion_length, or let rows end earlier (trainer.prefix_sharing stops finished ones).",
    ),
}
