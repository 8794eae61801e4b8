"""Channel 3, replayed preferences: pairs of answers to one prompt, mixed into the same step.

Pairs are given (``replay_pairs``), or made of passing and failing siblings of one group.

Letters: P pairs, N answers, M positions that carry loss, T completion columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from statistics import fmean
from typing import Any

import torch

from composer_replication.config import ReplaySection
from composer_replication.losses.chunked_head import sampled_logp
from composer_replication.losses.preferences import preference_loss, sequence_logp
from composer_replication.records import PreferencePair
from composer_replication.trainer.collator import (
    PairRows,
    check_pairs,
    collate_pairs,
    sibling_rows_in,
    sibling_tensors,
)
from composer_replication.trainer.loss_channels import LossChannel, RecordDraws, Scope, WeightCopy
from composer_replication.trainer.model_modes import evaluation_mode
from composer_replication.trainer.output_head import completion_states, head_of, scored_ids
from composer_replication.trainer.processes import num_processes, process_rank
from composer_replication.trainer.setting_errors import TrainerSettingError

_PAIRS_AT_ONCE = 8


def pair_logps(model: Any, rows: PairRows) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean log-probability a token of each chosen and each rejected answer, nats: two tensors (P,), at temperature 1."""
    head = head_of(model)
    states_MH = completion_states(model, rows.answers)
    logp_M = sampled_logp(states_MH, head.weight_VH, scored_ids(rows.answers), **head.arguments())
    mask = rows.answers.loss_mask_NT.bool()
    logp_NT = torch.zeros(mask.shape, dtype=logp_M.dtype, device=mask.device).masked_scatter(mask, logp_M)
    logp_N = sequence_logp(logp_NT, mask, length_normalised=True)
    return logp_N[: len(rows)], logp_N[len(rows) :]


def reference_logps(
    model: Any, pairs: Sequence[PreferencePair], *, pad_id: int, autocast: Scope
) -> torch.Tensor:
    """Columns chosen and rejected (P, 2), float32, of the model as it stands, without gradient or dropout."""
    parts = []
    with torch.no_grad(), evaluation_mode(model):
        for start in range(0, len(pairs), _PAIRS_AT_ONCE):
            rows = collate_pairs(pairs[start : start + _PAIRS_AT_ONCE], pad_id=pad_id).to(model.device)
            with autocast():
                parts.append(torch.stack(pair_logps(model, rows), dim=1))
    return torch.cat(parts).float()


_BETAS = {"dpo": 5.0, "ipo": 0.1, "simpo": 2.0}


class ReplayChannel(LossChannel):
    """Draws pairs, compares the policy with the reference, and keeps what the reference said.

    Attributes:
        reference_P2: log-probabilities of the pairs under the weights of the run's start; None where nothing needs them. From a
            checkpoint it is set before ``begin``.
        first_weights: those weights, kept for fresh pairs.
    """

    def __init__(self, trainer: Any, settings: ReplaySection, pairs: Sequence[PreferencePair] | None) -> None:
        super().__init__(trainer)
        if not settings.sibling_pairs and all(pair.weight == 0.0 for pair in pairs or ()):
            raise self.nothing_to_learn()
        check_pairs(pairs or ())
        self.settings, self.records = settings, pairs or ()
        self._draws: RecordDraws | None = None
        self._newest_part = (-1, 0)
        self._beta = settings.beta or _BETAS[settings.kind]
        self.reference_P2: torch.Tensor | None = None
        self.first_weights: WeightCopy | None = None

    @staticmethod
    def nothing_to_learn() -> TrainerSettingError:
        """The error for replay without any pair that weighs something."""
        words = "beta_replay is not 0, but there is no preference pair to learn from."
        fix = "pass replay_pairs, set replay.sibling_pairs = true, or set beta_replay to 0."
        where = "ComposerReplicationTrainer(replay_pairs=), replay.sibling_pairs"
        return TrainerSettingError("CR0755", words, where=where, fix=fix)

    @property
    def keeps_first_weights(self) -> bool:
        """Fresh pairs are compared with the weights of the run's start."""
        return self.settings.sibling_pairs and self.settings.kind != "simpo"

    def begin(self) -> None:
        self._newest_part = (-1, 0)
        if self.records:
            seed, per_step = self._trainer.args.seed, self.settings.pairs_per_step
            self._draws = RecordDraws(self.records, per_step=per_step, seed=seed)
        if self.keeps_first_weights:
            self.first_weights = WeightCopy(self._model)
        if not self.records or self.settings.kind == "simpo":
            return
        if self.reference_P2 is None:
            self.reference_P2 = reference_logps(
                self._model,
                self.records,
                pad_id=self._pad_id,
                autocast=self._trainer.accelerator.autocast,
            )
        self.reference_P2 = self.reference_P2.to(self._device)

    def after_generation(self, batch: dict[str, Any], rewards: Sequence[float | None]) -> None:
        """Pairs inside the groups of a fresh generation join the batch as tensors."""
        if self.settings.sibling_pairs:
            pass_reward = self.settings.pass_reward
            batch |= sibling_tensors(batch, rewards, pass_reward=pass_reward, pad_id=self._pad_id)
            batch["sibling_total"] = self._gathered_sum(float(batch["sibling_weight"].sum()))

    def loss(self, model: Any, inputs: Any) -> torch.Tensor:
        """Weighted mean over all pairs of the optimizer step of the preference loss; this micro-batch's part."""
        settings = self.settings
        of_step, share = self._drawn()
        drawn = [idx for idx in share if self.records[idx].weight > 0]
        total_weight = sum(self.records[idx].weight for idx in of_step)
        total_weight += float(inputs.get("sibling_total", 0.0)) * self._window_share()

        def kept(rows: PairRows) -> torch.Tensor:
            known_P2 = self.reference_P2
            return rows.weight_P.new_zeros(len(rows), 2) if known_P2 is None or not drawn else known_P2[drawn]

        pad_id = self._pad_id
        stand_in = PreferencePair((pad_id,), (pad_id,), (pad_id, pad_id))
        total, counted = torch.zeros((), device=self._device), []
        recorded = self._collated([self.records[idx] for idx in drawn]) if drawn else None
        for own, reference in ((recorded, kept), (sibling_rows_in(inputs), self._sibling_reference)):
            if (rows := self._rows_to_forward(own, lambda: self._collated([stand_in]))) is None:
                continue
            reference_2P: Sequence[torch.Tensor | None] = (None, None)
            if settings.kind != "simpo":
                reference_2P = reference(rows).unbind(dim=1)
            with self._trainer.accelerator.autocast():
                policy_2P = pair_logps(model, rows)
            loss, metrics = preference_loss(
                *policy_2P,
                *reference_2P,
                kind=settings.kind,
                beta=self._beta,
                weight_P=rows.weight_P,
            )
            total = total + loss * (metrics.total_weight if own is not None else 0.0)
            counted += [metrics] if own is not None else []
        figures = {"pairs": float(sum(int(part.num_pairs) for part in counted))}
        if counted:
            weights = [float(part.total_weight) for part in counted]
            for name in ("accuracy", "reward_margin"):
                figures[name] = fmean([float(getattr(part, name)) for part in counted], weights)
        self._note("replay", **figures)
        return total * (num_processes() / total_weight) if total_weight else total

    def _drawn(self) -> tuple[list[int], list[int]]:
        """The pairs of the optimizer step, and those of them that this micro-batch takes: their indices.

        Micro-batches are counted here and not by TRL's micro-step, which runs on over steps that have fewer of them.
        """
        if self._draws is None:
            return [], []
        step, count = self._newest_part
        count = count + 1 if step == self._step else 0
        self._newest_part = (self._step, count)
        num_micro_steps = int(self._trainer.current_gradient_accumulation_steps)
        part, num_parts = process_rank() * num_micro_steps + count, num_processes() * num_micro_steps
        return self._draws.of_step(self._step), self._draws.share(self._step, part, num_parts)

    def _collated(self, pairs: Sequence[PreferencePair]) -> PairRows:
        return collate_pairs(pairs, pad_id=self._pad_id).to(self._device)

    def _sibling_reference(self, rows: PairRows) -> torch.Tensor:
        """Fresh pairs have no kept reference: the weights of the run's start score them."""
        model = self._model
        scope: Any = nullcontext() if self.first_weights is None else self.first_weights.in_place_of(model)
        with scope, evaluation_mode(model), torch.no_grad(), self._trainer.accelerator.autocast():
            return torch.stack(pair_logps(model, rows), dim=1)
