"""The guard: one fold of it, and the hook that folds it inside the training loop.

The callback for other trainers (``guard_callback``) shares the fold; ``ReplicaCallback`` brings another replica's halt. A fold
reads of TRL's trainer only ``state``, ``args.logging_steps``, ``control``, ``_metrics`` and ``log``, and the model for a KL of ours.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import StrEnum
from statistics import fmean
from typing import TYPE_CHECKING, Any, NoReturn, cast

import torch
from transformers import TrainerCallback

from composer_replication.errors import CollapseStopError, InputError
from composer_replication.interfaces import Guard, GuardStatus
from composer_replication.losses.policy_terms import k1_per_rollout
from composer_replication.records import HeldoutReading
from composer_replication.run_folder import append_jsonl
from composer_replication.trainer.generation import Generation, loss_mask
from composer_replication.trainer.metrics_log import InLoopSignals, StepLines, json_row
from composer_replication.trainer.processes import InterruptOnce, from_first, gathered, once, process_rank

if TYPE_CHECKING:
    from composer_replication.replicas.replica_loop import ReplicaLoop
    from composer_replication.replicas.run_records import RunEnd
    from composer_replication.trainer.loss_channels import LossChannels

logger = logging.getLogger(__name__)


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
    kinds = {str(getattr(config.peft_type, "value", config.peft_type)) for config in configs.values()}
    biases = {getattr(config, "bias", "none") for config in configs.values()}  # they stay when it is off
    starts = [p for name, p in model.named_parameters() if "lora_B" in name or "lora_embedding_B" in name]
    if kinds == {"LORA"} and biases == {"none"} and not any(bool(p.detach().any()) for p in starts):
        return ""
    return "without the adapter the policy is the initial one only for LoRA that is zero before training and trains no biases"


HeldoutEval = Callable[[], float | HeldoutReading | None]


def raise_halt(guard: Guard, status: GuardStatus | None = None) -> NoReturn:
    """End the run by the given verdict, or by the newest one of a guard that has fired."""
    guard.raise_if_fired(status)
    raise CollapseStopError(status or getattr(guard, "last_status", None))


_AVERAGES = ("in_loop_ema", "heldout_ema", "kl_ema", "proxy_real_gap")
_UNKNOWN: dict[str, Any] = dict.fromkeys(_AVERAGES)
_UNKNOWN |= dict.fromkeys(("proxy_real_gap", "decline_streak", "num_updates"), 0)
"""Figures of a verdict, as they are written where a guard does not know them."""


@dataclass(frozen=True, slots=True)
class Fold:
    """What the guard said of one reading, and how it is written."""

    status: GuardStatus
    verdict: dict[str, Any]  # a line of ``verdicts.jsonl`` but for its ``kl_path``
    said: dict[str, float]  # ``killswitch/fire`` (1.0 or 0.0), the averages that are known, evidence
    measured: dict[str, float]  # what the evaluation was and took; no score where it gave up


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
    ``update_from_reading`` gets the whole reading, any other the score. ``evaluate`` runs without gradient; a
    ``CollapseStopError`` of it is its own halt. ``kl`` (to the initial policy, nats a token) is asked only when a reading is
    there. ``every_process_joins``: weights are sharded, so that each has to take part in the evaluation. A score that was
    measured on another split is refused (CR0884); the guard refuses odd numbers (``ValueError``).
    """
    start, measured = time.monotonic(), dict[str, float]()
    try:
        with torch.no_grad():
            reading = once(evaluate, every_process_joins=every_process_joins)
    except CollapseStopError as error:
        status: GuardStatus = error.status
    else:
        if reading is None:
            return None
        whole = reading if isinstance(reading, HeldoutReading) else None
        if whole is not None:
            refuse_foreign_split(whole.split_fingerprint, split_fingerprint, where="the held-out reading")
            split_fingerprint = split_fingerprint or whole.split_fingerprint
            measured["heldout/evaluation_idx"] = whole.evaluation_idx
            measured["heldout/infrastructure_failures"] = whole.infrastructure_failures
            for side, scores in zip(("visible", "hidden"), zip(*whole.pairs, strict=True), strict=False):
                measured[f"heldout/{side}"] = fmean(scores)
        score = float(reading.score if isinstance(reading, HeldoutReading) else reading)
        measured["heldout/score"] = score
        signals: dict[str, Any] = {"in_loop_reward": reward, "kl_to_init": kl()}
        if whole is not None and hasattr(guard, "update_from_reading"):
            status = guard.update_from_reading(round_idx, whole, **signals)
        else:
            status = guard.update(round_idx, heldout_score=score, **signals)
        if signals["kl_to_init"] is not None:
            measured["killswitch/kl_to_init"] = signals["kl_to_init"]
    evidence = getattr(status, "evidence_figures", None) or {}
    evidence = {f"evidence_{name}": value for name, value in evidence.items()}
    verdict = {name: getattr(status, name, other) for name, other in _UNKNOWN.items()} | evidence
    verdict |= {"round_idx": round_idx, "fire": bool(status.fire), "split_fingerprint": split_fingerprint}
    verdict["reason"] = str(getattr(status, "reason", ""))
    known = {name: getattr(status, name, None) for name in _AVERAGES} | evidence
    said = {f"killswitch/{name}": float(value) for name, value in known.items() if value is not None}
    said["killswitch/fire"] = 1.0 if status.fire else 0.0
    measured["killswitch/eval_seconds"] = time.monotonic() - start
    return Fold(status, verdict, said, measured)


def refuse_foreign_split(found: str | None, expected: str, *, where: str) -> None:
    """Refuse what was measured on another split; where either is unknown, nothing is refused."""
    if found and expected and found != expected:
        words = f"it was measured on split {found}, but this run's split is {expected}."
        fix = "go on with the split that the run began with, or start a new run."
        raise InputError("CR0884", words, where=where, fix=fix)


class GuardHook:
    """Folds the trainer's guard once per cadence hit, logs its verdict, then acts on it."""

    KEPT = ("gate_step", "last_round_idx", "num_cadence_hits_without_new_reward", "last_verdict")
    """What a checkpoint has of it."""
    batch: Mapping[str, Any] | None = None  # the micro-batch under way, on whose tokens the KL is estimated
    num_cadence_hits_without_new_reward = 0  # folds that had to use the remembered reward
    last_verdict: dict[str, Any] | None = None  # the newest row of ``verdicts.jsonl``
    halted_at: int | None = None  # ``global_step`` of the fold that fired
    last_round_idx: int | None = None
    gate_step: int | None = None
    kl_path = KlPath.LOGGED
    kl_path_off_reason: str | None = None  # why the guard gets no KL
    _kl_path_is_chosen = False

    def __init__(self, trainer: Any, lines: StepLines, channels: LossChannels | None) -> None:
        self._trainer, self.lines, self.channels = trainer, lines, channels

    def begin(self) -> None:
        self.halted_at = self.last_round_idx = self.gate_step = None

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.KEPT}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        vars(self).update({name: state[name] for name in self.KEPT})

    def opens_gate(self) -> bool:
        """Whether this is the first micro-step of a global step on the cadence; it is no other time."""
        state, every = self._trainer.state, self._trainer.args.logging_steps
        if 0 < every < 1:  # a share of all steps, which transformers resolves into its state
            every = state.logging_steps
        is_open = every > 0 and state.global_step % every == 0 and self.gate_step != state.global_step
        self.gate_step = state.global_step if is_open else self.gate_step
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
        signals = self.lines.signals
        signals.read(trainer._metrics.get("train", {}))  # noqa: SLF001 - TRL's only name
        reward, is_new = from_first((signals.reward, signals.is_reward_new))
        if reward is None:
            return
        round_idx = trainer.state.global_step
        if not is_new:
            self.num_cadence_hits_without_new_reward += 1
            words = "killswitch: no new in-loop reward at step %d: the %.4g of before the fold at step %s stands in (%d time(s) "
            words += "so far). Choose logging_steps no shorter than the steps of one generation (steps_per_generation x num_iterations micro-steps)."
            num_times = self.num_cadence_hits_without_new_reward
            logger.warning(words, round_idx, reward, self.last_round_idx, num_times)
        if (evaluate := trainer.heldout_eval_fn) is None:  # only on an instance that skipped the constructor
            raise ValueError("heldout_guard is set but heldout_eval_fn is not")
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
        if "heldout/score" in folded.measured:
            signals.is_reward_new, self.last_round_idx = False, round_idx
        off = f" ({self.kl_path_off_reason})" if self.kl_path_off_reason else ""
        verdict = {**folded.verdict, "kl_path": f"{self.kl_path}{off}"}
        self._write_verdict(verdict, folded.said | folded.measured)
        trainer.log(folded.said | (folded.measured if trainer.has_trackers else {}))
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
        if self.lines.folder is not None:
            append_jsonl(self.lines.folder.verdicts, json_row(verdict))
        halted = {"halted": True} if verdict["fire"] else {}
        self.lines.noted |= {**fields, "killswitch/round_idx": verdict["round_idx"], **halted}

    def choose_kl_path(self) -> None:
        """Decide, once, where the guard's KL comes from, and say why where it comes from nowhere."""
        trainer = self._trainer
        if trainer.heldout_guard is not None and not self._kl_path_is_chosen:
            self.kl_path, reason = kl_path_of(
                trainer.model,
                beta=trainer.args.beta,
                sync_ref_model=bool(trainer.args.sync_ref_model),
                has_first_weights=bool(self.channels and self.channels.channel_of_first_weights),
            )
            self.kl_path_off_reason, self._kl_path_is_chosen = reason or None, True
            if reason and process_rank() == 0:
                logger.warning("guard: KL path off: %s.", reason)

    def _kl_to_init(self, signals: InLoopSignals) -> float | None:
        """Mean KL to the initial policy, nats per token, over all processes; None where there is none.

        Estimated, it is k1: for tokens drawn from the policy its mean is KL(policy || initial), unbiased; a small sample can
        come out below zero. In k3, which cannot, one token that the policy hardly ever writes and the initial model likes
        outweighs a whole batch, and halts honest runs. Tokens of an older policy (several updates on one generation) bias it
        slightly. Reference: Schulman, Approximating KL Divergence (2020).
        """
        if self.kl_path is KlPath.LOGGED:
            return from_first(signals.kl)
        if self.kl_path is KlPath.OFF:
            return None
        total = num_tokens = 0.0
        if self.batch is not None:  # a forward of either policy over the micro-batch, without gradient
            known, mask_BT = Generation.of_batch(self.batch), loss_mask(self.batch)
            policy_logps = self._trainer.logps_of(self.batch, known)
            with self.as_initial_policy():  # whose routers choose for themselves
                initial_logps = self._trainer.logps_of(self.batch, Generation(starts_BS=known.starts_BS))
            kl_B = k1_per_rollout(policy_logps.double(), initial_logps.double(), mask_BT)
            total, num_tokens = float(kl_B.sum()), float(mask_BT.sum())
        totals, counts = zip(*gathered((total, num_tokens)), strict=True)
        return sum(totals) / sum(counts) if any(counts) else None

    def as_initial_policy(self) -> AbstractContextManager[None]:
        """Inside, the model is the policy as it was before the first step."""
        model = self._trainer.accelerator.unwrap_model(self._trainer.model)
        if self.kl_path is KlPath.ADAPTER_OFF:
            return cast("AbstractContextManager[None]", model.disable_adapter())
        keeps = self.channels and self.channels.channel_of_first_weights
        assert keeps and keeps.weights  # as ``kl_path`` says
        return keeps.weights.in_place_of(model)


class ReplicaCallback(TrainerCallback):
    """Calls the loop of this replica, and turns what it says into a stop of the trainer.
    ``identity`` is what every replica of the run must share, by name.
    """

    def __init__(
        self, guard: GuardHook, interrupt: InterruptOnce, loop: ReplicaLoop, identity: Mapping[str, str]
    ) -> None:
        self._guard, self._interrupt, self._loop, self._identity = guard, interrupt, loop, identity

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        at = {"step": state.global_step, "tokens": int(state.num_input_tokens_seen)}
        self._follow(self._loop.begin(self._identity, max_steps=state.max_steps, **at), control)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._follow(self._loop.after_step(state.global_step, int(state.num_input_tokens_seen)), control)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A halt of this replica is told to all; a finished run takes its last merges."""
        own = self._own_reason()
        if self._interrupt.is_requested:
            self._loop.close()
        else:
            self._follow(self._loop.finish() if own is None else self._loop.halt(own), control)

    def _own_reason(self) -> str | None:
        """What this replica's guard halted the run for; None where it did not."""
        return None if self._guard.halted_at is None else (self._guard.last_verdict or {}).get("reason", "")

    def _follow(self, end: RunEnd | None, control: Any) -> None:
        if end is not None:
            control.should_training_stop = True
            if end.kind == "halted" and end.reason != self._own_reason():
                self._guard.halt_for(end.reason, end.replica)
