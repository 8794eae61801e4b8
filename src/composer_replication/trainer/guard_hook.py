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

from composer_replication.errors import CollapseStopError
from composer_replication.interfaces import Guard, GuardStatus
from composer_replication.records import HeldoutReading, Verdict
from composer_replication.trainer.guard_fold import (
    HeldoutEval,
    log_row,
    reading_fields,
    refuse_foreign_split,
    updated,
    verdict_row,
)
from composer_replication.trainer.initial_kl import KlPath
from composer_replication.trainer.metrics_log import InLoopSignals, RunLines
from composer_replication.trainer.processes import from_first, gathered, once

logger = logging.getLogger(__name__)


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
    _has_trackers: bool = False
    _in_evaluation: bool = False
    _gate_step: int | None = None
    _last_round_idx: int | None = None
    _kl_path: KlPath = KlPath.LOGGED
    _sample_initial_kl: Callable[[], tuple[float, float] | None]
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
            InputError: the score was measured on another split (CR0884).
            ValueError: the guard refused a number.
        """
        guard = self.heldout_guard
        if guard is None:
            return
        signals = self._signals()
        signals.read(self._metrics.get("train", {}))
        reward, is_new = from_first((signals.reward, signals.is_reward_new))
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
            self._halt_without_reading(error, time.monotonic() - start)
            return
        self._eval_seconds += time.monotonic() - start
        if reading is None:
            return
        kl = self._kl_to_init(signals)
        found = getattr(reading, "split_fingerprint", "")
        refuse_foreign_split(found, self.split_fingerprint, where="the held-out reading")
        round_idx = self.state.global_step
        status = updated(guard, reading, round_idx=round_idx, reward=reward, kl=kl)
        signals.is_reward_new = False
        self._last_round_idx = round_idx
        row = log_row(status)
        self._write_verdict(status, row, reading, kl, time.monotonic() - start)
        self.log({**row, **reading_fields(reading, kl)} if self._has_trackers else row)
        if status.fire:
            self._act_on(guard, status)

    def halt_for(self, reason: str, replica: int) -> None:
        """Another replica's guard has fired: stop as if it had been this one's, for the same reason."""
        self.halted_at = round_idx = self.state.global_step
        row = self.last_verdict or asdict(
            Verdict(round_idx, True, reason, None, None, None, 0.0, 0, 0, self.split_fingerprint)
        )
        self.last_verdict = {
            **row,
            "round_idx": round_idx,
            "fire": True,
            "reason": reason,
            "from_replica": replica,
        }
        if self._run_log is not None:
            self._run_log.verdict(self.last_verdict)
            self._run_log.note({"killswitch/fire": 1.0, "killswitch/round_idx": round_idx, "halted": True})
        self.control.should_training_stop = True

    def _halt_without_reading(self, error: CollapseStopError, seconds: float) -> None:
        """A halt that came from ``heldout_eval_fn``: verdict and line first, then as for any other."""
        row = log_row(error.status)
        self._write_verdict(error.status, row, None, None, seconds)
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
        if self._kl_path is KlPath.OFF:
            return None
        samples = [part for part in gathered(self._sample_initial_kl()) if part is not None]
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
        off = f" ({self.kl_path_off_reason})" if self.kl_path_off_reason else ""
        self.last_verdict = verdict_row(
            status,
            round_idx,
            split_fingerprint=self.split_fingerprint or getattr(reading, "split_fingerprint", ""),
            kl_path=f"{self._kl_path.value}{off}",
        )
        if self._run_log is None:
            return
        self._run_log.verdict(self.last_verdict)
        fields = {
            **row,
            "killswitch/round_idx": round_idx,
            "killswitch/eval_seconds": seconds,
            "killswitch/eval_seconds_share": self._eval_seconds_share(),
            **reading_fields(reading, kl),
        }
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
