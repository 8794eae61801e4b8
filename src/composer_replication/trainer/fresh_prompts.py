"""Prompts in the place of those that taught nothing, in an order that a seed fixes."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any


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
