"""An orderly stop: by a person, a scheduler or the other replicas."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Mapping
from types import FrameType
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

from composer_replication.trainer.processes import gathered, num_processes

if TYPE_CHECKING:
    from composer_replication.replicas.replica_loop import ReplicaLoop
    from composer_replication.replicas.run_records import RunEnd


class InterruptOnce:
    """Inside, Ctrl-C, or a scheduler's order to end, asks for a checkpoint at the end of the step.

    A second Ctrl-C stops at once. Further orders to end (SIGTERM) change nothing: schedulers send them to a launcher and to
    its processes, and the launcher passes its own on; what is too slow is killed by them. Nothing is installed outside the
    main thread or under another program's handler. With several processes only the order to end is heard: each of them gets a
    Ctrl-C twice, which leaves the last whole checkpoint.
    """

    def __init__(self) -> None:
        self.is_requested = False
        self._taken: list[signal.Signals] = []

    def __enter__(self) -> InterruptOnce:
        self.is_requested, self._taken = False, []
        if threading.current_thread() is not threading.main_thread():
            return self
        heard = [signal.SIGTERM] if num_processes() > 1 else [signal.SIGINT, signal.SIGTERM]
        self._taken = [n for n in heard if signal.getsignal(n) is signal.default_int_handler]
        for number in self._taken:
            signal.signal(number, self._ask)
        return self

    def __exit__(self, *error: object) -> None:
        for number in self._taken:
            signal.signal(number, signal.default_int_handler)

    def is_agreed(self) -> bool:
        """Whether any process was asked to end: all stop at the same step. A collective call."""
        self.is_requested = any(gathered(self.is_requested))
        return self.is_requested

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if not self.is_requested:
            again = " Ctrl-C again stops at once." if number == signal.SIGINT else ""
            sys.stderr.write(f"\nInterrupted: finishing this step and saving it.{again}\n")
        self.is_requested = True
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)


class ReplicaCallback(TrainerCallback):
    """Calls the loop of this replica, and turns what it says into a stop of the trainer.
    ``identity`` is what every replica of the run must share, by name.
    """

    def __init__(self, trainer: Any, loop: ReplicaLoop, identity: Mapping[str, str]) -> None:
        self._trainer, self._loop, self._identity = trainer, loop, identity

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        at = {"step": state.global_step, "tokens": int(state.num_input_tokens_seen)}
        self._follow(self._loop.begin(self._identity, max_steps=state.max_steps, **at), control)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._follow(self._loop.after_step(state.global_step, int(state.num_input_tokens_seen)), control)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A halt of this replica is told to all; a finished run takes its last merges."""
        if self._trainer.interrupt.is_requested:
            self._loop.close()
        elif self._trainer.halted_at is None:
            self._follow(self._loop.finish(), control)
        else:
            self._follow(self._loop.halt(self._own_reason), control)

    @property
    def _own_reason(self) -> str:
        """What the newest verdict of this replica says."""
        return str((self._trainer.guard_hook.last_verdict or {}).get("reason", ""))

    def _follow(self, end: RunEnd | None, control: Any) -> None:
        if end is None:
            return
        control.should_training_stop = True
        is_own = self._trainer.halted_at is not None and end.reason == self._own_reason
        if end.kind == "halted" and not is_own:
            self._trainer.guard_hook.halt_for(end.reason, end.replica)
