"""How far is the policy from where it started? The KL path of the guard at beta 0.

TRL logs a KL only with a reference model. With adapters the initial policy is one switch
away, and a loss channel may keep a copy of the first weights: then the distance is estimated
on the tokens at hand, without generating any.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from enum import StrEnum
from typing import Any

import torch

from composer_replication.interfaces import Guard
from composer_replication.trainer.chained_rows import COLUMN as SEGMENT_STARTS
from composer_replication.trainer.processes import process_rank
from composer_replication.trainer.weight_copy import WeightCopy

logger = logging.getLogger(__name__)


class KlPath(StrEnum):
    """Where the guard's KL to the initial policy comes from."""

    LOGGED = "logged by TRL"
    ADAPTER_OFF = "estimated with the adapter off"
    FIRST_WEIGHTS = "estimated with the first weights"
    OFF = "off"


def kl_path_of(
    model: Any, *, beta: float, sync_ref_model: bool, has_first_weights: bool = False
) -> tuple[KlPath, str]:
    """The KL path for this model, and the reason when it is off.

    Args:
        model: the policy before its first step, PEFT-wrapped or not.
        beta: TRL's KL weight; above 0 TRL logs the KL to a frozen copy.
        sync_ref_model: TRL moves its reference model, so its KL is not to the initial policy.
        has_first_weights: a copy of the trained weights as they are before the first step is kept anyway.
    """
    path, reason = _path_without_copy(model, beta=beta, sync_ref_model=sync_ref_model)
    return (KlPath.FIRST_WEIGHTS, "") if path is KlPath.OFF and has_first_weights else (path, reason)


def _path_without_copy(model: Any, *, beta: float, sync_ref_model: bool) -> tuple[KlPath, str]:
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


def log_ratio_sum(
    policy_logp_BT: torch.Tensor, initial_logp_BT: torch.Tensor, mask_BT: torch.Tensor
) -> tuple[float, float]:
    """Sum of policy_logp - initial_logp over unmasked tokens, nats, and the number of tokens.

    The k1 estimate: for tokens drawn from the policy its mean is KL(policy || initial),
    unbiased; a small sample can come out below zero. k3, which cannot, has exp(initial_logp -
    policy_logp) in it: one token that the policy hardly ever writes and the initial model
    likes outweighs a whole batch, and a kill switch that reads it halts honest runs. Summed in
    float64. Shapes: B rollouts, T completion tokens.

    Tokens that an older policy drew (several updates on one generation) bias the estimate
    slightly. Reference: Schulman, Approximating KL Divergence (2020).
    """
    difference = (policy_logp_BT.double() - initial_logp_BT.double())[mask_BT.bool()]
    return float(difference.sum()), float(difference.numel())


class InitialKl:
    """A mixin of the trainer: which KL path the run has, and one sample of it.

    Attributes:
        kl_path_off_reason: why the guard gets no KL, or None.
    """

    heldout_guard: Guard | None = None
    kl_path_off_reason: str | None = None
    model: Any
    args: Any
    beta: Any
    _kl_beta: float = 0.0
    accelerator: Any
    _get_per_token_logps_and_entropies: Any
    _chained_as: Any
    _routed_as: Any
    _keeps_first_weights: Callable[[], bool]
    _first_weight_copy: Callable[[], WeightCopy | None]
    _kl_path: KlPath = KlPath.LOGGED
    _kl_path_is_chosen: bool = False
    _fold_rows: Any = None

    def choose_kl_path(self) -> str | None:
        """Decide where the guard's KL comes from; ``kl_path_off_reason`` afterwards, for a start screen."""
        if self.heldout_guard is not None and not self._kl_path_is_chosen:
            self._kl_path, reason = kl_path_of(
                self.model,
                beta=self.beta or self._kl_beta,
                sync_ref_model=bool(self.args.sync_ref_model),
                has_first_weights=self._keeps_first_weights(),
            )
            self.kl_path_off_reason = reason or None
            self._kl_path_is_chosen = True
            if reason and process_rank() == 0:
                logger.warning("KL path off: %s.", reason)
        return self.kl_path_off_reason

    def _sample_initial_kl(self) -> tuple[float, float] | None:
        """Sum of k1 over the tokens of this micro-batch and their number: a forward of either policy, without gradient."""
        rows = self._fold_rows
        if rows is None:
            return None
        num_columns = rows["completion_ids"].size(1)
        input_ids = torch.cat([rows["prompt_ids"], rows["completion_ids"]], dim=1)
        attention_mask = torch.cat([rows["prompt_mask"], rows["completion_mask"]], dim=1)
        with torch.no_grad(), self._chained_as(rows.get(SEGMENT_STARTS)):
            with self._routed_as(rows):
                policy_logps, *_ = self._get_per_token_logps_and_entropies(
                    self.model, input_ids, attention_mask, num_columns
                )
            with self._as_initial_policy():
                initial_logps, *_ = self._get_per_token_logps_and_entropies(
                    self.model, input_ids, attention_mask, num_columns
                )
        return log_ratio_sum(policy_logps, initial_logps, rows["completion_mask"] * rows.get("tool_mask", 1))

    def _as_initial_policy(self) -> AbstractContextManager[None]:
        model = self.accelerator.unwrap_model(self.model)
        if self._kl_path is KlPath.ADAPTER_OFF:
            scope: AbstractContextManager[None] = model.disable_adapter()
            return scope
        first = self._first_weight_copy()
        if first is None:
            raise RuntimeError("no copy of the first weights was made")  # _keeps_first_weights said so
        return first.in_place_of(model)
