"""Which of the given records an optimizer step trains on."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any


class RecordDraws:
    """Epoch after epoch over the records, each in an order of its own, ``per_step`` at a time.

    What step n takes depends on the seed and n alone, so a resumed run goes on exactly where the step count says,
    and every process knows what the others take.

    Args:
        records: dataclass instances, at least one.
        per_step: how many one optimizer step takes, over all micro-batches and processes.
        seed: of the orders.
    """

    def __init__(self, records: Sequence[Any], *, per_step: int, seed: int) -> None:
        self.num_records = len(records)
        self.per_step = per_step
        self.seed = seed
        digest = hashlib.sha256()
        for record in records:
            digest.update(json.dumps(asdict(record)).encode() + b"\n")
        self.records_sha256 = digest.hexdigest()
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
