"""The Protocols between the folders, all on one page. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from composer_replication.records import HintedTurn, Rollout


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


class HintGenerator(Protocol):
    """Finds the turns of rollouts that went wrong and puts a hint before each: a trainer's ``hint_source``.

    ``hinted_turns`` answers row by row, in the order of the rollouts, with any number of turns. ``prompt_ids``,
    ``completion_ids`` and ``sampled_logp`` are those of a turn of its rollout, id for id; ``hinted_prompt_ids`` are the same
    prompt with the hint's ids put in at one place. What a source adds to a mapping ``counts`` is logged for each generation.
    """

    def hinted_turns(self, rollouts: Sequence[Rollout]) -> Sequence[Sequence[HintedTurn]]: ...


class PromptSource(Stateful, Protocol):
    """Who gives at most ``num_rows`` fresh rows in the place of those ``without_signal``, whose groups had equal rewards.

    The same state and the same calls give the same rows on every process; the state is in every checkpoint.

    A chooser also has ``chosen_rows(num_rows)``, which begins a generation: exactly so many rows, no two of the same task;
    ``fresh_rows`` gives others. Its ``take_outcomes()`` hands over the ``TaskOutcome``s of what was graded in this process,
    ``learn(outcomes)`` gets those of all, and its ``figures()`` are for the log.
    """

    def fresh_rows(
        self, num_rows: int, *, without_signal: Sequence[Mapping[str, Any]]
    ) -> Sequence[Mapping[str, Any]]: ...
