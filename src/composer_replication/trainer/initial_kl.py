"""How far is the policy from where it started? The KL path of the guard at beta 0.

TRL logs a KL only with a reference model. With adapters the initial policy is one switch
away, so the distance is estimated on the tokens at hand, without generating any.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import torch


class KlPath(StrEnum):
    """Where the guard's KL to the initial policy comes from."""

    LOGGED = "logged by TRL"
    ADAPTER_OFF = "estimated with the adapter off"
    OFF = "off"


def choose_kl_path(model: Any, *, beta: float, sync_ref_model: bool) -> tuple[KlPath, str]:
    """The KL path for this model, and the reason when it is off.

    Args:
        model: the policy before its first step, PEFT-wrapped or not.
        beta: TRL's KL weight; above 0 TRL logs the KL to a frozen copy.
        sync_ref_model: TRL moves its reference model, so its KL is not to the initial policy.
    """
    if beta != 0.0:
        if sync_ref_model:
            return KlPath.OFF, "sync_ref_model moves the reference, so its KL is not to the initial policy"
        return KlPath.LOGGED, ""
    configs = getattr(model, "peft_config", None)
    if not isinstance(configs, dict):
        return KlPath.OFF, "full fine-tuning at beta 0 keeps no copy of the initial weights"
    reason = _adapter_reason(model, configs)
    return (KlPath.OFF, reason) if reason else (KlPath.ADAPTER_OFF, "")


def _adapter_reason(model: Any, configs: dict[str, Any]) -> str:
    """Why switching the adapter off would not give the initial policy; empty when it does."""
    for config in configs.values():
        kind = str(getattr(config.peft_type, "value", config.peft_type))
        if kind != "LORA":
            return f"a {kind} adapter is not known to be the identity before training"
        if getattr(config, "bias", "none") != "none":
            return "the adapter trains biases of the base model, which stay when it is switched off"
    for name, parameter in model.named_parameters():
        if ("lora_B" in name or "lora_embedding_B" in name) and bool(parameter.detach().any()):
            return "the adapter is not zero before training, so without it the policy is not the initial one"
    return ""


def k3_sum(policy_logp_BT: torch.Tensor, initial_logp_BT: torch.Tensor, mask_BT: torch.Tensor) -> tuple[float, float]:
    """Sum of the k3 estimate over unmasked tokens, nats, and the number of tokens.

    k3 = exp(r) - 1 - r with r = initial_logp - policy_logp: non-negative, and for tokens
    drawn from the policy an unbiased estimate of KL(policy || initial). In float64, where
    exp(r) - 1 - r keeps its digits for small r. Shapes: B rollouts, T completion tokens.

    Tokens that an older policy drew (several updates on one generation) bias the estimate
    slightly. Reference: Schulman, Approximating KL Divergence (2020).
    """
    mask = mask_BT.bool()
    difference = (initial_logp_BT.double() - policy_logp_BT.double())[mask]
    return float((torch.expm1(difference) - difference).sum()), float(mask.sum())
