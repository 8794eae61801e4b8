"""The guard: one fold of it, and the hook that folds it inside the training loop.

The fold is shared with the callback for other trainers (``guard_callback``). Of its trainer the hook reads the keyword
attributes, ``state.global_step``, ``args.logging_steps``, ``control``, ``_metrics`` and ``log``, and nothing else of TRL's.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NoReturn

import torch

from composer_replication.errors import CollapseStopError, InputError
from composer_replication.interfaces import Guard, GuardStatus
from composer_replication.losses.policy_terms import k1_per_rollout
from composer_replication.records import HeldoutReading
from composer_replication.trainer.generation import Generation, loss_mask
from composer_replication.trainer.metrics_log import InLoopSignals
from composer_replication.trainer.processes import from_first, gathered, once, process_rank

logger = logging.getLogger(__name__)
kl_logger = logger.getChild("kl_path")  # a command says the same itself, and silences it


class KlPath(StrEnum):
    """Where the guard's KL to the initial policy comes from."""

    LOGGED = "logged by TRL"
    ADAPTER_OFF = "estimated with the adapter off"
    FIRST_WEIGHTS = "estimated with the first weights"
    OFF = "off"


def kl_path_of(
    model: Any, *, beta: float, sync_ref_model: bool, has_first_weights: bool = False
) -> tuple[KlPath, str]:
    """The KL path for this policy before its first step, and the reason when it is off.

    At ``beta`` above 0 TRL logs the KL to a frozen copy, unless ``sync_ref_model`` moves it. ``has_first_weights``: a copy
    of the trained weights as they are before the first step is kept anyway.
    """
    if beta != 0.0 and not sync_ref_model:
        return KlPath.LOGGED, ""
    reason = "sync_ref_model moves the reference, so its KL is not to the initial policy"
    if beta == 0.0 and not (reason := _adapter_reason(model)):
        return KlPath.ADAPTER_OFF, ""
    return (KlPath.FIRST_WEIGHTS, "") if has_first_weights else (KlPath.OFF, reason)


def _adapter_reason(model: Any) -> str:
    """Why switching the adapter off would not give the initial policy; empty when it does."""
    configs = getattr(model, "peft_config", None)
    if not isinstance(configs, dict):
        return "full fine-tuning at beta 0 keeps no copy of the initial weights"
    for config in configs.values():
        kind = str(getattr(config.peft_type, "value", config.peft_type))
        if kind != "LORA":
            return f"a {kind} adapter is not known to be the identity before training"
        if getattr(config, "bias", "none") != "none":
            return "the adapter trains biases of the base model, which stay when it is switched off"
    for name, parameter in model.named_parameters():
        if ("lora_B" in name or "lora_embedding_B" in name) and bool(parameter.detach().any()):
            return "the adapter is not zero before training, so without it the policy is not the initial one"
    return ""


HeldoutEval = Callable[[], float | HeldoutReading | None]


def raise_halt(guard: Guard, status: GuardStatus | None = None) -> NoReturn:
    """End the run by the given verdict, or by the newest one of a guard that has fired."""
    guard.raise_if_fired(status)
    raise CollapseStopError(status or getattr(guard, "last_status", None))


_UNKNOWN: dict[str, Any] = dict.fromkeys(("in_loop_ema", "heldout_ema", "kl_ema"))
_UNKNOWN |= dict.fromkeys(("proxy_real_gap", "decline_streak", "num_updates"), 0)
"""Figures of a verdict, as they are written where a guard does not know them."""


@dataclass(frozen=True, slots=True)
class Fold:
    """What the guard said of one reading, and how it is written.

    ``status`` may be that of an evaluation which gave up; ``reading`` is None then, as nobody knows the truth. ``kl`` is to the
    initial policy, nats per token; ``seconds`` are evaluation and update together.
    """

    status: GuardStatus
    reading: float | HeldoutReading | None
    kl: float | None
    seconds: float

    def fields(self) -> dict[str, float]:
        return {**self.log_row(), "killswitch/eval_seconds": self.seconds, **self.measured()}

    def log_row(self) -> dict[str, float]:
        """``killswitch/fire`` (1.0 or 0.0), the averages that there are, and the figures of the evidence."""
        names = ("in_loop_ema", "heldout_ema", "proxy_real_gap", "kl_ema")
        figures = {name: getattr(self.status, name, None) for name in names} | self._evidence()
        known = {f"killswitch/{name}": float(value) for name, value in figures.items() if value is not None}
        return {"killswitch/fire": 1.0 if self.status.fire else 0.0, **known}

    def measured(self) -> dict[str, float]:
        fields: dict[str, float] = {} if self.reading is None else {"heldout/score": score_of(self.reading)}
        if self.kl is not None:
            fields["killswitch/kl_to_init"] = self.kl
        if isinstance(self.reading, HeldoutReading):
            fields["heldout/evaluation_idx"] = self.reading.evaluation_idx
            fields["heldout/infrastructure_failures"] = self.reading.infrastructure_failures
            if pairs := self.reading.pairs:
                fields["heldout/visible"] = sum(visible for visible, _ in pairs) / len(pairs)
                fields["heldout/hidden"] = sum(hidden for _, hidden in pairs) / len(pairs)
        return fields

    def verdict(self, round_idx: int, *, split_fingerprint: str, kl_path: str) -> dict[str, Any]:
        """A line of ``verdicts.jsonl``; a guard of another make may know less than ours."""
        said = {name: getattr(self.status, name, other) for name, other in _UNKNOWN.items()}
        said |= {"round_idx": round_idx, "fire": bool(self.status.fire)}
        said["reason"] = str(getattr(self.status, "reason", ""))
        said["split_fingerprint"] = split_fingerprint or getattr(self.reading, "split_fingerprint", "")
        return {**said, "kl_path": kl_path, **self._evidence()}

    def _evidence(self) -> dict[str, float]:
        figures = getattr(self.status, "evidence_figures", None) or {}
        return {f"evidence_{name}": value for name, value in figures.items()}


def fold(
    guard: Guard,
    evaluate: HeldoutEval,
    *,
    round_idx: int,
    reward: float,
    kl: Callable[[], float | None],
    split_fingerprint: str,
    every_process_joins: bool,
) -> Fold | None:
    """Measure the truth and update the guard; None where no evaluation is due. A collective call.

    On several processes the evaluation runs once in total, and each process folds the same numbers. A guard that has
    ``update_from_reading`` gets the whole reading, another one the score. What ``evaluate`` raises is raised, but a
    ``CollapseStopError`` is its own halt. ``kl`` is asked only when a reading is there. ``every_process_joins``: weights are
    sharded, so that each has to take part in the evaluation.

    A score that was measured on another split is refused (CR0884); the guard refuses odd numbers (``ValueError``).
    """
    start = time.monotonic()
    try:
        with torch.no_grad():
            reading = once(evaluate, every_process_joins=every_process_joins)
    except CollapseStopError as error:
        return Fold(error.status, None, None, time.monotonic() - start)
    if reading is None:
        return None
    found = getattr(reading, "split_fingerprint", "")
    refuse_foreign_split(found, split_fingerprint, where="the held-out reading")
    kl_to_init = kl()
    measured: dict[str, Any] = {"in_loop_reward": reward, "kl_to_init": kl_to_init}
    if isinstance(reading, HeldoutReading) and hasattr(guard, "update_from_reading"):
        status = guard.update_from_reading(round_idx, reading, **measured)
    else:
        status = guard.update(round_idx, heldout_score=score_of(reading), **measured)
    return Fold(status, reading, kl_to_init, time.monotonic() - start)


def score_of(reading: float | HeldoutReading) -> float:
    """The score alone."""
    return float(reading.score if isinstance(reading, HeldoutReading) else reading)


def refuse_foreign_split(found: str | None, expected: str, *, where: str) -> None:
    """Refuse what was measured on another split; where either is unknown, nothing is refused."""
    if found and expected and found != expected:
        words = f"it was measured on split {found}, but this run's split is {expected}."
        fix = "go on with the split that the run began with, or start a new run."
        raise InputError("CR0884", words, where=where, fix=fix)


class GuardHook:
    """Folds the trainer's guard once per cadence hit, logs its verdict, then acts on it.

    ``batch`` is the micro-batch under way, on whose tokens the KL is estimated. ``halted_at`` is the ``global_step`` of the fold
    that fired, ``last_verdict`` the newest row of ``verdicts.jsonl``, ``kl_path_off_reason`` why the guard gets no KL (each may
    be None); ``num_cadence_hits_without_new_reward`` folds had to use the remembered reward.
    """

    KEPT = ("gate_step", "last_round_idx", "num_cadence_hits_without_new_reward", "last_verdict")
    """What a checkpoint has of it."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.batch: Mapping[str, Any] | None = None
        self.num_cadence_hits_without_new_reward = 0
        self.kl_path = KlPath.LOGGED
        self.kl_path_off_reason: str | None = None
        self._kl_path_is_chosen = False
        self.last_verdict: dict[str, Any] | None = None
        self.begin()

    def begin(self) -> None:
        self.halted_at: int | None = None
        self.last_round_idx: int | None = None
        self.gate_step: int | None = None

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.KEPT}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name in self.KEPT:
            setattr(self, name, state[name])

    def opens_gate(self) -> bool:
        """Whether this is the first micro-step of a global step on the cadence; it is no other time."""
        state, every = self._trainer.state, self._trainer.args.logging_steps
        if 0 < every < 1:  # a share of all steps, which transformers resolves into its state
            every = state.logging_steps
        is_open = every > 0 and state.global_step % every == 0 and self.gate_step != state.global_step
        if is_open:
            self.gate_step = state.global_step
        return bool(is_open)

    def update(self) -> None:
        """Fold one checkpoint into the guard: evaluate, update, log, act.

        Without a guard nothing is read, called or logged. Without any finite in-loop reward so far the fold is skipped.
        Where the guard fired, or the evaluation gave up, ``strict_killswitch`` raises ``CollapseStopError``.
        """
        trainer = self._trainer
        guard = trainer.heldout_guard
        if guard is None:
            return
        signals = trainer.step_lines.signals
        signals.read(trainer._metrics.get("train", {}))  # noqa: SLF001 - TRL's only name
        reward, is_new = from_first((signals.reward, signals.is_reward_new))
        if reward is None:
            return
        if not is_new:
            self._count_stale_reward(reward)
        if (evaluate := trainer.heldout_eval_fn) is None:  # only on an instance that skipped the constructor
            raise ValueError("heldout_guard is set but heldout_eval_fn is not")
        round_idx = trainer.state.global_step
        folded = fold(
            guard,
            evaluate,
            round_idx=round_idx,
            reward=reward,
            kl=lambda: self._kl_to_init(signals),
            split_fingerprint=trainer.split_fingerprint,
            every_process_joins=trainer.has_sharded_weights,
        )
        if folded is None:
            return
        if folded.reading is not None:
            signals.is_reward_new, self.last_round_idx = False, round_idx
        off = f" ({self.kl_path_off_reason})" if self.kl_path_off_reason else ""
        kl_path = f"{self.kl_path.value}{off}"
        verdict = folded.verdict(round_idx, split_fingerprint=trainer.split_fingerprint, kl_path=kl_path)
        self._write_verdict(verdict, folded.fields())
        trainer.log(folded.log_row() | (folded.measured() if trainer.has_trackers else {}))
        if folded.status.fire:
            self.halted_at = round_idx
            if trainer.strict_killswitch:
                raise_halt(guard, folded.status)
            trainer.control.should_training_stop = True

    def halt_for(self, reason: str, replica: int) -> None:
        """Another replica's guard has fired: stop as if it had been this one's, for the same reason."""
        self.halted_at = round_idx = self._trainer.state.global_step
        own = {**_UNKNOWN, "split_fingerprint": self._trainer.split_fingerprint}
        said = {"round_idx": round_idx, "fire": True, "reason": reason, "from_replica": replica}
        self._write_verdict({**(self.last_verdict or own), **said}, {"killswitch/fire": 1.0})
        self._trainer.control.should_training_stop = True

    def _write_verdict(self, verdict: dict[str, Any], fields: Mapping[str, float]) -> None:
        """Keep the verdict: here, and in the run folder where this process writes one."""
        self.last_verdict = verdict
        lines = self._trainer.step_lines
        lines.verdict(verdict)
        halted = {"halted": True} if verdict["fire"] else {}
        lines.noted |= {**fields, "killswitch/round_idx": verdict["round_idx"], **halted}

    def _count_stale_reward(self, reward: float) -> None:
        self.num_cadence_hits_without_new_reward += 1
        logger.warning(
            "killswitch: global step %d is on the guard's cadence, but no in-loop reward came since the fold "
            "at step %s; the remembered reward %.4g stands in (%d time(s) so far). One generation serves "
            "steps_per_generation x num_iterations micro-steps: choose logging_steps no shorter than that.",
            self._trainer.state.global_step,
            self.last_round_idx,
            reward,
            self.num_cadence_hits_without_new_reward,
        )

    # ---- KL to the initial policy -------------------------------------------------------------------

    def choose_kl_path(self) -> str | None:
        """Decide, once, where the guard's KL comes from; the reason where it comes from nowhere, for a start screen."""
        trainer = self._trainer
        if trainer.heldout_guard is not None and not self._kl_path_is_chosen:
            self.kl_path, reason = kl_path_of(
                trainer.model,
                beta=trainer.beta or trainer.policy_terms.kl_beta,
                sync_ref_model=bool(trainer.args.sync_ref_model),
                has_first_weights=bool(trainer.channels and trainer.channels.channel_of_first_weights),
            )
            self.kl_path_off_reason, self._kl_path_is_chosen = reason or None, True
            if reason and process_rank() == 0:
                kl_logger.warning("KL path off: %s.", reason)
        return self.kl_path_off_reason

    def _kl_to_init(self, signals: InLoopSignals) -> float | None:
        """Mean KL to the initial policy, nats per token, over all processes; None where there is none.

        Estimated, it is k1: for tokens drawn from the policy its mean is KL(policy || initial), unbiased; a small sample can
        come out below zero. k3, which cannot, has exp(initial_logp - policy_logp) in it: one token that the policy hardly ever
        writes and the initial model likes outweighs a whole batch, and a kill switch that reads it halts honest runs. Tokens
        that an older policy drew (several updates on one generation) bias it slightly. Reference: Schulman, Approximating KL
        Divergence (2020).
        """
        if self.kl_path is KlPath.LOGGED:
            return from_first(signals.kl)
        if self.kl_path is KlPath.OFF:
            return None
        total = num_tokens = 0.0
        if self.batch is not None:  # a forward of either policy over the micro-batch, without gradient
            known = Generation.of_batch(self.batch)
            chains = Generation(starts_BS=known.starts_BS)  # the first policy's routers choose for themselves
            policy_logps = self._trainer.logps_of(self.batch, known)
            with self.as_initial_policy():
                initial_logps = self._trainer.logps_of(self.batch, chains)
            mask_BT = loss_mask(self.batch)
            kl_B = k1_per_rollout(policy_logps.double(), initial_logps.double(), mask_BT)
            total, num_tokens = float(kl_B.sum()), float(mask_BT.sum())
        totals, counts = zip(*gathered((total, num_tokens)), strict=True)
        return sum(totals) / sum(counts) if any(counts) else None

    def as_initial_policy(self) -> AbstractContextManager[None]:
        """Inside, the model is the policy as it was before the first step."""
        model = self._trainer.accelerator.unwrap_model(self._trainer.model)
        scope: AbstractContextManager[None] = (
            model.disable_adapter()
            if self.kl_path is KlPath.ADAPTER_OFF
            else self._trainer.channels.channel_of_first_weights.weights.in_place_of(model)
        )
        return scope
