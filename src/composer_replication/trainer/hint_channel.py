"""Channel 2, hint distillation: the policy under a hint teaches the policy without it.

For a turn that went wrong the teacher scores the very ids that the student sampled, after a prompt that
differs by the hint; the student's distribution at those positions is moved towards the teacher's.
Hinted turns come from a ``hint_source``, which sees each generation.

Letters: M positions that carry loss, N turns, T completion columns, K tokens of the student's support.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from composer_replication.config import HintsSection
from composer_replication.interfaces import HintGenerator
from composer_replication.losses.chunked_head import logp_at, sampled_and_top_k_logp, sampled_logp
from composer_replication.losses.divergence import support_divergence
from composer_replication.losses.policy_terms import truncated_importance_weights
from composer_replication.records import HintedTurn
from composer_replication.trainer.collator import (
    HintedRows,
    collate_hinted_turns,
    matched_turns,
    rollouts_of,
    turns_that_fit,
)
from composer_replication.trainer.loss_channels import LossChannel, Scope, WeightCopy
from composer_replication.trainer.model_modes import evaluation_mode
from composer_replication.trainer.output_head import completion_states, head_of, scored_ids
from composer_replication.trainer.processes import gathered, num_processes, together
from composer_replication.trainer.setting_errors import TrainerSettingError

TOP_K, EMA_RATE = 100, 0.05
"""Tokens of the student's support, and how far a step moves the teacher that is an average: the reference's."""


def hint_loss(
    model: Any,
    rows: HintedRows,
    settings: HintsSection,
    *,
    num_tokens: float,
    teacher: Scope,
    autocast: Scope,
    sampling_temperature: float,
) -> tuple[torch.Tensor, dict[str, float]]:
    """The loss, and two means over its tokens for the log: the divergence before weights, nats, and the importance weight.

    L = sum_n w_n sum_t c_nt D_nt / num_tokens over the sampled ids of each turn.

    D is the divergence of student and teacher (``losses.divergence``) over the student's top k and one tail class;
    c = min(exp(logp - sampled_logp), 2), without gradient, 1 for an id whose sampled_logp is unknown; w_n is the turn's
    weight. The student carries gradient, the teacher none.

    Departs from the reference: SDPO averages tokens within a rollout first; here long and short turns weigh by their tokens,
    as the policy-gradient channel does. Reference: Reinforcement Learning via Self-Distillation (2026, arXiv 2601.20802).

    ``num_tokens`` are those of the whole optimizer step; under ``teacher`` the model is the teacher; the ids were sampled at
    ``sampling_temperature``, which their log-probabilities belong to.
    """
    mask_NT, ids_M = rows.student.loss_mask_NT.bool(), scored_ids(rows.student)
    with autocast():
        states_MH, head = completion_states(model, rows.student), head_of(model)
        weight_VH, options = head.weight_VH, head.arguments()
        top_k = min(TOP_K, weight_VH.size(0))
        given = (states_MH, weight_VH, ids_M)
        logp_M, top_logp_MK, top_index_MK = sampled_and_top_k_logp(
            *given, k=top_k, temperature=1.0, **options
        )
        now_M = logp_M.detach()
        if sampling_temperature != 1.0:
            with torch.no_grad():
                now_M = sampled_logp(*given, temperature=sampling_temperature, **options)
    with teacher(), torch.no_grad(), autocast():
        hidden_MH, head = completion_states(model, rows.teacher), head_of(model)
        teacher_MK = logp_at(hidden_MH, head.weight_VH, top_index_MK, **head.arguments())
    divergence_M = support_divergence(top_logp_MK, teacher_MK, jsd_alpha=settings.jsd_alpha)
    sampled_M = rows.sampled_logp_NT[mask_NT].to(now_M.dtype)
    ratio_M, _ = truncated_importance_weights(now_M, sampled_M, torch.ones_like(now_M))
    turn_weight_M = rows.weight_N[:, None].expand(mask_NT.shape)[mask_NT]
    loss = (turn_weight_M * ratio_M * divergence_M).sum() / num_tokens
    return loss, {
        "divergence": float(divergence_M.detach().mean()),
        "importance_weight": float(ratio_M.mean()),
    }


TURN_ROW = "hint_row"
"""Under this name a batch says which row of its generation each row (B,) is: TRL shuffles and splits them."""


class HintChannel(LossChannel):
    """Hinted turns, of a source that is asked about each generation, into the batch, and their loss out of it.

    Attributes:
        turns_of_row: hinted turns of the newest generation, by its rows in the order of sampling.
        teacher_weights: None where the teacher is the model without its adapter.
    """

    def __init__(self, trainer: Any, settings: HintsSection, source: HintGenerator | None) -> None:
        super().__init__(trainer)
        if source is None:
            raise self.nothing_to_learn()
        self.settings, self.source = settings, source
        self.turns_of_row: Sequence[Sequence[HintedTurn]] = ()
        self.teacher_weights: WeightCopy | None = None

    @staticmethod
    def nothing_to_learn() -> TrainerSettingError:
        """The error for hint distillation without a source of hinted turns."""
        words = "alpha_sdpo is not 0, but there is no hint_source to learn from."
        fix = "pass a hint_source, or set alpha_sdpo to 0."
        where = "ComposerReplicationTrainer(hint_source=)"
        return TrainerSettingError("CR0755", words, where=where, fix=fix)

    def check_model(self, model: Any) -> None:
        """Refuse a model that has no such teacher."""
        configs = getattr(model, "peft_config", None) or {}
        kinds = {str(getattr(config.peft_type, "value", config.peft_type)) for config in configs.values()}
        if self.settings.teacher == "lora-off" and "LORA" not in kinds:
            words = 'the teacher "lora-off" is the model without its adapter, and this model has none.'
            fix = 'add a [model.lora] table, or take the teacher "ema" or "frozen".'
            raise TrainerSettingError("CR0755", words, where="hints.teacher", fix=fix)

    def begin(self) -> None:
        if self.settings.teacher != "lora-off":
            self.teacher_weights = WeightCopy(self._model)

    def after_step(self) -> None:
        if self.settings.teacher == "ema" and self.teacher_weights is not None:
            self.teacher_weights.move_towards(self._model, EMA_RATE)

    # ---- into the batch ---------------------------------------------------------------------------

    def after_generation(self, rows: Any, batch: dict[str, Any], rewards: Sequence[float | None]) -> None:
        """Ask the hint source about a fresh generation; its turns join the batch as tensors."""
        tokenizer, ends = self._trainer._tokenizer, self._trainer.eos_token_ids  # noqa: SLF001 - TRL's only name
        rollouts = rollouts_of(rows, batch, rewards, tokenizer, step=self._step, eos_token_ids=ends)
        source, before = self.source, Counter(getattr(self.source, "counts", {}))
        matched = together(lambda: matched_turns(source.hinted_turns(rollouts), rollouts))
        turns, num_too_long = together(lambda: turns_that_fit(matched, self._model))
        self.turns_of_row = turns
        batch[TURN_ROW] = torch.arange(len(turns), device=self._device)
        num_tokens = sum(len(turn.completion_ids) for of_row in turns for turn in of_row)
        batch["hint_num_tokens"] = self._gathered_sum(num_tokens)
        self._note("sdpo", turns_left_out=float(num_too_long))
        counted, total = Counter(getattr(source, "counts", {})), Counter[str]()
        counted.subtract(before)
        for added in gathered(counted):
            total.update(added)
        self._note("hint_source", **{name: float(number) for name, number in total.items()})

    # ---- out of the batch -------------------------------------------------------------------------

    def loss(self, model: Any, inputs: Any) -> torch.Tensor:
        """Mean over all hinted tokens of the optimizer step of weight times divergence; this micro-batch's part.

        The mean is over the step's tokens and not the micro-batch's, so that the gradient does not depend on how
        a step is split.
        """
        turns, pad_id = self.turns_in(inputs), self._pad_id
        self._note("sdpo", turns=float(len(turns)))
        stand_in = HintedTurn((pad_id,), (pad_id, pad_id), (pad_id,))
        own = self._collated(turns) if turns else None
        if (rows := self._rows_to_forward(own, lambda: self._collated([stand_in]))) is None:
            return torch.zeros((), device=self._device)
        loss, figures = hint_loss(
            model,
            rows,
            self.settings,
            num_tokens=float(inputs["hint_num_tokens"]) * self._window_share(),
            teacher=self._teacher_in_place,
            autocast=self._trainer.accelerator.autocast,
            sampling_temperature=self._trainer.temperature,
        )
        if not turns:
            return loss * 0.0
        self._note("sdpo", **figures)
        return loss * num_processes()

    def turns_in(self, inputs: Any) -> list[HintedTurn]:
        """The hinted turns of the rows of a micro-batch."""
        rows = inputs[TURN_ROW].tolist() if TURN_ROW in inputs else []
        return [turn for row in rows for turn in self.turns_of_row[row]]

    def _collated(self, turns: Sequence[HintedTurn]) -> HintedRows:
        return collate_hinted_turns(turns, pad_id=self._pad_id).to(self._device)

    @contextmanager
    def _teacher_in_place(self) -> Iterator[None]:
        """Inside, the model is the teacher: its weights, and no dropout."""
        model, weights = self._model, self.teacher_weights
        with (
            model.disable_adapter() if weights is None else weights.in_place_of(model),
            evaluation_mode(model),
        ):
            yield
