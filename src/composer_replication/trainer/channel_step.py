"""What both loss channels need of the step under way, and which records it trains on."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from composer_replication.trainer.model_modes import weights_are_sharded
from composer_replication.trainer.processes import gathered, num_processes, process_rank

if TYPE_CHECKING:
    from trl.trainer.grpo_trainer import GRPOTrainer

R = TypeVar("R")
Scope = Callable[[], AbstractContextManager[Any]]
"""Opens what a forward is made in: autocast, or the teacher's weights."""


class LossChannel:
    """What both channels need of the step under way; ``per_step`` recorded turns or pairs are drawn for each step."""

    def __init__(self, trainer: GRPOTrainer, records: Sequence[Any] | None, per_step: int) -> None:
        self._trainer = trainer
        self.records, self._per_step = records or (), per_step
        self._draws: RecordDraws | None = None
        self._weights_are_sharded = False
        self._newest_part = (-1, 0)

    def begin(self) -> None:
        """Set the channel to the run's start."""
        self._weights_are_sharded = weights_are_sharded(self._trainer.model)
        self._newest_part = (-1, 0)
        if self.records:
            seed = self._trainer.args.seed
            self._draws = RecordDraws(self.records, per_step=self._per_step, seed=seed)

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

    def _drawn(self) -> tuple[list[int], list[int]]:
        """The records of the optimizer step, and those of them that this micro-batch takes: their indices.

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

    def _window_share(self) -> float:
        """Optimizer step over generation, in micro-batches: what turns a generation's total into a step's."""
        args: Any = self._trainer.args
        return float(self._trainer.current_gradient_accumulation_steps) / float(args.steps_per_generation)

    def _rows_to_forward(self, rows: R | None, stand_in: Callable[[], R]) -> R | None:
        """The rows themselves; a stand-in, whose loss is not to count, where only other processes have some.

        Where weights are spread over processes each has to forward as often as the others. A collective call then.
        """
        if not self._weights_are_sharded or not any(gathered(rows is not None)):
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


def weighted_means(parts: Sequence[Any], *names: str, weight: str) -> dict[str, float]:
    """The mean of each of these figures over parts of a micro-batch, weighed by another of their figures."""
    weights = [float(getattr(part, weight)) for part in parts]

    def mean(name: str) -> float:
        return sum(float(getattr(part, name)) * n for part, n in zip(parts, weights, strict=True)) / sum(
            weights
        )

    return {name: mean(name) for name in names}


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
