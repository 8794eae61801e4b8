"""The two loss channels beside the policy gradient: what they refuse, when they begin, what a checkpoint keeps."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import asdict
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import TrainerCallback

from composer_replication.errors import InputError
from composer_replication.records import HintedTurn
from composer_replication.trainer.collator import refuse_unfit_pairs
from composer_replication.trainer.hint_channel import HintChannel
from composer_replication.trainer.output_head import states_problem
from composer_replication.trainer.processes import process_rank
from composer_replication.trainer.replay_channel import ReplayChannel
from composer_replication.trainer.setting_errors import TrainerSettingError
from composer_replication.trainer.weight_copy import WeightCopy

if TYPE_CHECKING:
    from trl.trainer.grpo_trainer import GRPOTrainer

STATE_FILE = "loss_channels.pt"
ROW_REWARD = "row_reward"
"""Under this name a batch has each row's weighted reward (B,), NaN where nothing scored it."""


class LossChannels(TrainerCallback):
    """Both channels as one part of the trainer; one whose weight is 0 is None. At the end of each step the teacher follows."""

    def __init__(self, trainer: GRPOTrainer, hints: HintChannel | None, replay: ReplayChannel | None) -> None:
        self._trainer, self.hints, self.replay = trainer, hints, replay
        self._saved: dict[str, Any] | None = None

    # ---- before the first step --------------------------------------------------------------------

    def check_model(self) -> None:
        """Refuse a model that the channels cannot train, or not on these records."""
        model = self._trainer.accelerator.unwrap_model(self._trainer.model)
        if (problem := states_problem(model)) is not None:
            raise TrainerSettingError(
                "CR0757",
                f"hint distillation and replay cannot train this model: {problem}",
                where="trainer.alpha_sdpo, trainer.beta_replay",
                fix="set both weights to 0, or change what the sentence names.",
            )
        if self.replay is not None:
            refuse_unfit_pairs(self.replay.records, model)
        if self.hints is not None:
            self.hints.check_model(model)

    def begin(self) -> None:
        """Set both channels to the run's start, or to the checkpoint that ``read`` has read. Errors as ``check_model``."""
        saved, self._saved = self._saved, None
        self.check_model()
        if self.hints is not None:
            self.hints.begin()
        if self.replay is not None:
            self.replay.reference_P2 = None if saved is None else saved["reference"]
            self.replay.begin()
        for name, copy in self._copies().items():
            if saved is not None and copy is not None:
                copy.load(saved[name])
        if self not in self._trainer.callback_handler.callbacks:
            self._trainer.add_callback(self)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The weights have moved; a checkpoint of the step is written after it."""
        if self.hints is not None:
            self.hints.after_step()

    # ---- one generation ---------------------------------------------------------------------------

    def keep_rewards(
        self, batch: dict[str, Any], rewards_NF: torch.Tensor, reward_weights_F: torch.Tensor
    ) -> None:
        """Put each row's reward beside TRL's tensors, so that it stays with the row; ``rewards_NF`` are of all processes."""
        num_rows = batch["prompt_ids"].size(0)
        rewards_NF = rewards_NF.float()
        total_N = (rewards_NF * reward_weights_F.to(rewards_NF)).nansum(dim=1)
        total_N[rewards_NF.isnan().all(dim=1)] = torch.nan
        own_B = total_N[process_rank() * num_rows : (process_rank() + 1) * num_rows]
        batch[ROW_REWARD] = own_B.to(self._trainer.accelerator.device)

    def after_generation(self, rows: Any, batch: dict[str, Any]) -> None:
        """A fresh generation gets what the channels train on."""
        rewards = [None if math.isnan(reward) else reward for reward in batch[ROW_REWARD].tolist()]
        if self.hints is not None:
            self.hints.after_generation(rows, batch, rewards)
        if self.replay is not None:
            self.replay.after_generation(batch, rewards)

    @property
    def keep_first_weights(self) -> bool:
        """Whether a channel keeps the trained weights as they are before the first step."""
        teaches = self.hints is not None and self.hints.settings.teacher == "frozen"
        return teaches or (self.replay is not None and self.replay.keeps_first_weights)

    @property
    def first_weights(self) -> WeightCopy | None:
        """Those weights, where they are kept."""
        copies = self._copies()
        return copies["teacher"] if copies["first"] is None else copies["first"]

    def _copies(self) -> dict[str, WeightCopy | None]:
        return {
            "teacher": None if self.hints is None else self.hints.teacher_weights,
            "first": None if self.replay is None else self.replay.first_weights,
        }

    # ---- checkpoints --------------------------------------------------------------------------------

    def write(self, checkpoint: Path, *, is_inside_generation: bool) -> None:
        """Weights and numbers in a file of their own; hinted turns that are still to be trained on in one a process."""
        copies = self._copies().items()
        state = {name: None if copy is None else copy.tensors() for name, copy in copies} | {
            "fingerprint": self._fingerprint(),
            "reference": None if self.replay is None else self.replay.reference_P2,
        }
        if process_rank() == 0:
            torch.save(state, checkpoint / STATE_FILE)
        if is_inside_generation:
            of_rows = () if self.hints is None else self.hints.turns_of_row
            torch.save([[asdict(turn) for turn in of_row] for of_row in of_rows], checkpoint / _turns_name())

    def read(self, checkpoint: Path) -> None:
        """What the channels kept waits for ``begin``."""
        path = checkpoint / STATE_FILE
        self._saved = torch.load(path, map_location=lambda storage, _tag: storage, weights_only=True)
        if self._saved["fingerprint"] != self._fingerprint():
            raise _other_channels("its hints or pairs, or their settings, are not this trainer's", path)
        if self.hints is not None and (checkpoint / _turns_name()).is_file():
            turns = torch.load(checkpoint / _turns_name(), weights_only=True)
            self.hints.turns_of_row = [[HintedTurn(**turn) for turn in of_row] for of_row in turns]

    def _fingerprint(self) -> str:
        """Of both tables, the records and the seed of their order; weights may change between runs."""
        digest = hashlib.sha256(str(self._trainer.args.seed).encode())
        channels: dict[str, HintChannel | ReplayChannel | None] = {"hints": self.hints, "replay": self.replay}
        for name, channel in channels.items():
            if channel is not None:
                records = [asdict(record) for record in channel.records]
                kept = [name, channel.settings.model_dump(), records]
                digest.update(json.dumps(kept, sort_keys=True).encode())
        return digest.hexdigest()


def refuse_bad_weights(**weights: Any) -> None:
    """A channel's weight is a finite number of at least 0; True would silently be 1."""
    for name, weight in weights.items():
        if isinstance(weight, bool) or not isinstance(weight, Real) or not 0.0 <= float(weight) < math.inf:
            raise TrainerSettingError(
                "CR0722",
                f"{name} is {weight!r} and must be a finite number of at least 0.",
                where=f"trainer.{name}",
                fix=f"set trainer.{name} to 0 or above.",
            )


def refuse_other_channels(checkpoint: Path, *, has_channels: bool) -> None:
    """A run goes on with the channels that it began with."""
    path = checkpoint / STATE_FILE
    if path.is_file() is not has_channels:
        had = "has" if path.is_file() else "has no"
        raise _other_channels(
            f"the checkpoint {had} state of loss channels, and this trainer is otherwise", path
        )


def _turns_name() -> str:
    return f"hinted_turns_{process_rank()}.pt"


def _other_channels(sentence: str, path: Path) -> InputError:
    return InputError(
        "CR0884",
        f"the checkpoint belongs to another run: {sentence}.",
        where=str(path),
        fix="resume with the same hints, pairs, tables and seed, or start a new run.",
    )
