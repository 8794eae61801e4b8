"""What is too much: one table of numbers, with the reason for each."""

from __future__ import annotations

from dataclasses import dataclass


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
