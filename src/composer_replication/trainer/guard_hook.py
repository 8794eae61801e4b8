"""The guard inside the training loop: when it is asked, with what, and what follows.

A mixin of the trainer. It reads the keyword attributes, ``state.global_step``,
``args.logging_steps``, ``control``, ``_metrics`` and ``log``, and nothing else of TRL's;
its own state has defaults on the class.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import torch

from composer_replication.errors import CollapseStopError, InputError
from composer_replication.interfaces import Guard, GuardStatus, ReadingGuard
from composer_replication.records import HeldoutReading, Verdict
from composer_replication.trainer.in_loop_signals import InLoopSignals
from composer_replication.trainer.initial_kl import KlPath
from composer_replication.trainer.processes import from_first, gathered, once
from composer_replication.trainer.run_lines import RunLines

logger = logging.getLogger(__name__)

HeldoutEval = Callable[[], float | HeldoutReading | None]


class GuardHook(RunLines):
    """Folds the guard once per cadence hit, logs its verdict, then acts on it.

    Attributes:
        num_cadence_hits_without_new_reward: folds that had to use the remembered reward.
        kl_path_off_reason: why the guard gets no KL, or None.
        halted_at: ``global_step`` of the fold that fired, or None.
        last_verdict: the newest row of ``verdicts.jsonl``, or None.
    """

    heldout_guard: Guard | None = None
    heldout_eval_fn: HeldoutEval | None = None
    strict_killswitch: bool = True
    split_fingerprint: str = ""
    num_cadence_hits_without_new_reward: int = 0
    kl_path_off_reason: str | None = None
    halted_at: int | None = None
    last_verdict: dict[str, Any] | None = None
    control: Any
    log: Any
    _in_evaluation: bool = False
    _gate_step: int | None = None
    _last_round_idx: int | None = None
    _kl_path: KlPath = KlPath.LOGGED
    _kl_sample: tuple[float, float] | None = None
    _weights_are_sharded: bool = False
    _hook_began: float | None = None
    _eval_seconds: float = 0.0

    def _gate_is_open(self) -> bool:
        """The first micro-step of a global step on the cadence, outside evaluation."""
        if self._in_evaluation or self._gate_step == self.state.global_step:
            return False
        every = self.args.logging_steps
        if 0 < every < 1:  # a share of all steps, which transformers resolves into its state
            every = self.state.logging_steps
        return bool(every > 0 and self.state.global_step % every == 0)

    def _maybe_update_killswitch(self) -> None:
        """Fold one checkpoint into the guard: evaluate, update, log, act.

        Without a guard nothing is read, called or logged. Without any finite in-loop reward
        so far the fold is skipped. ``heldout_eval_fn()`` runs without gradient; None means that
        no evaluation is due. On several processes it runs once in total, and each process
        folds the same numbers. A ``ReadingGuard`` gets whole readings, any other guard the score.

        Raises:
            CollapseStopError: the guard fired, or the evaluation gave up, and ``strict_killswitch`` is set.
            InputError: the score was measured on another split (CR0502).
            ValueError: the guard refused a number.
        """
        guard = self.heldout_guard
        if guard is None:
            return
        signals = self._signals()
        signals.read(self._metrics.get("train", {}))
        reward, is_new = from_first((signals.reward, signals.is_reward_new))
        kl = self._kl_to_init(signals)
        if reward is None:
            return
        if not is_new:
            self._count_stale_reward(reward)
        start = time.monotonic()
        if self._hook_began is None:
            self._hook_began = start
        try:
            reading = once(self._evaluate_heldout, every_process_joins=self._weights_are_sharded)
        except CollapseStopError as error:  # the evaluation itself gave up: nobody knows the truth
            self._halt_without_reading(error, kl, time.monotonic() - start)
            return
        self._eval_seconds += time.monotonic() - start
        if reading is None:
            return
        self._refuse_foreign_split(reading)
        round_idx = self.state.global_step
        status = _updated(guard, reading, round_idx=round_idx, reward=reward, kl=kl)
        signals.is_reward_new = False
        self._last_round_idx = round_idx
        row = _log_row(status)
        self._write_verdict(status, row, reading, kl, time.monotonic() - start)
        self.log(row)
        if status.fire:
            self._act_on(guard, status)

    def _halt_without_reading(self, error: CollapseStopError, kl: float | None, seconds: float) -> None:
        """A halt that came from ``heldout_eval_fn``: verdict and line first, then as for any other."""
        row = _log_row(error.status)
        self._write_verdict(error.status, row, None, kl, seconds)
        self.log(row)
        self.halted_at = self.state.global_step
        if self.strict_killswitch:
            raise error
        self.control.should_training_stop = True

    def _evaluate_heldout(self) -> float | HeldoutReading | None:
        if self.heldout_eval_fn is None:  # only reachable on an instance that skipped the constructor
            raise ValueError("heldout_guard is set but heldout_eval_fn is not")
        with torch.no_grad():
            return self.heldout_eval_fn()

    def _kl_to_init(self, signals: InLoopSignals) -> float | None:
        """Mean KL to the initial policy, nats per token, over all processes; None where there is none."""
        if self._kl_path is KlPath.LOGGED:
            return from_first(signals.kl)
        sample, self._kl_sample = self._kl_sample, None
        if self._kl_path is KlPath.OFF:
            return None
        samples = [part for part in gathered(sample) if part is not None]
        num_tokens = sum(count for _, count in samples)
        return sum(total for total, _ in samples) / num_tokens if num_tokens else None

    def _eval_seconds_share(self) -> float:
        """Share of the time since the first evaluation that evaluations took, in this process's life."""
        began = time.monotonic() if self._hook_began is None else self._hook_began
        elapsed = time.monotonic() - began
        return self._eval_seconds / elapsed if elapsed > 0 else 0.0

    def _count_stale_reward(self, reward: float) -> None:
        self.num_cadence_hits_without_new_reward += 1
        logger.warning(
            "killswitch: global step %d is on the guard's cadence, but no in-loop reward came since the fold "
            "at step %s; the remembered reward %.4g stands in (%d time(s) so far). One generation serves "
            "steps_per_generation x num_iterations micro-steps: choose logging_steps no shorter than that.",
            self.state.global_step,
            self._last_round_idx,
            reward,
            self.num_cadence_hits_without_new_reward,
        )

    def _refuse_foreign_split(self, reading: float | HeldoutReading) -> None:
        measured_on = reading.split_fingerprint if isinstance(reading, HeldoutReading) else ""
        if measured_on and self.split_fingerprint and measured_on != self.split_fingerprint:
            raise foreign_split(measured_on, self.split_fingerprint, where="the held-out reading")

    def _write_verdict(
        self,
        status: GuardStatus,
        row: Mapping[str, float],
        reading: float | HeldoutReading | None,
        kl: float | None,
        seconds: float,
    ) -> None:
        """Keep the verdict: on the trainer, and in the run folder where this process writes one."""
        round_idx = self.state.global_step
        verdict = Verdict(
            round_idx=round_idx,
            fire=bool(status.fire),
            reason=str(getattr(status, "reason", "")),
            in_loop_ema=getattr(status, "in_loop_ema", None),
            heldout_ema=getattr(status, "heldout_ema", None),
            kl_ema=getattr(status, "kl_ema", None),
            proxy_real_gap=getattr(status, "proxy_real_gap", 0.0),
            decline_streak=getattr(status, "decline_streak", 0),
            num_updates=getattr(status, "num_updates", 0),
            split_fingerprint=self.split_fingerprint or getattr(reading, "split_fingerprint", ""),
        )
        off = f" ({self.kl_path_off_reason})" if self.kl_path_off_reason else ""
        evidence = {f"evidence_{name}": value for name, value in _evidence_figures(status).items()}
        self.last_verdict = {**asdict(verdict), "kl_path": f"{self._kl_path.value}{off}", **evidence}
        if self._run_log is None:
            return
        self._run_log.verdict(self.last_verdict)
        fields = {
            **row,
            "killswitch/round_idx": round_idx,
            "killswitch/eval_seconds": seconds,
            "killswitch/eval_seconds_share": self._eval_seconds_share(),
        }
        if reading is not None:
            fields["heldout/score"] = _score_of(reading)
        if kl is not None:
            fields["killswitch/kl_to_init"] = kl
        if isinstance(reading, HeldoutReading):
            fields |= _reading_fields(reading)
        if status.fire:
            fields["halted"] = True
        self._run_log.note(fields)

    def _act_on(self, guard: Guard, status: GuardStatus) -> None:
        self.halted_at = self.state.global_step
        if not self.strict_killswitch:
            self.control.should_training_stop = True
            return
        guard.raise_if_fired(status)
        raise CollapseStopError(status)


def foreign_split(found: str, expected: str, *, where: str) -> InputError:
    """The refusal of a score or a checkpoint that belongs to another split."""
    return InputError(
        "CR0502",
        f"it was measured on split {found}, but this run's split is {expected}.",
        where=where,
        fix="go on with the split that the run began with, or start a new run.",
    )


def _updated(
    guard: Guard, reading: float | HeldoutReading, *, round_idx: int, reward: float, kl: float | None
) -> GuardStatus:
    if isinstance(reading, HeldoutReading) and isinstance(guard, ReadingGuard):
        return guard.update_from_reading(round_idx, reading, in_loop_reward=reward, kl_to_init=kl)
    return guard.update(round_idx, in_loop_reward=reward, heldout_score=_score_of(reading), kl_to_init=kl)


def _score_of(reading: float | HeldoutReading) -> float:
    return float(reading.score) if isinstance(reading, HeldoutReading) else float(reading)


def _evidence_figures(status: GuardStatus) -> Mapping[str, float]:
    figures = getattr(status, "evidence_figures", None)
    return figures if isinstance(figures, Mapping) else {}


def _log_row(status: GuardStatus) -> dict[str, float]:
    row: dict[str, float] = {"killswitch/fire": 1.0 if status.fire else 0.0}
    for name in ("in_loop_ema", "heldout_ema", "proxy_real_gap", "kl_ema"):
        value = getattr(status, name, None)
        if value is not None:
            row[f"killswitch/{name}"] = float(value)
    for name, value in _evidence_figures(status).items():
        row[f"killswitch/evidence_{name}"] = float(value)
    return row


def _reading_fields(reading: HeldoutReading) -> dict[str, float]:
    fields: dict[str, float] = {
        "heldout/evaluation_idx": reading.evaluation_idx,
        "heldout/infrastructure_failures": reading.infrastructure_failures,
    }
    if reading.pairs:
        fields["heldout/visible"] = sum(visible for visible, _ in reading.pairs) / len(reading.pairs)
        fields["heldout/hidden"] = sum(hidden for _, hidden in reading.pairs) / len(reading.pairs)
    return fields
