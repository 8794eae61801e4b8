"""A generation's prompts from whoever chooses them, in the place of the data order's.

A mixin of the trainer. TRL's sampler runs ahead of training: its rows are fetched before the generation in front of
them is graded, so a sampler cannot ask somebody who learns. Here the rows are exchanged when a generation begins. The sampler
stays what counts steps and epochs.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from composer_replication.interfaces import PromptChooser, PromptSource
from composer_replication.trainer.processes import gathered, num_processes, process_rank
from composer_replication.trainer.setting_errors import TrainerSettingError


class ChosenPrompts:
    """Asks a ``PromptChooser`` and tells it what came of its prompts; with any other source nothing happens here."""

    prompt_source: PromptSource | None = None
    model: Any
    num_generations: Any
    _metrics: Any

    def _chosen_inputs(self, inputs: Any) -> Any:
        """In training this process's part of the rows that were chosen, each once a rollout of its group.

        TRL puts the rows of all processes one after the other and cuts groups out of them, so a group may lie
        across two processes; it has one prompt there too.

        Raises:
            TrainerSettingError: the processes chose different rows (CR0849).
        """
        chooser = self.prompt_source
        if not (isinstance(chooser, PromptChooser) and self.model.training):
            return inputs
        group = self.num_generations
        rows = chooser.chosen_rows(len(inputs) * num_processes() // group)
        _refuse_different(rows)
        for name, value in chooser.figures().items():
            self._metrics["train"][name].append(value)
        first = process_rank() * len(inputs)
        return [dict(rows[(first + n) // group]) for n in range(len(inputs))]

    def _learn_outcomes(self, output: dict[str, Any]) -> dict[str, Any]:
        """After each generation, replacements included; what an evaluation brought is dropped."""
        chooser = self.prompt_source
        if isinstance(chooser, PromptChooser):
            outcomes = chooser.take_outcomes()
            if self.model.training:
                chooser.learn([outcome for part in gathered(outcomes) for outcome in part])
        return output


def _refuse_different(rows: Sequence[Mapping[str, Any]]) -> None:
    chosen = gathered([str(row.get("task_id", row.get("prompt"))) for row in rows])
    if any(other != chosen[0] for other in chosen):
        raise TrainerSettingError(
            "CR0849",
            "the trainer processes chose different tasks for the same generation.",
            where="ComposerReplicationTrainer(prompt_source=)",
            fix="construct it alike on every process, over the same task store with the same recorded pass rates.",
        )


class ShuffledPrompts:
    """Rows of a data set in shuffled order, epoch after epoch: the default ``PromptSource``.

    A row whose prompt has just given no signal is passed over, as long as there are others.

    Args:
        rows: the training data; anything with a length and rows by number.
        seed: of the order. Epoch e is shuffled by ``random.Random(f"{seed}/{e}")``, whatever the machine.
    """

    def __init__(self, rows: Sequence[Mapping[str, Any]], seed: int) -> None:
        self._rows = rows
        self._seed = seed
        self._epoch = 0
        self._position = 0
        self._order: list[int] = []

    def fresh_rows(
        self, num_rows: int, *, without_signal: Sequence[Mapping[str, Any]]
    ) -> list[Mapping[str, Any]]:
        """See ``PromptSource``; fewer than ``num_rows`` where all others were passed over."""
        dull = [row.get("prompt", row) for row in without_signal]
        found: list[Mapping[str, Any]] = []
        for _ in range(len(self._rows)):
            if len(found) == num_rows:
                break
            row = self._rows[self._next_number()]
            if row.get("prompt", row) not in dull:
                found.append(row)
        return found

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self._epoch, "position": self._position, "num_rows": len(self._rows)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._epoch, self._position, self._order = int(state["epoch"]), int(state["position"]), []

    def _next_number(self) -> int:
        if not self._order or self._position == len(self._order):
            if self._order:
                self._epoch, self._position = self._epoch + 1, 0
            self._order = list(range(len(self._rows)))
            random.Random(f"{self._seed}/{self._epoch}").shuffle(self._order)  # noqa: S311 - an order, no secret
            if self._position == len(self._order):
                return self._next_number()
        self._position += 1
        return self._order[self._position - 1]
