"""The two loss channels beside the policy gradient: what they refuse, when they begin, what a checkpoint keeps.

A mixin of the trainer. A channel whose weight is 0 makes no tensor, draws no number and reads no setting.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from numbers import Real
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from composer_replication.channel_tables import Section
from composer_replication.errors import InputError
from composer_replication.records import HintedTurn
from composer_replication.trainer.collator import check_pairs, collate_hinted_turns, refuse_other_contexts
from composer_replication.trainer.hint_channel import HintChannel
from composer_replication.trainer.output_head import states_problem
from composer_replication.trainer.processes import process_rank
from composer_replication.trainer.prompt_fit import refuse_unfit_pairs, refuse_unfit_turns
from composer_replication.trainer.replay_channel import ReplayChannel
from composer_replication.trainer.run_borders import OwnState
from composer_replication.trainer.setting_errors import TrainerSettingError
from composer_replication.trainer.weight_copy import WeightCopy

STATE_FILE = "loss_channels.pt"


class LossChannels(HintChannel, ReplayChannel, OwnState):
    """Both channels as one part of the trainer."""

    _saved_channels: dict[str, Any] | None = None
    _channel_callback: TrainerCallback | None = None
    _newest_rewards: torch.Tensor | None

    # ---- before the first step --------------------------------------------------------------------

    def _check_channel_settings(self) -> None:
        """What is wrong with the arguments alone; nothing of TRL's is read.

        Raises:
            TrainerSettingError: a weight that is no number, below zero or not finite (CR0722), or a channel with nothing to
                learn from (CR0755).
            InputError: a record that cannot be learned from (CR0722, CR0751).
        """
        for name in ("alpha_sdpo", "beta_replay"):
            _refuse_bad_weight(name, getattr(self, name))
        if self.alpha_sdpo != 0.0:
            settings = self._hint_settings()
            if self.hinted_turns:
                collate_hinted_turns(self.hinted_turns, pad_id=0, strict=settings.strict)
        if self.beta_replay != 0.0:
            self._replay_settings()
            check_pairs(self.replay_pairs or ())

    def _begin_channels(self) -> None:
        """Set both channels to the run's start, or to the checkpoint that ``_read_own_state`` has read.

        Raises:
            TrainerSettingError: the teacher ``lora-off`` without an adapter (CR0755), a model that cannot take the
                channels (CR0757).
            InputError: the checkpoint was written with other channels (CR0884), a record has ids that the model does not
                know (CR0751) or more than its context (CR0705), a recorded turn's hint changes more than it adds (CR0751).
        """
        saved, self._saved_channels = self._saved_channels, None
        self._micro_steps = {}
        if not self._has_channels():
            return
        self.check_channel_model()
        self._begin_hints()
        self._begin_replay(None if saved is None else saved["reference"])
        if saved is not None:
            self._restore_channels(saved)
        if self._channel_callback is None:
            self._channel_callback = _AfterStep(self)
            self.add_callback(self._channel_callback)

    def _has_channels(self) -> bool:
        return self.alpha_sdpo != 0.0 or self.beta_replay != 0.0

    def check_channel_model(self) -> None:
        """Refuse a model that the channels cannot train, or not on these records; a run asks before it measures anything.

        Errors as ``_begin_channels``.
        """
        if not self._has_channels():
            return
        model = self.accelerator.unwrap_model(self.model)
        if self.alpha_sdpo != 0.0 and self._hint_settings().teacher == "lora-off" and not _has_lora(model):
            raise TrainerSettingError(
                "CR0755",
                'the teacher "lora-off" is the model without its adapter, and this model has none.',
                where="hints.teacher",
                fix='add a [model.lora] table, or take the teacher "ema" or "frozen".',
            )
        problem = states_problem(model)
        if problem is not None:
            raise TrainerSettingError(
                "CR0757",
                f"hint distillation and replay cannot train this model: {problem}",
                where="trainer.alpha_sdpo, trainer.beta_replay",
                fix="set both weights to 0, or change what the sentence names.",
            )
        if self.beta_replay != 0.0:
            refuse_unfit_pairs(self.replay_pairs or (), model)
        if self.alpha_sdpo != 0.0:
            refuse_unfit_turns(self.hinted_turns or (), model)
            if self._hint_settings().strict:
                refuse_other_contexts(self.hinted_turns or ())

    # ---- one generation ---------------------------------------------------------------------------

    def _with_row_rewards(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Put each row's weighted reward, NaN where nothing scored it, beside TRL's tensors as ``row_reward`` (B,)."""
        if self._has_channels() and not self._in_evaluation and self._newest_rewards is not None:
            num_rows = batch["prompt_ids"].size(0)
            rewards_NF = self._newest_rewards.float()
            total_N = (rewards_NF * self.reward_weights.to(rewards_NF)).nansum(dim=1)
            total_N[rewards_NF.isnan().all(dim=1)] = torch.nan
            own_B = total_N[process_rank() * num_rows : (process_rank() + 1) * num_rows]
            batch["row_reward"] = own_B.to(self.accelerator.device)
        return batch

    def _with_channel_tensors(self, rows: Any, batch: dict[str, Any]) -> dict[str, Any]:
        """A fresh generation with what the channels need of it; the very batch where they are off."""
        if "row_reward" in batch:
            rewards = [None if math.isnan(reward) else reward for reward in batch["row_reward"].tolist()]
            self._add_hints(rows, batch, rewards)
            self._add_siblings(batch, rewards)
        return batch

    # ---- checkpoints --------------------------------------------------------------------------------

    def _write_own_state(self, checkpoint: Path) -> None:
        """As ``OwnState``'s; where a channel is on, its weights and numbers in a file of their own."""
        if self._has_channels():
            state = {
                "fingerprint": self._channels_fingerprint(),
                "teacher": None if self._teacher_weights is None else self._teacher_weights.tensors(),
                "first": None if self._first_weights is None else self._first_weights.tensors(),
                "reference": self._reference_P2,
            }
            if process_rank() == 0:
                torch.save(state, checkpoint / STATE_FILE)
            if self._is_inside_generation():
                turns = [[asdict(turn) for turn in of_row] for of_row in self._turns_of_row]
                torch.save(turns, checkpoint / _turns_name())
        super()._write_own_state(checkpoint)

    def _read_own_state(self, checkpoint: Path) -> None:
        """As ``OwnState``'s; what the channels kept waits for ``_begin_channels``.

        Raises:
            InputError: as ``OwnState``'s, or the checkpoint was written with other channels (CR0884).
        """
        super()._read_own_state(checkpoint)
        path = checkpoint / STATE_FILE
        if path.is_file() is not self._has_channels():
            had = "has" if path.is_file() else "has no"
            raise _other_channels(
                f"the checkpoint {had} state of loss channels, and this trainer is otherwise", path
            )
        if path.is_file():
            self._saved_channels = torch.load(
                path, map_location=lambda storage, _tag: storage, weights_only=True
            )
            if self._saved_channels["fingerprint"] != self._channels_fingerprint():
                raise _other_channels("its hints or pairs, or their settings, are not this trainer's", path)
        if (checkpoint / _turns_name()).is_file():
            turns = torch.load(checkpoint / _turns_name(), weights_only=True)
            self._turns_of_row = [[HintedTurn(**turn) for turn in of_row] for of_row in turns]

    def _keeps_first_weights(self) -> bool:
        """Whether a channel keeps the trained weights as they are before the first step."""
        teaches = self.alpha_sdpo != 0.0 and self._hint_settings().teacher == "frozen"
        return teaches or (self.beta_replay != 0.0 and self._needs_first_weights())

    def _first_weight_copy(self) -> WeightCopy | None:
        return self._first_weights if self._first_weights is not None else self._teacher_weights

    def _restore_channels(self, saved: dict[str, Any]) -> None:
        for copy, name in ((self._teacher_weights, "teacher"), (self._first_weights, "first")):
            if copy is not None:
                copy.load(saved[name])
        if self._reference_P2 is not None:
            self._reference_P2 = self._reference_P2.to(self.accelerator.device)

    def _channels_fingerprint(self) -> str:
        """Of both tables, the records and the seed of their order; weights may change between runs."""
        digest = hashlib.sha256(str(self.args.seed).encode())
        if self.alpha_sdpo != 0.0:
            digest.update(_as_bytes("hints", self._hint_settings(), self.hinted_turns))
        if self.beta_replay != 0.0:
            digest.update(_as_bytes("replay", self._replay_settings(), self.replay_pairs))
        return digest.hexdigest()


class _AfterStep(TrainerCallback):
    """Tells the channels that the weights have moved; before a checkpoint of the step is written."""

    def __init__(self, channels: LossChannels) -> None:
        self._channels = channels

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._channels._move_teacher()  # noqa: SLF001 - the two are one part


def _refuse_bad_weight(name: str, weight: Any) -> None:
    """A channel's weight is a number; True would silently be 1.

    Raises:
        TrainerSettingError: CR0722.
    """
    is_good = type(weight) is not bool and isinstance(weight, Real) and 0.0 <= float(weight) < math.inf
    if not is_good:
        raise TrainerSettingError(
            "CR0722",
            f"{name} is {weight!r} and must be a finite number of at least 0.",
            where=f"trainer.{name}",
            fix=f"set trainer.{name} to 0 or above.",
        )


def _turns_name() -> str:
    return f"hinted_turns_{process_rank()}.pt"


def _as_bytes(name: str, settings: Section, records: Sequence[Any] | None) -> bytes:
    kept = [asdict(record) for record in records or ()]
    return json.dumps([name, settings.model_dump(), kept], sort_keys=True).encode()


def _has_lora(model: Any) -> bool:
    configs = getattr(model, "peft_config", None)
    kinds = [str(getattr(config.peft_type, "value", config.peft_type)) for config in (configs or {}).values()]
    return "LORA" in kinds and hasattr(model, "disable_adapter")


def _other_channels(sentence: str, path: Path) -> InputError:
    return InputError(
        "CR0884",
        f"the checkpoint belongs to another run: {sentence}.",
        where=str(path),
        fix="resume with the same hints, pairs, tables and seed, or start a new run.",
    )
