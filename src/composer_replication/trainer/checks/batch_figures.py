"""The numbers of one micro-step, from tensors that the loss has made anyway.

Shapes: B rows, P prompt and T completion tokens. Everything is reduced on the device and read once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from composer_replication.losses.policy_terms import effective_share


def micro_step_figures(
    inputs: Mapping[str, Any],
    *,
    loss: torch.Tensor,
    policy_logp_BT: torch.Tensor,
    entropy_BT: torch.Tensor | None,
    pad_token_id: int,
    channels: Mapping[str, torch.Tensor],
    parting: float,
) -> dict[str, float]:
    """Measure one micro-step.

    Args:
        inputs: what TRL hands to ``_compute_loss``.
        loss: its result, a scalar.
        policy_logp_BT: log-probabilities of the completion under the weights at hand, nats.
        entropy_BT: their entropies, if they were computed.
        pad_token_id: of the tokenizer.
        channels: scalar values of the further loss channels, by name.
        parting: distance in nats from which sampling and training log-probability part.

    Returns:
        Name to number; only what could be measured. ``num_*`` are counts, ``*_sum`` are to be added up over
        micro-steps. ``parts_at`` is row * T + position of the first token that parts, -1 where none does.
    """
    completion_mask_BT = inputs["completion_mask"].bool()
    mask_BT = completion_mask_BT & inputs["tool_mask"].bool() if "tool_mask" in inputs else completion_mask_BT
    advantages = inputs["advantages"]
    is_paid_B = (advantages != 0).reshape(advantages.size(0), -1).any(-1)
    scalars: dict[str, torch.Tensor] = {
        "is_finite": torch.isfinite(loss.detach()),
        "num_tokens": mask_BT.sum(),
        "num_rows": torch.tensor(mask_BT.size(0), device=mask_BT.device),
        "num_paid_rows": (is_paid_B & mask_BT.any(-1)).sum(),
        "num_paid_without_token": (is_paid_B & ~mask_BT.any(-1) & completion_mask_BT.any(-1)).sum(),
        "num_paid_and_empty": (is_paid_B & ~completion_mask_BT.any(-1)).sum(),
        "num_rows_over_padding": _over_padding(inputs, completion_mask_BT, pad_token_id).sum(),
    }
    if entropy_BT is not None:
        scalars["entropy_sum"] = (entropy_BT.detach() * mask_BT).sum()
    old_BT = inputs.get("old_per_token_logps")
    if old_BT is not None:
        scalars["policy_effective_share"] = effective_share((policy_logp_BT - old_BT)[mask_BT].exp())
    sampled_BT = inputs.get("sampling_per_token_logps")
    if sampled_BT is not None:
        scalars |= _drift(policy_logp_BT if old_BT is None else old_BT, sampled_BT, mask_BT, parting)
    for name, value in channels.items():
        scalars[f"channel/{name}"] = value.detach().abs()
    numbers = torch.stack(
        [value.double().reshape(()).to(mask_BT.device) for value in scalars.values()]
    ).tolist()
    return dict(zip(scalars, numbers, strict=True))


def _over_padding(
    inputs: Mapping[str, Any], completion_mask_BT: torch.Tensor, pad_token_id: int
) -> torch.Tensor:
    """Rows (B,) whose mask has a hole, whose prompt mask has one, or which carry loss on trailing padding.

    Completions are padded on the right and prompts on the left, so a completion's mask may only fall and a
    prompt's only rise. One padding token at a row's end may have been sampled (it may be the end token), two cannot.
    """
    has_hole_B: torch.Tensor = (completion_mask_BT[:, 1:] & ~completion_mask_BT[:, :-1]).any(-1)
    prompt_mask_BP: torch.Tensor = inputs["prompt_mask"].bool()
    has_hole_B = has_hole_B | (prompt_mask_BP[:, :-1] & ~prompt_mask_BP[:, 1:]).any(-1)
    if completion_mask_BT.size(1) < 2:
        return has_hole_B
    length_B = completion_mask_BT.sum(-1)
    is_pad_BT: torch.Tensor = inputs["completion_ids"] == pad_token_id
    last_B1 = (length_B - 1).clamp(min=1)[:, None]
    ends_in_pads_B = (is_pad_BT.gather(1, last_B1) & is_pad_BT.gather(1, last_B1 - 1))[:, 0]
    return has_hole_B | (ends_in_pads_B & (length_B >= 2))


def _drift(
    policy_logp_BT: torch.Tensor, sampled_logp_BT: torch.Tensor, mask_BT: torch.Tensor, parting: float
) -> dict[str, torch.Tensor]:
    """How far the sampler's log-probabilities are from the trainer's, and where they part first."""
    known_BT = mask_BT & ~torch.isnan(sampled_logp_BT)
    distance_BT = torch.where(known_BT, (policy_logp_BT.detach() - sampled_logp_BT).abs(), 0.0)
    parts_BT = distance_BT > parting
    # The earliest position counts, and among rows the first: position-major order.
    parts_TB = parts_BT.T.reshape(-1).to(torch.uint8)
    first = parts_TB.argmax()
    num_rows = distance_BT.size(0)
    parts_at = (first % num_rows) * distance_BT.size(1) + first // num_rows
    return {
        "drift_sum": distance_BT.double().sum(),
        "num_drift_tokens": known_BT.sum(),
        "drift_max": distance_BT.max() if distance_BT.numel() else distance_BT.new_zeros(()),
        "parts_at": torch.where(parts_BT.any(), parts_at, torch.full_like(parts_at, -1)),
    }
