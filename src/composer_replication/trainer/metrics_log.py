"""``metrics.jsonl``: exactly one line a global step; ``verdicts.jsonl``: one a guard update.

Line ``step`` = 1..N is about the N-th optimizer step. A fold at ``state.global_step`` k happens
while step k + 1 is computed, so its verdict stands in line k + 1, whose reward it judged, with
``killswitch/round_idx`` k. A number that is not finite is written as null.
"""

from __future__ import annotations

import math
import re
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from composer_replication.errors import InputError
from composer_replication.run_folder import RunFolder, append_jsonl, read_jsonl, rewrite_jsonl
from composer_replication.trainer.processes import gathered

_FROM_TRL_ROW = ("grad_norm", "learning_rate", "epoch")
_ROLLOUT_FILE = re.compile(r"(?:step|episodes|findings)-(\d+)(?:-process-\d+)?\.jsonl")


class StepWindow:
    """Which entries of TRL's metric lists belong to the step under way.

    TRL averages and empties the lists only every ``logging_steps``; a line a step needs the
    entries since the last step's end.
    """

    def __init__(self) -> None:
        self._num_used: dict[str, int] = {}
        self._newest: dict[str, float | None] = {}
        self._kept: dict[str, float | None] = {}

    def take(self, metrics: Mapping[str, Sequence[float | None]]) -> dict[str, float | None]:
        """Mean of the new finite entries of each list (None: new entries, none finite); marks them used."""
        means, self._kept = self._kept, {}
        for name, values in metrics.items():
            new = values[self._num_used.get(name, 0) :]
            # TRL overwrites its running count of tokens in place. By their text NaN is no news after NaN.
            if not new and values and repr(values[-1]) != repr(self._newest[name]):
                new = values[-1:]
            if new:
                self._newest[name] = new[-1]
                finite = [value for value in new if value is not None and math.isfinite(value)]
                means[name] = math.fsum(finite) / len(finite) if finite else None
            self._num_used[name] = len(values)
        return means

    def before_clearing(self, metrics: Mapping[str, Sequence[float | None]]) -> None:
        """Keep what the next ``take`` would miss: TRL empties its lists inside a step that is broken off."""
        self._kept = self.take(metrics)

    def after_clearing(self, metrics: Mapping[str, Sequence[float | None]]) -> None:
        self._num_used = {name: min(num, len(metrics.get(name, ()))) for name, num in self._num_used.items()}


class RunLog:
    """Writes the lines of one run, or none without a folder; ``noted`` are fields for the line of the step under way.

    A finished step's line waits until the next step begins (or a checkpoint is saved), because
    TRL's own row and an evaluation of the same step arrive after the step's end.
    """

    def __init__(self, folder: RunFolder | None = None) -> None:
        self.folder = folder
        self.noted: dict[str, Any] = {}
        self._finished: dict[str, Any] | None = None

    def finish_step(self, step: int, fields: Mapping[str, Any]) -> None:
        self.flush()
        self._finished = {**fields, **self.noted, "step": step}
        self.noted = {}

    def add_trl_row(self, step: int, logs: Mapping[str, Any]) -> None:
        """Take learning rate, gradient norm and evaluations over; averages over steps are left out."""
        if self._finished is not None and self._finished["step"] == step:
            for name, value in logs.items():
                if name in _FROM_TRL_ROW or name.startswith("eval_"):
                    self._finished.setdefault(name, value)

    def flush(self) -> None:
        """Write the finished step's line."""
        finished, self._finished = self._finished, None
        if finished is not None and self.folder is not None:
            append_jsonl(self.folder.metrics, json_row(finished))

    def verdict(self, row: Mapping[str, Any]) -> None:
        if self.folder is not None:
            append_jsonl(self.folder.verdicts, json_row(row))


def cut_back(folder: RunFolder, step: int, last_round_idx: int | None) -> None:
    """Drop what a resumed run will write again: lines, verdicts and rollouts after ``step``."""
    if folder.metrics.is_file():
        rows = _up_to(folder.metrics, "step", step)
        if [row["step"] for row in rows] != list(range(1, step + 1)):
            raise _not_ours(folder.metrics, f"its lines are not those of steps 1 to {step}")
        rewrite_jsonl(folder.metrics, rows)
    if folder.verdicts.is_file():
        last = -1 if last_round_idx is None else last_round_idx
        rewrite_jsonl(folder.verdicts, _up_to(folder.verdicts, "round_idx", last))
    if folder.checks.is_file():  # step 0 is before the first step, and begins anew with the run
        rewrite_jsonl(folder.checks, _up_to(folder.checks, "step", step or -1))
    for path in folder.rollouts.glob("*.jsonl"):
        match = _ROLLOUT_FILE.fullmatch(path.name)
        if match is not None and int(match[1]) > step:
            path.unlink()


def _up_to(path: Path, key: str, last: int) -> list[dict[str, Any]]:
    rows: list[Any] = read_jsonl(path)  # by hand somebody may have written anything
    if not all(isinstance(row, dict) and type(row.get(key)) is int for row in rows):
        raise _not_ours(path, f"a line has no integer {key}")
    return [row for row in rows if row[key] <= last]


def _not_ours(path: Path, problem: str) -> InputError:
    words = f"the run's log is not as it was written: {problem}."
    fix = "restore that file from a copy, or begin in a new folder with --out."
    return InputError("CR0401", words, where=str(path), fix=fix)


def json_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row with plain JSON scalars: not finite becomes null, arrays of one element a number."""
    found = dict(row)
    for name, value in row.items():
        plain = value.item() if hasattr(value, "item") else value
        if isinstance(plain, float) and not math.isfinite(plain):
            plain = None
        found[name] = plain if plain is None or isinstance(plain, bool | int | float | str) else str(plain)
    return found


@dataclass(slots=True)
class InLoopSignals:
    """The newest finite ``reward`` (TRL has one a generation) and ``kl`` (one a micro-step, nats) of training.

    TRL collects them in lists that ``log()`` empties, so ``read`` is called before each emptying and at each fold.
    ``is_reward_new``: one arrived since the last fold; ``num_rewards_read`` entries of the present list were read already.
    """

    reward: float | None = None
    kl: float | None = None
    is_reward_new: bool = False
    num_rewards_read: int = 0

    def read(self, metrics: Mapping[str, Sequence[float]]) -> None:
        rewards = metrics.get("reward", ())
        unread = rewards[self.num_rewards_read :] if len(rewards) >= self.num_rewards_read else rewards
        newest = _newest_finite(rewards)
        if newest is not None:
            self.is_reward_new |= newest != self.reward or _newest_finite(unread) is not None
            self.reward = newest
        self.num_rewards_read = len(rewards)
        if (newest_kl := _newest_finite(metrics.get("kl", ()))) is not None:
            self.kl = newest_kl

    def after_clearing(self, metrics: Mapping[str, Sequence[float]]) -> None:
        self.num_rewards_read = min(self.num_rewards_read, len(metrics.get("reward", ())))

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name in self.__slots__:
            setattr(self, name, state[name])


def _newest_finite(values: Sequence[Any]) -> float | None:
    """The last one that is a finite number, also as a scalar of torch or numpy."""
    numbers = (finite(value) for value in reversed(values))
    return next((number for number in numbers if number is not None), None)


def finite(value: Any) -> float | None:
    """A finite number, or an array of one, as a float; None for anything else."""
    if hasattr(value, "item"):
        try:
            value = value.item()
        except (RuntimeError, ValueError):  # more than one element
            return None
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and math.isfinite(value) else None


class StepLines(TrainerCallback):
    """Collects what TRL measures in a step, hands it to the run's log, and ends the run where that was asked for."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.log, self.signals = RunLog(), InLoopSignals()
        self.begin()

    def begin(self) -> None:
        self._window, self._loss_seen, self._step_began = StepWindow(), 0.0, time.monotonic()
        self._flushed = self._step_began
        self._seconds: dict[str, float] = defaultdict(float)

    @property
    def _metrics(self) -> dict[str, list[float]]:
        metrics: dict[str, list[float]] = self._trainer._metrics["train"]  # noqa: SLF001 - TRL's only name
        return metrics

    @contextmanager
    def timing(self, part: str) -> Iterator[None]:
        """Inside, time counts as ``PART_seconds`` of the step under way."""
        began = time.monotonic()
        try:
            yield
        finally:
            self._seconds[f"{part}_seconds"] += time.monotonic() - began

    def skip_measured(self) -> None:
        self._window.take(self._metrics)

    @contextmanager
    def clearing(self, logs: Mapping[str, Any]) -> Iterator[None]:
        """Inside, TRL logs and may empty its lists."""
        self.signals.read(self._metrics)
        self._window.before_clearing(self._metrics)
        yield
        self.signals.after_clearing(self._metrics)
        self._window.after_clearing(self._metrics)
        if "loss" in logs:
            self._loss_seen = 0.0

    def flush(self) -> None:
        self._flushed = time.monotonic()
        self.log.flush()

    def finish_broken(self) -> None:
        """Write the line of a step that ended before its optimizer step."""
        if self.log.noted:
            self.log.finish_step(self._trainer.state.global_step + 1, self._window.take(self._metrics))
            self.log.flush()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The step before is complete, evaluations included: its line is written."""
        self.flush()
        self._step_began = time.monotonic()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Close the step's line; stop where the guard or a person asked for it. The loss is the mean over the processes."""
        totals = gathered(float(self._trainer._tr_loss))  # noqa: SLF001 - transformers' only name
        fields: dict[str, Any] = dict(self._window.take(self._metrics))
        self.signals.read(self._metrics)
        fields["reward_is_new"] = "reward" in fields
        fields.setdefault("reward", self.signals.reward)  # trained on, but sampled in an earlier step
        total = sum(totals) / len(totals)
        fields["loss"], self._loss_seen = total - self._loss_seen, total
        fields |= {**self._seconds, "step_seconds": time.monotonic() - self._step_began}
        self.log.finish_step(state.global_step, fields)
        self._seconds.clear()
        if self._trainer.interrupt.is_agreed() or self._trainer.halted_at is not None:
            control.should_save = True
            control.should_training_stop = True

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A checkpoint, begun at ``flush``, is written: its seconds are in the line of the next step."""
        self._seconds["checkpoint_seconds"] += time.monotonic() - self._flushed

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.log.add_trl_row(state.global_step, logs or {})

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.flush()
