"""The Protocols of a guard and of a saved state, which several folders see. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class Stateful(Protocol):
    """State that must survive a restart; the dictionary is JSON-safe and versioned."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class GuardStatus(Protocol):
    """What the trainer reads from a guard's status; averages and a mapping ``evidence_figures`` are logged where it has them."""

    @property
    def fire(self) -> bool: ...
    @property
    def reason(self) -> str: ...


class Guard(Stateful, Protocol):
    """The run-level kill switch, as the trainer sees it.

    A guard that judges whole readings also has ``update_from_reading(round_idx, reading, *, in_loop_reward, kl_to_init)``,
    which is called in the place of ``update`` where ``heldout_eval_fn`` gives a ``HeldoutReading``.
    """

    def update(
        self, round_idx: int, *, in_loop_reward: float, heldout_score: float, kl_to_init: float | None = None
    ) -> GuardStatus: ...

    def should_halt(self) -> bool: ...

    def raise_if_fired(self, status: Any = None) -> None: ...
