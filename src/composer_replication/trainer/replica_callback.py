"""Ties a trainer to the other replicas of its run: join before the first step, merge after steps, stop together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

if TYPE_CHECKING:
    from composer_replication.replicas.replica_loop import ReplicaLoop
    from composer_replication.replicas.run_records import RunEnd


class ReplicaCallback(TrainerCallback):
    """Calls the loop, and turns what it says into a stop of the trainer.

    Args:
        trainer: the ``ComposerReplicationTrainer`` it belongs to.
        loop: of this replica.
        identity: what every replica of the run must share, by name.
    """

    def __init__(self, trainer: Any, loop: ReplicaLoop, identity: Mapping[str, str]) -> None:
        self._trainer, self._loop, self._identity = trainer, loop, identity

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._follow(
            self._loop.begin(
                self._identity,
                max_steps=state.max_steps,
                step=state.global_step,
                tokens=int(state.num_input_tokens_seen),
            ),
            control,
        )

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._follow(self._loop.after_step(state.global_step, int(state.num_input_tokens_seen)), control)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A halt of this replica is told to all; a finished run takes its last merges."""
        if self._trainer.is_interrupted:
            self._loop.close()
        elif self._trainer.halted_at is None:
            self._follow(self._loop.finish(), control)
        else:
            reason = str((self._trainer.last_verdict or {}).get("reason", ""))
            self._follow(self._loop.halt(reason), control)

    def _follow(self, end: RunEnd | None, control: Any) -> None:
        if end is None:
            return
        control.should_training_stop = True
        said = (
            (self._trainer.last_verdict or {}).get("reason") if self._trainer.halted_at is not None else None
        )
        if end.kind == "halted" and end.reason != said:
            self._trainer.halt_for(end.reason, end.replica)
