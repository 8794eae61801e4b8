"""Channel 3, replayed preferences: pairs of answers to one prompt, mixed into the same step.

Pairs are given (``replay_pairs``), or made of passing and failing siblings of one group. A mixin of the trainer.

Letters: P pairs, N answers, M positions that carry loss, T completion columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch

from composer_replication.channel_tables import ReplaySection
from composer_replication.losses.chunked_head import sampled_logp
from composer_replication.losses.preferences import PreferenceMetrics, preference_loss, sequence_logp
from composer_replication.records import PreferencePair
from composer_replication.trainer.batch_records import sibling_rows_in, sibling_tensors
from composer_replication.trainer.channel_step import ChannelStep, RecordDraws, Scope
from composer_replication.trainer.collator import PairRows, collate_pairs
from composer_replication.trainer.model_modes import evaluation_mode
from composer_replication.trainer.output_head import head_of
from composer_replication.trainer.packed_rows import completion_states, scored_ids
from composer_replication.trainer.processes import num_processes
from composer_replication.trainer.setting_errors import TrainerSettingError
from composer_replication.trainer.weight_copy import WeightCopy

_PAIRS_AT_ONCE = 8


def pair_logps(model: Any, rows: PairRows, *, length_normalised: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability of each chosen and each rejected answer, nats: two tensors (P,), at temperature 1.

    Sums over the ids that carry loss, or means over them.
    """
    stacked = rows.stacked()
    head = head_of(model)
    states_MH = completion_states(model, stacked)
    logp_M, _ = sampled_logp(states_MH, head.weight_VH, scored_ids(stacked), **head.arguments())
    mask = stacked.loss_mask_NT.bool()
    logp_NT = torch.zeros(mask.shape, dtype=logp_M.dtype, device=mask.device).masked_scatter(mask, logp_M)
    logp_N = sequence_logp(logp_NT, mask, length_normalised=length_normalised)
    return logp_N[: len(rows)], logp_N[len(rows) :]


def reference_logps(
    model: Any, pairs: Sequence[PreferencePair], *, pad_id: int, length_normalised: bool, autocast: Scope
) -> torch.Tensor:
    """Columns chosen and rejected (P, 2), float32, of the model as it stands, without gradient or dropout."""
    parts = []
    with torch.no_grad(), evaluation_mode(model):
        for start in range(0, len(pairs), _PAIRS_AT_ONCE):
            rows = collate_pairs(pairs[start : start + _PAIRS_AT_ONCE], pad_id=pad_id).to(model.device)
            with autocast():
                parts.append(torch.stack(pair_logps(model, rows, length_normalised=length_normalised), dim=1))
    return torch.cat(parts).float()


_BETAS = {
    ("dpo", True): 5.0,
    ("dpo", False): 0.1,
    ("ipo", True): 0.1,
    ("ipo", False): 0.1,
    ("simpo", True): 2.0,
}


class ReplayChannel(ChannelStep):
    """Draws pairs, compares the policy with the reference, and keeps what the reference said."""

    beta_replay: float = 0.0
    replay: ReplaySection | None = None
    replay_pairs: Sequence[PreferencePair] | None = None
    _pair_draws: RecordDraws | None = None
    _reference_P2: torch.Tensor | None = None
    _first_weights: WeightCopy | None = None

    def _replay_settings(self) -> ReplaySection:
        """The ``[replay]`` table, or its defaults.

        Raises:
            TrainerSettingError: replay without any pair that weighs something (CR0755).
        """
        settings = self.replay or ReplaySection()
        if not settings.sibling_pairs and all(pair.weight == 0.0 for pair in self.replay_pairs or ()):
            raise TrainerSettingError(
                "CR0755",
                "beta_replay is not 0, but there is no preference pair to learn from.",
                where="ComposerReplicationTrainer(replay_pairs=), replay.sibling_pairs",
                fix="pass replay_pairs, set replay.sibling_pairs = true, or set beta_replay to 0.",
            )
        return settings

    def _needs_first_weights(self) -> bool:
        settings = self._replay_settings()
        return settings.sibling_pairs and settings.kind != "simpo"

    def _begin_replay(self, reference: torch.Tensor | None) -> None:
        """Draws and reference as they are before the first step.

        Args:
            reference: its log-probabilities from the checkpoint that the run goes on from, or None.
        """
        if self.beta_replay == 0.0:
            return
        settings = self._replay_settings()
        if self._needs_first_weights():
            self._first_weights = WeightCopy(self.accelerator.unwrap_model(self.model))
        if not self.replay_pairs:
            return
        self._pair_draws = RecordDraws(
            self.replay_pairs, per_step=settings.pairs_per_step, seed=self.args.seed
        )
        if settings.kind != "simpo":
            self._reference_P2 = reference
            if reference is None:
                self._reference_P2 = reference_logps(
                    self.accelerator.unwrap_model(self.model),
                    self.replay_pairs,
                    pad_id=self._tokenizer.pad_token_id,
                    length_normalised=settings.length_normalised,
                    autocast=self.accelerator.autocast,
                )

    def _add_siblings(self, batch: dict[str, Any], rewards: Sequence[float | None]) -> None:
        """Pairs inside the groups of a fresh generation join the batch as tensors."""
        if self.beta_replay == 0.0 or self._in_evaluation:
            return
        settings = self._replay_settings()
        if settings.sibling_pairs:
            pad_id = self._tokenizer.pad_token_id
            batch |= sibling_tensors(batch, rewards, pass_reward=settings.pass_reward, pad_id=pad_id)
            batch["sibling_total"] = self._gathered_sum(float(batch["sibling_weight"].sum()))

    def _compute_trace_replay_loss(self, model: Any, inputs: Any) -> Any:
        """Weighted mean over all pairs of the optimizer step of the preference loss; this micro-batch's part.

        Raises:
            TrainerSettingError: there is no pair (CR0755).
        """
        settings = self._replay_settings()
        if self._in_evaluation:
            return self._no_loss()
        drawn, reference_P2, drawn_weight = self._drawn_part(settings)
        total_weight = drawn_weight + float(inputs.get("sibling_total", 0.0)) * self._window_share()

        def kept(rows: PairRows) -> torch.Tensor:
            return rows.weight_P.new_zeros(len(rows), 2) if reference_P2 is None else reference_P2

        total, counted = self._no_loss(), []
        siblings = sibling_rows_in(inputs)
        for own, reference in ((drawn, kept), (siblings, self._sibling_reference)):
            rows = self._rows_to_forward(own, self._pair_for_nothing)
            if rows is None:
                continue
            needed_P2 = None if settings.kind == "simpo" else reference(rows)
            loss, metrics = self._preference(model, rows, needed_P2, settings)
            total = total + loss * (metrics.total_weight if own is not None else 0.0)
            counted += [metrics] if own is not None else []
        self._note("replay", **(_figures(counted) if counted else {"pairs": 0.0}))
        return total * (num_processes() / total_weight) if total_weight else total

    def _pair_for_nothing(self) -> PairRows:
        pad_id = self._tokenizer.pad_token_id
        rows = collate_pairs([PreferencePair((pad_id,), (pad_id,), (pad_id, pad_id))], pad_id=pad_id)
        return rows.to(self.accelerator.device)

    def _drawn_part(self, settings: ReplaySection) -> tuple[PairRows | None, torch.Tensor | None, float]:
        """This micro-batch's pairs, the reference on them, and the weight of all those of the step."""
        draws, pairs = self._pair_draws, self.replay_pairs
        if draws is None or not pairs:
            return None, None, 0.0
        step = self.state.global_step
        weight = sum(pairs[idx].weight for idx in draws.of_step(step))
        own = [idx for idx in draws.share(step, *self._part_of_step("replay")) if pairs[idx].weight > 0]
        if not own:
            return None, None, weight
        rows = collate_pairs([pairs[idx] for idx in own], pad_id=self._tokenizer.pad_token_id)
        reference = None if self._reference_P2 is None else self._reference_P2[own]
        return rows.to(self.accelerator.device), reference, weight

    def _preference(
        self, model: Any, rows: PairRows, reference_P2: torch.Tensor | None, settings: ReplaySection
    ) -> tuple[torch.Tensor, PreferenceMetrics]:
        with self.accelerator.autocast():
            chosen_P, rejected_P = pair_logps(model, rows, length_normalised=settings.length_normalised)
        beta = settings.beta or _BETAS[settings.kind, settings.length_normalised]
        return preference_loss(
            chosen_P,
            rejected_P,
            None if reference_P2 is None else reference_P2[:, 0],
            None if reference_P2 is None else reference_P2[:, 1],
            kind=settings.kind,
            beta=beta,
            margin=settings.margin,
            weight_P=rows.weight_P,
        )

    def _sibling_reference(self, rows: PairRows) -> torch.Tensor:
        """Fresh pairs have no kept reference: the weights of the run's start score them."""
        is_mean = self._replay_settings().length_normalised
        model = self.accelerator.unwrap_model(self.model)
        scope: Any = nullcontext() if self._first_weights is None else self._first_weights.in_place_of(model)
        with scope, evaluation_mode(model), torch.no_grad(), self.accelerator.autocast():
            return torch.stack(pair_logps(model, rows, length_normalised=is_mean), dim=1)


def _figures(parts: Sequence[PreferenceMetrics]) -> dict[str, float]:
    total = sum(float(part.total_weight) for part in parts)
    names = ("accuracy", "reward_margin", "chosen_reward", "rejected_reward")
    figures = {
        name: sum(float(getattr(part, name)) * float(part.total_weight) for part in parts) / total
        for name in names
    }
    return {"pairs": float(sum(int(part.num_pairs) for part in parts)), **figures}
