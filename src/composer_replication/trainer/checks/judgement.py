"""From the numbers of a step to findings. Standard library only; its memory is JSON and survives a resume."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple

from composer_replication.records import Finding


@dataclass(frozen=True, slots=True)
class CheckThresholds:
    """Limits of the checks.

    Attributes:
        max_token_drift: mean distance of sampling and training log-probability, nats. Engines in bf16 differ by
            0.01 to 0.02; a wrong temperature, template or off-by-one gives tenths or more.
        stops_at_drift: more than that stops the run before the step is taken, in the place of a warning.
        max_dull_share: share of groups without signal over the last ``window`` generations.
        min_effective_share: effective sample size of the tokens as a share of their number.
        max_truncated_share: share of tokens whose importance weight was cut.
        min_entropy_share: entropy of the last ``trend_steps`` steps over that of the first; recorded honest runs
            of the quick start came down to 0.11.
        min_length_share: the same for the number of loss-carrying tokens a row; recorded runs came to 0.56.
        max_truncated_groups: share of groups in which every completion met the length limit, over the window.
        window: generations.
        trend_steps: steps averaged at either end of a trend.
        num_zero_steps: steps in a row in which a channel is exactly 0.
        num_bad_steps: steps in a row that are not finite, after which the run stops.
    """

    max_token_drift: float = 0.05
    stops_at_drift: bool = False
    max_dull_share: float = 0.9
    min_effective_share: float = 0.5
    max_truncated_share: float = 0.1
    min_entropy_share: float = 0.05
    min_length_share: float = 0.25
    max_truncated_groups: float = 0.9
    window: int = 8
    trend_steps: int = 5
    num_zero_steps: int = 5
    num_bad_steps: int = 3


CATALOGUE: Final[Mapping[str, tuple[str, str]]] = {
    "token_drift": (
        "CR0765",
        "compare temperature, chat template and weights of the sampler with the trainer's.",
    ),
    "groups_without_signal": (
        "CR0766",
        "set trainer.dynamic_sampling_rounds, choose tasks that are neither solved nor out of reach, or stop.",
    ),
    "effective_sample_size": (
        "CR0767",
        "lower trl.learning_rate, trl.num_iterations or trl.steps_per_generation, or sync the sampler more often.",
    ),
    "entropy_collapse": (
        "CR0768",
        "lower trl.learning_rate, set trl.beta or trl.entropy_coef, or stop: nothing new will be sampled.",
    ),
    "length_collapse": (
        "CR0769",
        "read the rollouts: the reward may pay for short answers; see trainer.effort.",
    ),
    "non_finite": (
        "CR0770",
        "look at the saved batch; lower trl.learning_rate, or train in float32 or bf16 instead of fp16.",
    ),
    "zero_channel": (
        "CR0773",
        "see whether the channel gets data at all; take its weight out if it is not meant to be on.",
    ),
    "reward_and_mask": (
        "CR0774",
        "correct the rollout function's env_mask and completion ids, or the collator.",
    ),
    "truncated_groups": (
        "CR0775",
        "raise trl.max_completion_length, or let rows end earlier (trainer.prefix_sharing stops finished ones).",
    ),
}
"""Code and remedy of each check; the sentence is made of the numbers."""


class Judgement:
    """Remembers what a check needs, and says something when it begins to hold, not at every step.

    A finding that has gone and comes back is said again. A step that is not finite is said every time.

    Args:
        thresholds: the limits.
    """

    def __init__(self, thresholds: CheckThresholds | None = None) -> None:
        self.thresholds = thresholds or CheckThresholds()
        self._memory: dict[str, Any] = {
            "num_bad_in_a_row": 0,
            "said": [],
            "entropy": [[], []],  # the first values, and the newest
            "length": [[], []],
            "dull": [],
            "truncated": [],
            "zero_steps": {},
        }

    @property
    def num_bad_in_a_row(self) -> int:
        """Steps in a row, up to the newest one, that were not finite."""
        return int(self._memory["num_bad_in_a_row"])

    # ---- what is told ---------------------------------------------------------------------------

    def note_generation(self, *, num_groups: float, num_dull: float, num_truncated: float) -> None:
        """One generation: its groups, those with equal rewards, those with every completion cut off."""
        window = self.thresholds.window
        for name, number in (("dull", num_dull), ("truncated", num_truncated)):
            self._memory[name] = [*self._memory[name], [number, num_groups]][-window:]

    def judge(
        self, step: int, micro_steps: Sequence[Mapping[str, float]], facts: Mapping[str, Any]
    ) -> list[Finding]:
        """Judge one optimizer step.

        Args:
            step: of this step, from 1.
            micro_steps: one row of ``micro_step_figures`` each, of every process.
            facts: ``bad`` (what was not finite, or empty), ``first_part`` (words about the first token that
                parts), ``masks_truncated`` (rows without any mask are meant).
        """
        rows = [row for row in micro_steps if row]
        spoken = [
            *self._tokens(rows, facts),
            *self._channels(rows),
            *self._groups(),
            *([] if facts.get("bad") else self._trends(rows)),
        ]
        new = [said for said in spoken if said.key not in self._memory["said"]]
        self._memory["said"] = sorted(said.key for said in spoken)
        self._memory["num_bad_in_a_row"] = self.num_bad_in_a_row + 1 if facts.get("bad") else 0
        if facts.get("bad"):
            words = f"{facts['bad']} is not finite: the step is skipped ({self.num_bad_in_a_row} in a row)."
            new.append(_Said("non_finite", words, {"in_a_row": float(self.num_bad_in_a_row)}))
        return [_finding(step, said) for said in new]

    @property
    def must_stop(self) -> bool:
        return self.num_bad_in_a_row >= self.thresholds.num_bad_steps

    # ---- the checks ------------------------------------------------------------------------------

    def _tokens(self, rows: Sequence[Mapping[str, float]], facts: Mapping[str, Any]) -> Iterator[_Said]:
        """Log-probabilities, masks and importance weights of the step's tokens."""
        limits = self.thresholds
        num_tokens = _sum(rows, "num_drift_tokens")
        drift = _sum(rows, "drift_sum") / num_tokens if num_tokens else 0.0
        if drift > limits.max_token_drift:
            first_part = str(facts.get("first_part", ""))
            words = (
                f"sampling and training log-probabilities differ by {drift:.3g} nats a token on average"
                f"{first_part and '; ' + first_part}."
            )
            yield _Said("token_drift", words, {"mean": drift, "max": _max(rows, "drift_max")})
        unpaid, padded = _sum(rows, "num_paid_without_token"), _sum(rows, "num_rows_over_padding")
        if not facts.get("masks_truncated"):
            unpaid += _sum(rows, "num_paid_and_empty")
        if unpaid or padded:
            parts = []
            if unpaid:
                parts.append(f"{unpaid:.0f} row(s) have a reward that counts and no token that carries loss")
            if padded:
                parts.append(f"the mask of {padded:.0f} row(s) lies over padding or has a hole")
            yield _Said(
                "reward_and_mask", f"{' and '.join(parts)}.", {"unpaid_rows": unpaid, "padded_rows": padded}
            )
        kinds = ("policy_effective_share", "sampling_effective_share")
        lowest = min((row[kind] for row in rows for kind in kinds if kind in row), default=1.0)
        cut = _max(rows, "truncated_share")
        if lowest < limits.min_effective_share or cut > limits.max_truncated_share:
            words = (
                f"importance weights leave an effective sample size of {lowest:.0%} of the tokens, "
                f"and {max(cut, 0.0):.0%} of the weights are cut."
            )
            yield _Said("effective_sample_size", words, {"share": lowest, "cut": cut})

    def _channels(self, rows: Sequence[Mapping[str, float]]) -> Iterator[_Said]:
        """The policy gradient is zero where no advantage counts; another channel where its value is."""
        totals = {"grpo": _sum(rows, "num_paid_rows")} if rows else {}
        for name in {key for row in rows for key in row if key.startswith("channel/")}:
            totals[name.removeprefix("channel/")] = _sum(rows, name)
        before, most = self._memory["zero_steps"], self.thresholds.num_zero_steps
        now = {name: 0 if total else before.get(name, 0) + 1 for name, total in totals.items()}
        self._memory["zero_steps"] = now
        for name, num_steps in sorted(now.items()):
            if num_steps >= most:
                words = f"the channel {name} was exactly 0 in the last {most} steps."
                yield _Said("zero_channel", words, {"steps": float(num_steps)}, which=name)

    def _groups(self) -> Iterator[_Said]:
        """Shares of the groups of the last generations, once there are as many as the window."""
        limits = self.thresholds
        dull, truncated = self._memory["dull"], self._memory["truncated"]
        cut = "in {} every completion met the length limit."
        for name, pairs, most, words in (
            ("groups_without_signal", dull, limits.max_dull_share, "{} had equal rewards."),
            ("truncated_groups", truncated, limits.max_truncated_groups, cut),
        ):
            total = math.fsum(num_groups for _, num_groups in pairs)
            share = math.fsum(number for number, _ in pairs) / total if total else 0.0
            if len(pairs) >= limits.window and share > most:
                groups = f"{share:.0%} of the groups of the last {len(pairs)} generations"
                yield _Said(name, words.format(groups), {"share": share})

    def _trends(self, rows: Sequence[Mapping[str, float]]) -> Iterator[_Said]:
        """Length and entropy of the last steps beside those of the first."""
        limits = self.thresholds
        num_tokens, num_rows = _sum(rows, "num_tokens"), _sum(rows, "num_rows")
        if not num_tokens:
            return
        measured = [("length", "tokens a row", num_tokens / num_rows, limits.min_length_share)]
        if all("entropy_sum" in row for row in rows):
            entropy = _sum(rows, "entropy_sum") / num_tokens
            measured.append(("entropy", "entropy a token", entropy, limits.min_entropy_share))
        for name, what, value, floor in measured:
            share = self._share_of_first(name, value)
            if share is not None and share < floor:
                words = f"{what} of the last {limits.trend_steps} steps is {share:.1%} of that of the first."
                yield _Said(f"{name}_collapse", words, {"share": share, "newest": value})

    def _share_of_first(self, name: str, value: float) -> float | None:
        """Mean of the newest values over the mean of the first; None while the two ends would overlap."""
        num_steps = self.thresholds.trend_steps
        first, newest = self._memory[name]
        if len(first) < num_steps:
            first.append(value)
            return None
        newest[:] = [*newest, value][-num_steps:]
        start = math.fsum(first)
        return math.fsum(newest) / start if len(newest) == num_steps and start > 0 else None

    # ---- memory ------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """JSON-safe."""
        return deepcopy(self._memory)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._memory = deepcopy(dict(state))


class _Said(NamedTuple):
    """What a check says; ``which`` tells apart what one check says of several things."""

    name: str
    sentence: str
    figures: dict[str, float]
    which: str = ""

    @property
    def key(self) -> str:
        """Under which it is remembered that this was said."""
        return f"{self.name} {self.which}".strip()


def _finding(step: int, said: _Said) -> Finding:
    code, fix = CATALOGUE[said.name]
    severity: Literal["warning", "error"] = "error" if said.name == "non_finite" else "warning"
    return Finding(step, code, said.name, severity, said.sentence, fix, said.figures)


def _sum(rows: Sequence[Mapping[str, float]], key: str) -> float:
    return math.fsum(row[key] for row in rows if key in row)


def _max(rows: Sequence[Mapping[str, float]], key: str) -> float:
    return max((row[key] for row in rows if key in row), default=0.0)
