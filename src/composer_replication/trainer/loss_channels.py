"""The two loss channels beside the policy gradient: hint distillation, and replayed preferences.

Hints: for a turn that went wrong the teacher, the policy under a hint, scores the very ids that the student sampled, after a
prompt that differs by the hint; the student's distribution at those positions is moved towards the teacher's. Hinted turns come
from a ``hint_source``, which sees each generation.
Replay: pairs of answers to one prompt, given (``replay_pairs``) or made of passing and failing siblings of one group.

Letters: M positions that carry loss, N turns or answers, P pairs, T completion columns, K tokens of the student's support.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from accelerate.utils import send_to_device
from torch import Tensor
from transformers import TrainerCallback

from composer_replication.config import DEPARTED, HintsSection, ReplaySection
from composer_replication.errors import InputError
from composer_replication.losses.chunked_head import logp_at, sampled_and_top_k_logp, sampled_logp
from composer_replication.losses.divergence import support_divergence
from composer_replication.losses.policy_terms import truncated_importance_weights
from composer_replication.losses.preferences import preference_loss, sequence_logp
from composer_replication.records import HintedTurn, PreferencePair
from composer_replication.trainer import collator, model_modes
from composer_replication.trainer.generation import Generation, HintGenerator
from composer_replication.trainer.preset_settings import TrainerSettingError, nothing_to_learn
from composer_replication.trainer.processes import gathered, num_processes, process_rank, together

STATE_FILE = "loss_channels.pt"
HINTED_TURNS, SIBLING_PAIRS = "hinted_turns", "sibling_pairs"
"""Under these names a batch has a list with the records of each row, which TRL shuffles and splits as it does tensors."""
TOP_K, EMA_RATE = 100, 0.05
"""Tokens of the student's support, and how far a step moves the teacher that is an average: the reference's."""
R = TypeVar("R")
Scope = Callable[[], AbstractContextManager[Any]]
"""Opens what a forward is made in: autocast, or the teacher's weights."""


@lru_cache(maxsize=4)
def _order(num_records: int, seed: int, epoch: int) -> list[int]:
    order = list(range(num_records))
    random.Random(f"{seed} {epoch}").shuffle(order)  # noqa: S311  an order, no secret
    return order


def records_of_step(step: int, num_records: int, *, per_step: int, seed: int) -> list[int]:
    """Indices of the records of global step ``step`` (0 is the first): epoch after epoch, each in an order of its own.

    What a step takes, over all micro-batches and processes, depends on the seed and the step alone: a resumed run goes on
    exactly where the step count says, and every process knows what the others take.
    """
    positions = (divmod(each, num_records) for each in range(step * per_step, (step + 1) * per_step))
    return [_order(num_records, seed, epoch)[place] for epoch, place in positions]


class LossChannel:
    """What both channels need of the step under way, and what they keep."""

    table = ""  # of a recipe, with its settings
    settings: HintsSection | ReplaySection
    records: Sequence[Any] = ()  # given to the trainer
    weights: model_modes.WeightCopy | None = None  # the teacher's, or the first ones, where needed
    weights_name = ""  # of that copy in a checkpoint
    keeps_first_weights = False  # the copy stays as the weights are before the first step
    saved: Mapping[str, Any] | None = None  # of the checkpoint that the run goes on from

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def begin(self) -> None:
        """Set the channel to the run's start, or to the checkpoint's state."""
        self.weights = model_modes.WeightCopy(self.model)
        if self.saved is not None:
            self.weights.load(self.saved[self.weights_name])

    def state_dict(self) -> dict[str, Any]:
        """A collective call where weights are spread over processes."""
        return {self.weights_name: None if self.weights is None else self.weights.tensors()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Waits for ``begin``, when the weights lie where they are trained."""
        self.saved = state

    @property
    def _step(self) -> int:
        return int(self._trainer.state.global_step)

    @property
    def model(self) -> Any:
        """Without the wrappers of several processes."""
        return self._trainer.accelerator.unwrap_model(self._trainer.model)

    @property
    def _pad_id(self) -> int:
        return int(self._trainer._tokenizer.pad_token_id)  # noqa: SLF001 - TRL's only name

    def _on_device(self, rows: R) -> R:
        moved: R = send_to_device(rows, self._trainer.accelerator.device)
        return moved

    def _of_step(self, total: Any) -> float:
        """A generation's total as an optimizer step's, which takes a share of its micro-batches."""
        trainer = self._trainer
        share = float(trainer.current_gradient_accumulation_steps) / float(trainer.args.steps_per_generation)
        return float(total) * share

    def _to_forward(self, own: Sequence[R], stand_in: R) -> Sequence[R]:
        """The records themselves; the stand-in, whose loss is not to count, where only other processes have some.
        Where weights are spread over processes each has to forward as often as the others. A collective call then.
        """
        if not self._trainer.has_sharded_weights or not any(gathered(bool(own))):
            return own
        return own or [stand_in]

    def _note(self, prefix: str, figures: Mapping[str, float]) -> None:
        for name, value in figures.items():
            self._trainer._metrics["train"].setdefault(f"{prefix}/{name}", []).append(value)  # noqa: SLF001 - TRL's only name

    def _gathered_sum(self, value: float) -> Tensor:
        """The sum over all processes, as a 0-dimensional tensor: TRL leaves such alone when it splits a batch."""
        local = self._on_device(torch.tensor(value, dtype=torch.float32))
        total: Tensor = self._trainer.accelerator.gather(local).sum()
        return total


def hint_loss(
    model: Any,
    rows: collator.HintedRows,
    settings: HintsSection,
    *,
    num_tokens: float,
    teacher: Scope,
    autocast: Scope,
    sampling_temperature: float,
) -> tuple[Tensor, dict[str, float]]:
    """The loss, and two means over its tokens for the log: the divergence before weights, nats, and the importance weight.

    L = sum_n w_n sum_t c_nt D_nt / num_tokens over the sampled ids of each turn.

    D is the divergence of student and teacher (``losses.divergence``) over the student's top k and one tail class;
    c = min(exp(logp - sampled_logp), 2), without gradient, 1 for an id whose sampled_logp is unknown; w_n is the turn's
    weight. ``num_tokens`` are those of the whole optimizer step; under ``teacher`` the model is the teacher; the ids were sampled
    at ``sampling_temperature``, which their log-probabilities belong to.

    Departs from the reference: SDPO averages tokens within a rollout first; here long and short turns weigh by their tokens,
    as the policy-gradient channel does. Reference: Reinforcement Learning via Self-Distillation (2026, arXiv 2601.20802).
    """
    ids_M = rows.student.ids_NS[rows.student.loss_mask_NS.bool()]
    with autocast():
        states_MH, weight_VH, options = model_modes.completion_states(model, rows.student)
        head, top_k = (states_MH, weight_VH, ids_M), min(TOP_K, weight_VH.size(0))
        logp_M, top_logp_MK, top_index_MK = sampled_and_top_k_logp(*head, k=top_k, temperature=1.0, **options)
        now_M = logp_M.detach()
        if sampling_temperature != 1.0:
            with torch.no_grad():
                now_M = sampled_logp(*head, temperature=sampling_temperature, **options)
    with teacher(), torch.no_grad(), autocast():
        hidden_MH, teacher_weight_VH, options = model_modes.completion_states(model, rows.teacher)
        teacher_MK = logp_at(hidden_MH, teacher_weight_VH, top_index_MK, **options)
    divergence_M = support_divergence(top_logp_MK, teacher_MK, jsd_alpha=settings.jsd_alpha)
    sampled_M = rows.sampled_logp_M.to(now_M.dtype)
    ratio_M, _ = truncated_importance_weights(now_M, sampled_M, torch.ones_like(now_M))
    loss = (rows.weight_M * ratio_M * divergence_M).sum() / num_tokens
    divergence, importance_weight = float(divergence_M.detach().mean()), float(ratio_M.mean())
    return loss, {"divergence": divergence, "importance_weight": importance_weight}


class HintChannel(LossChannel):
    """Hinted turns, of a source that is asked about each generation, into the batch, and their loss out of it.
    ``weights`` are the teacher's; None where it is the model without its adapter.
    """

    table, weights_name = "hints", "teacher"
    settings: HintsSection

    def __init__(self, trainer: Any, settings: HintsSection, source: HintGenerator | None) -> None:
        super().__init__(trainer)
        if source is None:
            raise nothing_to_learn("alpha_sdpo")
        self.settings, self.source = settings, source
        self.keeps_first_weights = settings.teacher == "frozen"

    def begin(self) -> None:
        if self.settings.teacher != "lora-off":
            super().begin()

    def after_generation(self, generation: Generation) -> None:
        tokenizer, ends = self._trainer._tokenizer, self._trainer.eos_token_ids  # noqa: SLF001 - TRL's only name
        rollouts = collator.rollouts_of(generation, tokenizer, step=self._step, eos_token_ids=ends)
        source, before, model = self.source, Counter(getattr(self.source, "counts", {})), self.model
        matched = partial(collator.matched_turns, rollouts=rollouts, model=model)
        turns, num_too_long = together(lambda: matched(source.hinted_turns(rollouts)))
        generation.batch[HINTED_TURNS] = turns
        num_tokens = sum(len(turn.completion_ids) for of_row in turns for turn in of_row)
        generation.batch["hint_num_tokens"] = self._gathered_sum(num_tokens)
        self._note("sdpo", {"turns_left_out": float(num_too_long)})
        counted, total = Counter(getattr(source, "counts", {})), Counter[str]()
        counted.subtract(before)
        for added in gathered(counted):
            total.update(added)
        self._note("hint_source", {name: float(number) for name, number in total.items()})

    def extra_loss(self, model: Any, inputs: Mapping[str, Any]) -> Tensor:
        """Mean over all hinted tokens of the optimizer step of weight times divergence; this micro-batch's part."""
        own, pad_id = [turn for turns in inputs.get(HINTED_TURNS, ()) for turn in turns], self._pad_id
        self._note("sdpo", {"turns": float(len(own))})
        turns = self._to_forward(own, HintedTurn((pad_id,), (pad_id, pad_id), (pad_id,)))
        if not turns:
            return self._on_device(torch.zeros(()))
        rows = self._on_device(collator.collate_hinted_turns(turns, pad_id=pad_id))
        loss, figures = hint_loss(
            *(model, rows, self.settings),
            num_tokens=self._of_step(inputs["hint_num_tokens"]),
            teacher=self._teacher_in_place,
            autocast=self._trainer.accelerator.autocast,
            sampling_temperature=self._trainer.temperature,
        )
        if not own:
            return loss * 0.0
        self._note("sdpo", figures)
        return loss * num_processes()

    @contextmanager
    def _teacher_in_place(self) -> Iterator[None]:
        """Inside, the model is the teacher: its weights, and no dropout."""
        model, weights = self.model, self.weights
        teacher = model.disable_adapter() if weights is None else weights.in_place_of(model)
        with teacher, model_modes.evaluation_mode(model):
            yield


def pair_logps(model: Any, rows: collator.TokenRows) -> tuple[Tensor, Tensor]:
    """Mean log-probability a token of each chosen and each rejected answer, nats: two tensors (P,), at temperature 1."""
    states_MH, weight_VH, options = model_modes.completion_states(model, rows)
    mask = rows.loss_mask_NS.bool()
    logp_M = sampled_logp(states_MH, weight_VH, rows.ids_NS[mask], **options)
    logp_NS = torch.zeros(mask.shape, dtype=logp_M.dtype, device=mask.device).masked_scatter(mask, logp_M)
    logp_N = sequence_logp(logp_NS, mask, length_normalised=True)
    chosen_P, rejected_P = logp_N.chunk(2)
    return chosen_P, rejected_P


def reference_logps(
    model: Any, pairs: Sequence[PreferencePair], *, pad_id: int, autocast: Scope, at_once: int = 8
) -> Tensor:
    """Columns chosen and rejected (P, 2), float32, on the processor, of the model as it stands, without gradient or dropout."""
    parts = []
    with torch.no_grad(), model_modes.evaluation_mode(model):
        for start in range(0, len(pairs), at_once):
            rows = collator.collate_pairs(pairs[start : start + at_once], pad_id=pad_id)
            rows = send_to_device(rows, model.device)
            with autocast():
                parts.append(torch.stack(pair_logps(model, rows), dim=1))
    return torch.cat(parts).float().cpu()


_BETAS = {"dpo": 5.0, "ipo": 0.1, "simpo": 2.0}


class ReplayChannel(LossChannel):
    """Draws pairs, makes some of siblings, compares the policy with the reference, and keeps the reference's log-probabilities."""

    table, weights_name = "replay", "first"
    settings: ReplaySection
    reference_P2: Tensor | None = None  # of ``records`` under the first weights, where needed
    _newest_part = (-1, 0)

    def __init__(self, trainer: Any, settings: ReplaySection, pairs: Sequence[PreferencePair] | None) -> None:
        super().__init__(trainer)
        if not settings.sibling_pairs and all(pair.weight == 0.0 for pair in pairs or ()):
            raise nothing_to_learn("beta_replay")
        collator.check_pairs(pairs or ())
        self.settings, self.records = settings, pairs or ()
        self.keeps_first_weights = settings.sibling_pairs and settings.kind != "simpo"
        self._beta = _BETAS[settings.kind]

    def begin(self) -> None:
        self._newest_part = (-1, 0)
        if self.keeps_first_weights:
            super().begin()
        self.reference_P2 = None if self.saved is None else self.saved["reference"]
        if self.reference_P2 is None and self.records and self.settings.kind != "simpo":
            self.reference_P2 = self._logps_of(self.records)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "reference": self.reference_P2}

    def after_generation(self, generation: Generation) -> None:
        if not self.settings.sibling_pairs:
            return
        batch, of_row = generation.batch, collator.sibling_pairs(generation.batch, generation.own_rewards())
        batch["sibling_total"] = self._gathered_sum(float(sum(map(len, of_row))))
        own = [pair for pairs in of_row for pair in pairs]
        num_pairs = max(gathered(len(own))) if self._trainer.has_sharded_weights else len(own)
        if self.weights is not None and num_pairs:
            with self.weights.in_place_of(self.model):
                logps_P2 = self._logps_of([*own, *[self._stand_in()] * (num_pairs - len(own))])
            logps = iter(logps_P2.tolist())
            of_row = [[replace(pair, reference=tuple(next(logps))) for pair in pairs] for pairs in of_row]
        batch[SIBLING_PAIRS] = of_row

    def extra_loss(self, model: Any, inputs: Mapping[str, Any]) -> Tensor:
        """Weighted mean over all pairs of the optimizer step of the preference loss; this micro-batch's part."""
        of_step, share = self._drawn()
        drawn = [idx for idx in share if self.records[idx].weight > 0]
        siblings = [pair for pairs in inputs.get(SIBLING_PAIRS, ()) for pair in pairs]
        own = [*(self.records[idx] for idx in drawn), *siblings]
        self._note("replay", {"pairs": float(len(own))})
        pairs = self._to_forward(own, self._stand_in())
        if not pairs:
            return self._on_device(torch.zeros(()))
        reference_2P: Sequence[Tensor | None] = (None, None)
        if self.settings.kind != "simpo":
            known = [] if self.reference_P2 is None else self.reference_P2[drawn].tolist()
            known += [pair.reference for pair in siblings]
            reference_2P = self._on_device(torch.tensor(known if own else [[0.0, 0.0]])).unbind(dim=1)
        with self._trainer.accelerator.autocast():
            policy = pair_logps(model, self._on_device(collator.collate_pairs(pairs, pad_id=self._pad_id)))
        weight_P = self._on_device(torch.tensor([float(pair.weight) for pair in pairs]))
        options: dict[str, Any] = {"kind": self.settings.kind, "beta": self._beta, "weight_P": weight_P}
        loss, metrics = preference_loss(*policy, *reference_2P, **options)
        if not own:
            return loss * 0.0
        figures = {name: float(getattr(metrics, name)) for name in ("accuracy", "reward_margin")}
        self._note("replay", figures)
        total_weight = sum(self.records[idx].weight for idx in of_step)
        total_weight += self._of_step(inputs.get("sibling_total", 0.0))
        return loss * metrics.total_weight * float(num_processes() / total_weight)

    def _drawn(self) -> tuple[list[int], list[int]]:
        """The pairs of the optimizer step, and those of them that this micro-batch takes: their indices.
        Micro-batches are counted here and not by TRL's micro-step, which runs on over steps that have fewer of them.
        """
        if not self.records:
            return [], []
        step, count = self._newest_part
        count = count + 1 if step == self._step else 0
        self._newest_part = (self._step, count)
        num_micro_steps = int(self._trainer.current_gradient_accumulation_steps)
        part, num_parts = process_rank() * num_micro_steps + count, num_processes() * num_micro_steps
        options = {"per_step": self.settings.pairs_per_step, "seed": int(self._trainer.args.seed)}
        of_step = records_of_step(self._step, len(self.records), **options)
        return of_step, of_step[part::num_parts]

    def _stand_in(self) -> PreferencePair:
        return PreferencePair((self._pad_id,), (self._pad_id,), (self._pad_id, self._pad_id))

    def _logps_of(self, pairs: Sequence[PreferencePair]) -> Tensor:
        options: dict[str, Any] = {"pad_id": self._pad_id, "autocast": self._trainer.accelerator.autocast}
        options["at_once"] = int(self._trainer.args.per_device_train_batch_size)
        return reference_logps(self.model, pairs, **options)


class LossChannels(TrainerCallback):
    """What a ``HintChannel`` and a ``ReplayChannel`` do together: start, follow steps, be saved. One whose weight is 0 is None."""

    def __init__(self, trainer: Any, hints: HintChannel | None, replay: ReplayChannel | None) -> None:
        self._trainer, self.hints, self.replay = trainer, hints, replay
        both: tuple[HintChannel | ReplayChannel | None, ...] = (hints, replay)
        self.all = tuple(channel for channel in both if channel is not None)

    def check_model(self) -> None:
        """Refuse a model that the channels cannot train, or not on these records."""
        model = self.all[0].model
        problem = model_modes.states_problem(model)
        needs_adapter = self.hints is not None and self.hints.settings.teacher == "lora-off"
        if needs_adapter and not hasattr(model, "disable_adapter"):
            problem = 'hints.teacher = "lora-off" is the model without its adapter, and this model has none.'
        if problem is not None:
            words = f"hint distillation and replay cannot train this model: {problem}"
            fix = "set both weights to 0, or change what the sentence names."
            where = "trainer.alpha_sdpo, trainer.beta_replay"
            raise TrainerSettingError("CR0757", words, where=where, fix=fix)
        if self.replay is not None:
            collator.refuse_unfit_pairs(self.replay.records, model)

    def begin(self) -> None:
        """Set both channels to the run's start, or to the checkpoint's state. Errors as ``check_model``."""
        self.check_model()
        for channel in self.all:
            channel.begin()
            channel.saved = None

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The teacher that is an average follows the policy; a checkpoint of the step is written after it."""
        if self.hints is not None and self.hints.settings.teacher == "ema" and self.hints.weights is not None:
            self.hints.weights.move_towards(self.hints.model, EMA_RATE)

    @property
    def channel_of_first_weights(self) -> LossChannel | None:
        """The channel whose ``weights`` are those before the first step, if one keeps them."""
        return next((channel for channel in self.all if channel.keeps_first_weights), None)

    def write(self, checkpoint: Path) -> None:
        state: dict[str, Any] = {"fingerprint": self.fingerprint()}
        for channel in self.all:
            state |= channel.state_dict()
        if process_rank() == 0:
            torch.save(state, checkpoint / STATE_FILE)

    def fingerprint(self) -> str:
        """Of both tables (also keys that have left: older checkpoints know them), records and the seed of their order."""
        digest = hashlib.sha256(str(self._trainer.args.seed).encode())
        for channel in self.all:
            records = [asdict(record) for record in channel.records]
            settings = {**DEPARTED[channel.table], **channel.settings.model_dump()}
            digest.update(json.dumps([channel.table, settings, records], sort_keys=True).encode())
        return digest.hexdigest()


def read_channels(channels: LossChannels | None, checkpoint: Path) -> None:
    """Give the channels what they kept. A run goes on with the channels that it began with (CR0884)."""
    path, saved = checkpoint / STATE_FILE, dict[str, Any]()
    if path.is_file():
        saved = torch.load(path, map_location=lambda storage, _tag: storage, weights_only=True)
    if saved.get("fingerprint") != (None if channels is None else channels.fingerprint()):
        words = "the checkpoint belongs to another run: its loss channels, or what they learn from, are not this trainer's."
        fix = "resume with the same weights, hints, pairs, tables and seed, or start a new run."
        raise InputError("CR0884", words, where=str(checkpoint), fix=fix)
    for channel in () if channels is None else channels.all:
        channel.load_state_dict(saved)
