"""What prime-rl is given: our losses behind its contract of a custom loss.

    [trainer.loss]
    type = "custom"
    import_path = "composer_replication.engines.prime_rl_loss.composer"
    kwargs = { clip_low = 0.2, clip_high = 0.28 }

prime-rl calls it for each sample, adds up what it returns, and divides by the number of tokens in the whole step. Its own
advantage, a reward less the mean of its group, is ours (``group_advantages``). Letters: T tokens of one sample, N of them that count.
"""

from __future__ import annotations

import importlib
from typing import Any, Protocol

import torch

from composer_replication.engines.group_objective import clipped_objective
from composer_replication.losses.policy_terms import truncated_importance_weights


class Sample(Protocol):
    """What is read of prime-rl's ``LossInputs``; each (T,)."""

    trainer_logprobs: torch.Tensor
    inference_logprobs: torch.Tensor
    advantages: torch.Tensor
    loss_mask: torch.Tensor
    """True where a token was sampled and counts."""
    loss_weights: torch.Tensor | None


def composer(inputs: Sample, *, clip_low: float = 0.2, clip_high: float = 0.2) -> Any:
    """sum_t -w_t min(r_t A_t, clip(r_t) A_t) over unmasked tokens, r_t = exp(trainer - inference); see ``clipped_objective``.

    prime-rl has no log-probabilities of its own from before the update, so the sampler's are the old ones. As prime-rl's
    ``LossOutputs``, with the mean of abs(r - 1) as its metric.
    """
    logp_N, sampler_logp_N, advantage_N, weight_N = _kept(inputs)
    loss_N = clipped_objective(
        logp_N, sampler_logp_N, advantage_N, weight_N, clip_low=clip_low, clip_high=clip_high
    )
    return _outputs(loss_N, logp_N - sampler_logp_N, {})


def composer_tis(inputs: Sample, *, clip: float = 2.0) -> Any:
    """sum_t -w_t min(r_t, clip) A_t over unmasked tokens, r without gradient; see ``truncated_importance_weights``.

    Its gradient is that of ``-min(r, clip) A logp``: no token loses it, however far sampler and trainer are apart.
    """
    logp_N, sampler_logp_N, advantage_N, weight_N = _kept(inputs)
    if len(logp_N) == 0:
        return _outputs(logp_N, logp_N, {})
    truncated_N, metrics = truncated_importance_weights(
        logp_N, sampler_logp_N, torch.ones_like(logp_N), clip=clip
    )
    loss_N = clipped_objective(logp_N, logp_N.detach(), advantage_N, truncated_N * weight_N)
    share = {"composer/effective_share": metrics.effective_sample_share}
    return _outputs(loss_N, logp_N - sampler_logp_N, share)


def _kept(inputs: Sample) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The N tokens that count. What stands at the others may be anything, and must not reach a gradient."""
    logp_T, kept_T = inputs.trainer_logprobs, inputs.loss_mask
    weight_T = torch.ones_like(logp_T) if inputs.loss_weights is None else inputs.loss_weights
    return logp_T[kept_T], inputs.inference_logprobs[kept_T], inputs.advantages[kept_T], weight_T[kept_T]


def _outputs(loss_N: torch.Tensor, log_ratio_N: torch.Tensor, metrics: dict[str, torch.Tensor]) -> Any:
    distance = (log_ratio_N.detach().exp() - 1.0).abs().sum() / max(len(log_ratio_N), 1)
    outputs = importlib.import_module("prime_rl.trainer.rl.loss").LossOutputs
    return outputs(loss=loss_N.sum(), metrics={"composer/ratio_distance": distance, **metrics})
