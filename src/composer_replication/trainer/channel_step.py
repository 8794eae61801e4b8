"""What both loss channels need of the step under way. A mixin of the trainer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from composer_replication.trainer.processes import gathered, num_processes, process_rank

R = TypeVar("R")


class ChannelStep:
    """Which part of the optimizer step a micro-batch is, and where a channel's numbers go."""

    state: Any
    args: Any
    accelerator: Any
    model: Any
    current_gradient_accumulation_steps: Any
    _tokenizer: Any
    _metrics: Any
    _in_evaluation: bool = False
    _weights_are_sharded: bool = False
    _micro_steps: dict[str, tuple[int, int]] | None = None

    def _part_of_step(self, channel: str) -> tuple[int, int]:
        """This micro-batch's number among all micro-batches of the step on all processes, and how many there are.

        Counted here and not from TRL's micro-step, which runs on over steps that have fewer micro-batches.
        """
        known = self._micro_steps = self._micro_steps or {}
        step, count = known.get(channel, (-1, 0))
        count = count + 1 if step == self.state.global_step else 0
        known[channel] = (self.state.global_step, count)
        num_micro_steps = int(self.current_gradient_accumulation_steps)
        return process_rank() * num_micro_steps + count, num_processes() * num_micro_steps

    def _window_share(self) -> float:
        """Optimizer step over generation, in micro-batches: what turns a generation's total into a step's."""
        return float(self.current_gradient_accumulation_steps) / float(self.args.steps_per_generation)

    def _rows_to_forward(self, rows: R | None, stand_in: Callable[[], R]) -> R | None:
        """The rows themselves; a stand-in, whose loss is not to count, where only other processes have some.

        Where weights are spread over processes each has to forward as often as the others. A collective call then.
        """
        if not self._weights_are_sharded or not any(gathered(rows is not None)):
            return rows
        return stand_in() if rows is None else rows

    def _no_loss(self) -> torch.Tensor:
        return torch.zeros((), device=self.accelerator.device)

    def _note(self, channel: str, **figures: float) -> None:
        """Keep a micro-batch's figures for the log."""
        for name, value in figures.items():
            self._metrics["train"].setdefault(f"{channel}/{name}", []).append(value)

    def _gathered_sum(self, value: float) -> torch.Tensor:
        """The sum over all processes, as a 0-dimensional tensor: TRL leaves such alone when it splits a batch."""
        local = torch.tensor(value, dtype=torch.float32, device=self.accelerator.device)
        total: torch.Tensor = self.accelerator.gather(local).sum()
        return total
