"""The two loss channels beside the policy gradient: the teacher's weights, what both need of a step, what a checkpoint keeps."""

from __future__ import annotations

import hashlib
import json
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict
from numbers import Real
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import TrainerCallback

from composer_replication.errors import InputError
from composer_replication.losses.gathered_weight import gathered as whole_weight
from composer_replication.losses.gathered_weight import is_spread
from composer_replication.records import HintedTurn
from composer_replication.trainer.collator import refuse_unfit_pairs
from composer_replication.trainer.model_modes import spread_again
from composer_replication.trainer.output_head import states_problem
from composer_replication.trainer.processes import gathered, process_rank
from composer_replication.trainer.setting_errors import TrainerSettingError

STATE_FILE = "loss_channels.pt"
ROW_REWARD = "row_reward"
"""Under this name a batch has each row's weighted reward (B,), NaN where nothing scored it."""
R = TypeVar("R")
Scope = Callable[[], AbstractContextManager[Any]]
"""Opens what a forward is made in: autocast, or the teacher's weights."""


# ---- the teacher, and the policy as it was -----------------------------------------------------------------


class WeightCopy:
    """The trained weights a second time: the teacher, or the policy as it was before the first step.

    It is no second model: the frozen part of the model, all of it with adapters, exists once. Inside ``in_place_of`` it stands in
    for the weights in a forward. Where FSDP2 spreads the weights over processes, each has its part of the copy, too.
    Kept in float32 where they are of lower precision: an average that moves by a twentieth of a small difference would stand
    still in bfloat16. ``model`` is without data-parallel wrappers, its weights whole in this process or spread by FSDP2.
    """

    def __init__(self, model: nn.Module) -> None:
        spread_again(model)
        self._weights = {
            name: parameter.detach().to(torch.promote_types(parameter.dtype, torch.float32), copy=True)
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        }

    @torch.no_grad()
    def move_towards(self, model: nn.Module, rate: float) -> None:
        """copy = (1 - rate) copy + rate weights, for each trained parameter."""
        for name, parameter in self._trained(model).items():
            weight = self._weights[name]
            _own_part(weight).lerp_(_own_part(parameter).to(weight.dtype), rate)

    @contextmanager
    def in_place_of(self, model: nn.Module) -> Iterator[None]:
        """Inside, the model has this copy's weights; no gradient may be asked for through them."""
        trained = self._trained(model)
        plain = {name: parameter for name, parameter in trained.items() if not is_spread(parameter)}
        spread = {name: parameter for name, parameter in trained.items() if is_spread(parameter)}
        originals = {name: parameter.data for name, parameter in plain.items()}
        own_parts = {name: _own_part(parameter).clone() for name, parameter in spread.items()}
        torch.clear_autocast_cache()  # it keeps casts by parameter, whatever data that holds
        try:
            for name, parameter in plain.items():
                parameter.data = self._weights[name].to(parameter.dtype)
            for name, parameter in spread.items():
                _own_part(parameter).copy_(_own_part(self._weights[name]))  # FSDP2 gathers from this memory
            yield
        finally:
            spread_again(model)
            for name, parameter in plain.items():
                parameter.data = originals[name]
            for name, parameter in spread.items():
                _own_part(parameter).copy_(own_parts[name])
            torch.clear_autocast_cache()

    def tensors(self) -> dict[str, torch.Tensor]:
        """The copy itself, whole, by parameter name, for a checkpoint. A collective call for spread weights."""
        return {
            name: whole_weight(weight).cpu() if is_spread(weight) else weight
            for name, weight in self._weights.items()
        }

    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take over what ``tensors`` gave in the run that saved it."""
        for name, weight in self._weights.items():
            _own_part(weight).copy_(_own_part(_spread_as(weight, tensors[name])))

    def _trained(self, model: nn.Module) -> dict[str, nn.Parameter]:
        """The parameters that the copy is of; spread since the copy was made, it is spread alike."""
        spread_again(model)
        trained = {name: parameter for name, parameter in model.named_parameters() if name in self._weights}
        for name, parameter in trained.items():
            self._weights[name] = _spread_as(parameter, self._weights[name])
        return trained


def _own_part(tensor: Any) -> torch.Tensor:
    """The memory of a tensor, or of this process's part of it."""
    part: torch.Tensor = tensor.detach().to_local() if is_spread(tensor) else tensor.detach()
    return part


def _spread_as(weight: Any, whole: torch.Tensor) -> torch.Tensor:
    """A whole tensor that each process has, spread as ``weight`` is; a spread one as it is."""
    if not is_spread(weight) or is_spread(whole):
        return whole
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(
        whole.to(weight.device), weight.device_mesh, weight.placements, src_data_rank=None
    )


# ---- what each of them needs of the step under way ------------------------------------------------------


class RecordDraws:
    """Epoch after epoch over the records, each in an order of its own, ``per_step`` at a time.

    What step n takes, over all micro-batches and processes, depends on the seed and n alone: a resumed run goes on exactly
    where the step count says, and every process knows what the others take.
    """

    def __init__(self, records: Sequence[Any], *, per_step: int, seed: int) -> None:
        self.num_records, self.per_step, self.seed = len(records), per_step, seed
        self._order: tuple[int, list[int]] = (-1, [])

    def of_step(self, step: int) -> list[int]:
        """Indices of the records of global step ``step`` (0 is the first)."""
        return [self._at(position) for position in range(step * self.per_step, (step + 1) * self.per_step)]

    def share(self, step: int, part: int, num_parts: int) -> list[int]:
        """What micro-batch ``part`` of ``num_parts`` takes of them; the shares together are all of them, once."""
        return self.of_step(step)[part::num_parts]

    def _at(self, position: int) -> int:
        epoch, place = divmod(position, self.num_records)
        if self._order[0] != epoch:
            order = list(range(self.num_records))
            random.Random(f"{self.seed} {epoch}").shuffle(order)  # noqa: S311  an order, no secret
            self._order = (epoch, order)
        return self._order[1][place]


class LossChannel:
    """What both channels need of the step under way."""

    records: Sequence[Any] = ()
    """Those that the channel was given, and that no generation brings."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    @property
    def _step(self) -> int:
        return int(self._trainer.state.global_step)

    @property
    def _model(self) -> Any:
        """Without the wrappers of several processes."""
        return self._trainer.accelerator.unwrap_model(self._trainer.model)

    @property
    def _pad_id(self) -> int:
        return int(self._trainer._tokenizer.pad_token_id)  # noqa: SLF001 - TRL's only name

    @property
    def _device(self) -> Any:
        return self._trainer.accelerator.device

    def _window_share(self) -> float:
        """Optimizer step over generation, in micro-batches: what turns a generation's total into a step's."""
        trainer = self._trainer
        return float(trainer.current_gradient_accumulation_steps) / float(trainer.args.steps_per_generation)

    def _rows_to_forward(self, rows: R | None, stand_in: Callable[[], R]) -> R | None:
        """The rows themselves; a stand-in, whose loss is not to count, where only other processes have some.

        Where weights are spread over processes each has to forward as often as the others. A collective call then.
        """
        if not self._trainer.has_sharded_weights or not any(gathered(rows is not None)):
            return rows
        return stand_in() if rows is None else rows

    def _note(self, prefix: str, **figures: float) -> None:
        """Keep a micro-batch's figures for the log."""
        for name, value in figures.items():
            self._trainer._metrics["train"].setdefault(f"{prefix}/{name}", []).append(value)  # noqa: SLF001 - TRL's only name

    def _gathered_sum(self, value: float) -> torch.Tensor:
        """The sum over all processes, as a 0-dimensional tensor: TRL leaves such alone when it splits a batch."""
        local = torch.tensor(value, dtype=torch.float32, device=self._device)
        total: torch.Tensor = self._trainer.accelerator.gather(local).sum()
        return total


# ---- both, as one part of the trainer -------------------------------------------------------------------


class LossChannels(TrainerCallback):
    """A ``HintChannel`` and a ``ReplayChannel`` as one part of the trainer; one whose weight is 0 is None.

    At the end of each step the teacher follows the policy.
    """

    # Any, since the modules of both channels import this one
    def __init__(self, trainer: Any, hints: Any, replay: Any) -> None:
        self._trainer, self.hints, self.replay = trainer, hints, replay
        self._saved: dict[str, Any] | None = None

    def check_model(self) -> None:
        """Refuse a model that the channels cannot train, or not on these records."""
        model = self._trainer.accelerator.unwrap_model(self._trainer.model)
        if (problem := states_problem(model)) is not None:
            words = f"hint distillation and replay cannot train this model: {problem}"
            fix = "set both weights to 0, or change what the sentence names."
            where = "trainer.alpha_sdpo, trainer.beta_replay"
            raise TrainerSettingError("CR0757", words, where=where, fix=fix)
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
        return bool(teaches or (self.replay is not None and self.replay.keeps_first_weights))

    @property
    def first_weights(self) -> WeightCopy | None:
        """Those weights, where they are kept."""
        copies = self._copies()
        return copies["first"] or copies["teacher"]

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
            torch.save([[asdict(turn) for turn in of_row] for of_row in of_rows], _turns_file(checkpoint))

    def read(self, checkpoint: Path) -> None:
        """What the channels kept waits for ``begin``."""
        path = checkpoint / STATE_FILE
        self._saved = torch.load(path, map_location=lambda storage, _tag: storage, weights_only=True)
        if self._saved["fingerprint"] != self._fingerprint():
            raise _other_channels("its hints or pairs, or their settings, are not this trainer's", path)
        if self.hints is not None and (turns_file := _turns_file(checkpoint)).is_file():
            turns = torch.load(turns_file, weights_only=True)
            self.hints.turns_of_row = [[HintedTurn(**turn) for turn in of_row] for of_row in turns]

    def _fingerprint(self) -> str:
        """Of both tables (also keys that have left: older checkpoints know them), records and the seed of their order."""
        digest = hashlib.sha256(str(self._trainer.args.seed).encode())
        for name, channel in {"hints": self.hints, "replay": self.replay}.items():
            if channel is not None:
                records = [asdict(record) for record in channel.records]
                settings = {**channel.settings.departed, **channel.settings.model_dump()}
                digest.update(json.dumps([name, settings, records], sort_keys=True).encode())
        return digest.hexdigest()


def refuse_bad_weights(**weights: Any) -> None:
    """A channel's weight is a finite number of at least 0; True would silently be 1."""
    for name, weight in weights.items():
        if isinstance(weight, bool) or not isinstance(weight, Real) or not 0.0 <= float(weight) < math.inf:
            words = f"{name} is {weight!r} and must be a finite number of at least 0."
            fix = f"set trainer.{name} to 0 or above."
            raise TrainerSettingError("CR0722", words, where=f"trainer.{name}", fix=fix)


def refuse_other_channels(checkpoint: Path, *, has_channels: bool) -> None:
    """A run goes on with the channels that it began with."""
    path = checkpoint / STATE_FILE
    if path.is_file() is not has_channels:
        had = "has" if path.is_file() else "has no"
        words = f"the checkpoint {had} state of loss channels, and this trainer is otherwise"
        raise _other_channels(words, path)


def _turns_file(checkpoint: Path) -> Path:
    return checkpoint / f"hinted_turns_{process_rank()}.pt"


def _other_channels(sentence: str, path: Path) -> InputError:
    words = f"the checkpoint belongs to another run: {sentence}."
    fix = "resume with the same hints, pairs, tables and seed, or start a new run."
    return InputError("CR0884", words, where=str(path), fix=fix)
