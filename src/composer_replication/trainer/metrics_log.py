"""``metrics.jsonl``: exactly one line a global step; ``verdicts.jsonl``: one a guard update.

Line ``step`` = 1..N is about the N-th optimizer step. A fold at ``state.global_step`` k happens while step k + 1 is computed,
so its verdict stands in line k + 1, whose reward it judged, with ``killswitch/round_idx`` k.
A run stops after the step at hand where its guard, a person or another replica asks.
"""

from __future__ import annotations

import math
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from transformers import TrainerCallback

from composer_replication.errors import InputError
from composer_replication.run_folder import RunFolder, append_jsonl, read_jsonl, rewrite_jsonl
from composer_replication.trainer.processes import InterruptOnce

_ROLLOUT_FILE = re.compile(r"(?:step|episodes|findings)-(\d+)(?:-process-\d+)?\.jsonl")


def cut_back(folder: RunFolder, step: int, last_round_idx: int | None) -> None:
    """Drop what a resumed run will write again: lines, verdicts, findings and rollouts after ``step``."""
    keep_rows(folder.metrics, "step", step)
    keep_rows(folder.verdicts, "round_idx", -1 if last_round_idx is None else last_round_idx)
    keep_rows(folder.checks, "step", step)
    for path in folder.rollouts.glob("*.jsonl"):
        match = _ROLLOUT_FILE.fullmatch(path.name)
        if match is not None and int(match[1]) > step:
            path.unlink()


def keep_rows(path: Path, key: str, last: int) -> None:
    """Drop the rows of a file whose ``key`` is above ``last``; a file with other rows is not ours (CR0401)."""
    if not path.is_file():
        return
    rows: list[Any] = read_jsonl(path)
    if not all(isinstance(row, dict) and isinstance(row.get(key), int) for row in rows):
        words = f"the run's log is not as it was written: a line has no whole number as {key}."
        fix = "restore that file from a copy, or move it away."
        raise InputError("CR0401", words, where=str(path), fix=fix)
    rewrite_jsonl(path, [row for row in rows if row[key] <= last])


def json_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row with plain JSON scalars: not finite becomes null, arrays of one element a number."""
    plain = {name: value.item() if hasattr(value, "item") else value for name, value in row.items()}
    for name, value in plain.items():
        if isinstance(value, float) and not math.isfinite(value):
            plain[name] = None
        elif not isinstance(value, bool | int | float | str | None):
            plain[name] = str(value)
    return plain


@dataclass(slots=True)
class InLoopSignals:
    """The newest finite ``reward`` (TRL has one a generation) and ``kl`` (one a micro-step, nats) of training.

    TRL collects them in lists that ``log()`` empties, so ``read`` is called around each emptying and at each fold.
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
    """Makes a line of TRL's row of each step, and ends the run where that was asked for."""

    def __init__(self, trainer: Any, interrupt: InterruptOnce, is_halted: Callable[[], bool]) -> None:
        self._trainer, self._interrupt, self._is_halted = trainer, interrupt, is_halted
        self.folder: RunFolder | None = None  # where this process writes, if anywhere
        self.signals = InLoopSignals()
        self.begin(has_run_folder=False)

    def begin(self, *, has_run_folder: bool) -> None:
        """``has_run_folder``: some process writes one, so that each of them has to log each step."""
        self._has_run_folder, self._step_began = has_run_folder, time.monotonic()
        self._seconds: dict[str, float] = defaultdict(float)
        self.noted: dict[str, Any] = {}  # fields for the line of the step under way

    def finish_step(self, step: int, fields: Mapping[str, Any]) -> None:
        row, self.noted = {**fields, **self.noted, "step": step}, {}
        if self.folder is not None:
            append_jsonl(self.folder.metrics, json_row(row))

    @contextmanager
    def timing(self, part: str) -> Iterator[None]:
        """Inside, time counts as ``PART_seconds`` of the step under way."""
        began = time.monotonic()
        try:
            yield
        finally:
            self._seconds[f"{part}_seconds"] += time.monotonic() - began

    def finish_broken(self, step: int) -> None:
        """Write the line of a step that ends the run before TRL has logged it."""
        measured = self._trainer._metrics["train"].items()  # noqa: SLF001 - TRL's only name
        known = {name: [n for n in map(finite, values) if n is not None] for name, values in measured}
        self.finish_step(step, {name: fmean(values) for name, values in known.items() if values})

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._step_began = time.monotonic()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Ask for TRL's row; stop where the guard or a person asked for it."""
        control.should_log = control.should_log or self._has_run_folder
        if self._interrupt.is_agreed() or self._is_halted():
            control.should_save = control.should_training_stop = True

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if "loss" in logs:
            # A reward of an earlier step is the one that this step trained on.
            row = {"reward": self.signals.reward, **logs, "reward_is_new": "reward" in logs, **self._seconds}
            self.finish_step(state.global_step, row | {"step_seconds": time.monotonic() - self._step_began})
            self._seconds.clear()
