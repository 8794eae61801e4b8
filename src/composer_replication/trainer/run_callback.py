"""What happens at the borders of a step: log lines, an orderly stop, a progress bar."""

from __future__ import annotations

import signal
import sys
import threading
import time
from types import FrameType
from typing import Any

from tqdm import tqdm
from transformers import TrainerCallback

from composer_replication.trainer.processes import num_processes, process_rank


class InterruptOnce:
    """The first Ctrl-C asks for a checkpoint at the end of the step; the second stops at once.

    Used as a context around training. Nothing is installed outside the main thread, under
    another program's handler, or with several processes, which would not stop at the same
    step: there a Ctrl-C simply leaves the last whole checkpoint.
    """

    def __init__(self) -> None:
        self.is_requested = False
        self._is_installed = False

    def __enter__(self) -> InterruptOnce:
        self.is_requested = False
        self._is_installed = (
            num_processes() == 1
            and threading.current_thread() is threading.main_thread()
            and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        )
        if self._is_installed:
            signal.signal(signal.SIGINT, self._first)
        return self

    def __exit__(self, *error: object) -> None:
        if self._is_installed:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def _first(self, number: int, frame: FrameType | None) -> None:
        self.is_requested = True
        signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.stderr.write("\nInterrupted: finishing this step and saving it. Ctrl-C again stops at once.\n")


class RunCallback(TrainerCallback):
    """Writes the run folder's lines and turns an interruption into a saved stop.

    Args:
        trainer: the ``ComposerReplicationTrainer`` it belongs to.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._step_began = time.monotonic()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The step before is complete, evaluations included: its line is written."""
        self._trainer.flush_run_log()
        self._step_began = time.monotonic()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Close the step's line; stop where the guard or a person asked for it."""
        self._trainer.finish_step_line(time.monotonic() - self._step_began)
        if self._trainer.is_interrupted or self._trainer.halted_at is not None:
            control.should_save = True
            control.should_training_stop = True

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self._trainer.add_trl_row(logs or {})

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._trainer.flush_run_log()


class TrainingProgress(TrainerCallback):
    """A progress bar on standard error: steps, rate, time left, newest reward.

    Args:
        quiet: show nothing.
    """

    def __init__(self, *, quiet: bool = False) -> None:
        self._quiet = quiet
        self._bar: tqdm[Any] | None = None
        self._shown: dict[str, str] = {}
        self._drawn = 0.0

    def show_episodes(self, num_ended: int, num_all: int) -> None:
        """Within a step: how many of its episodes have ended."""
        if self._bar is None:
            return
        self._bar.set_postfix({"episodes": f"{num_ended}/{num_all}", **self._shown}, refresh=False)
        if time.monotonic() - self._drawn >= self._bar.mininterval:
            self._drawn = time.monotonic()
            self._bar.refresh()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not self._quiet and process_rank() == 0:
            self._bar = tqdm(
                total=state.max_steps,
                initial=state.global_step,
                desc="train",
                unit="step",
                file=sys.stderr,
                mininterval=0.2 if sys.stderr.isatty() else 10.0,  # a log file needs no animation
            )

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._bar is not None:
            self._bar.update(state.global_step - self._bar.n)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if self._bar is None or not logs:
            return
        newest = {"reward": logs.get("reward"), "held out": logs.get("killswitch/heldout_ema")}
        self._shown.update({name: f"{value:.3f}" for name, value in newest.items() if value is not None})
        self._bar.set_postfix(self._shown, refresh=False)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None
