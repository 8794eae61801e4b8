"""The hint-distillation loss of a batch of turns, given a way to put the teacher in the student's place.

Letters: M positions that carry loss, N turns, T completion columns, K tokens of the student's support.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from composer_replication.channel_tables import HintsSection
from composer_replication.losses.chunked_head import logp_at, sampled_and_top_k_logp, sampled_logp
from composer_replication.losses.divergence import support_divergence
from composer_replication.losses.hint_distillation import (
    HintDistillationMetrics,
    certainty_weights,
    hint_distillation_loss,
    importance_weights,
)
from composer_replication.trainer.collator import HintedRows
from composer_replication.trainer.completion_states import completion_states, scored_ids
from composer_replication.trainer.output_head import Head, head_of

Scope = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True, slots=True)
class HintLoss:
    """The loss with gradient; the rest is for the log."""

    loss: torch.Tensor
    metrics: HintDistillationMetrics
    importance_weight: float
    """Mean over tokens."""
    teacher_entropy: float | None
    """Mean over tokens, nats; None where no setting asks for it."""


def hint_loss(
    model: Any,
    rows: HintedRows,
    settings: HintsSection,
    *,
    num_tokens: float,
    teacher: Scope,
    autocast: Scope,
    sampling_temperature: float,
) -> HintLoss:
    """L = sum_n w_n g_n sum_t c_nt D_nt / num_tokens over the sampled ids of each turn.

    D is the divergence of student and teacher (``losses.divergence``) over the student's top k and one tail class;
    c = min(exp(logp - sampled_logp), 2) exp(-entropy_decay H_teacher), without gradient, its first factor 1
    for an id whose sampled_logp is unknown; g_n is 0 for a turn whose mean divergence is below min_divergence; w_n is its
    weight. The student carries gradient, the teacher none.

    Args:
        model: the student.
        rows: the turns.
        settings: the ``[hints]`` table.
        num_tokens: hinted tokens of the whole optimizer step, gated ones too.
        teacher: a context in which ``model`` is the teacher.
        autocast: a context for forwards.
        sampling_temperature: at which the ids were sampled, which their log-probabilities belong to.
    """
    mask_NT = rows.student.loss_mask_NT.bool()
    with autocast():
        states_MH, head = completion_states(model, rows.student), head_of(model)
        scores = sampled_and_top_k_logp(
            states_MH,
            head.weight_VH,
            scored_ids(rows.student),
            k=min(settings.top_k, head.weight_VH.size(0)),
            temperature=1.0,
            **head.arguments(),
        )
        now_M = scores.logp_N.detach()
        if sampling_temperature != 1.0:
            now_M = _logp_at_temperature(states_MH, head, rows, sampling_temperature)
    with teacher(), torch.no_grad(), autocast():
        teacher_MK, entropy_M = _teacher_logps(model, rows, scores.top_index_NK, settings)
    divergence_M = support_divergence(scores.top_logp_NK, teacher_MK, jsd_alpha=settings.jsd_alpha)
    sampled_M = rows.sampled_logp_NT[mask_NT].to(now_M.dtype)
    sampled_M = torch.where(sampled_M.isnan(), now_M, sampled_M)
    weight_M = ratio_M = importance_weights(now_M, sampled_M, mask_NT[mask_NT])
    if entropy_M is not None:
        weight_M = ratio_M * certainty_weights(entropy_M, strength=settings.entropy_decay)
    loss, metrics = hint_distillation_loss(
        _in_rows(divergence_M, mask_NT),
        mask_NT,
        weight_BT=_in_rows(weight_M, mask_NT),
        turn_weight_B=rows.weight_N,
        gate_threshold=settings.min_divergence,
        num_tokens=num_tokens,
    )
    entropy = None if entropy_M is None else float(entropy_M.mean())
    return HintLoss(loss, metrics, float(ratio_M.mean()), entropy)


def _teacher_logps(
    model: Any, rows: HintedRows, index_MK: torch.Tensor, settings: HintsSection
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The student's support under the teacher, and the teacher's entropy where a setting asks for it."""
    states_MH, head = completion_states(model, rows.teacher), head_of(model)
    options = {"temperature": 1.0, **head.arguments()}
    logp_MK = logp_at(states_MH, head.weight_VH, index_MK, **options)
    if not settings.entropy_decay:
        return logp_MK, None
    return logp_MK, sampled_logp(states_MH, head.weight_VH, scored_ids(rows.teacher), **options)[1]


@torch.no_grad()
def _logp_at_temperature(
    states_MH: torch.Tensor, head: Head, rows: HintedRows, temperature: float
) -> torch.Tensor:
    ids_M = scored_ids(rows.student)
    return sampled_logp(states_MH, head.weight_VH, ids_M, temperature=temperature, **head.arguments())[0]


def _in_rows(values_M: torch.Tensor, mask_NT: torch.Tensor) -> torch.Tensor:
    """The flat values at the places of the mask, zeros elsewhere."""
    return values_M.new_zeros(mask_NT.shape).masked_scatter(mask_NT, values_M)
