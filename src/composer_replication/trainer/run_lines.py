"""The numbers of one optimizer step, on their way into ``metrics.jsonl``.

A mixin of the trainer; without a run folder it does nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from composer_replication.trainer.in_loop_signals import InLoopSignals
from composer_replication.trainer.metrics_log import RunLog, StepWindow
from composer_replication.trainer.processes import gathered


class RunLines:
    """Collects what TRL measured in the step and hands it to the run's log."""

    state: Any
    args: Any
    _metrics: Any
    _tr_loss: Any
    _run_log: RunLog | None = None
    _step_window: StepWindow | None = None
    _in_loop_signals: InLoopSignals | None = None
    _loss_seen: float = 0.0

    def _signals(self) -> InLoopSignals:
        if self._in_loop_signals is None:
            self._in_loop_signals = InLoopSignals()
        return self._in_loop_signals

    def _window(self) -> StepWindow:
        if self._step_window is None:
            self._step_window = StepWindow()
        return self._step_window

    def finish_step_line(self, seconds: float) -> None:
        """The optimizer step is over: put its numbers into its line.

        A collective call: the loss is the mean over the processes.
        """
        totals = gathered(float(self._tr_loss))
        if self._run_log is None:
            return
        metrics = self._metrics["train"]
        fields: dict[str, Any] = dict(self._window().take(metrics))
        self._signals().read(metrics)
        fields["reward_is_new"] = "reward" in fields
        fields.setdefault("reward", self._signals().reward)  # trained on, but sampled in an earlier step
        total = sum(totals) / len(totals)
        fields["loss"], self._loss_seen = total - self._loss_seen, total
        self._run_log.finish_step(self.state.global_step, {**fields, "step_seconds": seconds})

    def add_trl_row(self, logs: Mapping[str, Any]) -> None:
        """Take what only TRL's own row knows over into the step's line."""
        if self._run_log is not None:
            self._run_log.add_trl_row(self.state.global_step, logs)

    def flush_run_log(self) -> None:
        if self._run_log is not None:
            self._run_log.flush()

    def _finish_broken_line(self) -> None:
        """Write the line of a step that ended before its optimizer step."""
        if self._run_log is not None and self._run_log.has_open_step:
            self._run_log.finish_step(self.state.global_step + 1, self._window().take(self._metrics["train"]))
            self._run_log.flush()
