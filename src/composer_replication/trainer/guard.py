"""The guard: one fold of it, and the hook that folds it inside the training loop.

The fold is shared with the callback for other trainers (``guard_callback``). The hook is a mixin of the trainer. It reads the
keyword attributes, ``state.global_step``, ``args.logging_steps``, ``control``, ``_metrics`` and ``log``, and nothing else of
TRL's; its own state has defaults on the class.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

import torch

from composer_replication.errors import CollapseStopError, InputError
from composer_replication.interfaces import Guard, GuardStatus, ReadingGuard
from composer_replication.records import HeldoutReading, Verdict
from composer_replication.trainer.chained_rows import SEGMENT_STARTS
from composer_replication.trainer.metrics_log import InLoopSignals, TrlSurface
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
    """The KL path for this model, and the reason when it is off.

    Args:
        model: the policy before its first step, PEFT-wrapped or not.
        beta: TRL's KL weight; above 0 TRL logs the KL to a frozen copy.
        sync_ref_model: TRL moves its reference model, so its KL is not to the initial policy.
        has_first_weights: a copy of the trained weights as they are before the first step is kept anyway.
    """
    path, reason = _path_without_copy(model, beta=beta, sync_ref_model=sync_ref_model)
    return (KlPath.FIRST_WEIGHTS, "") if path is KlPath.OFF and has_first_weights else (path, reason)


def _path_without_copy(model: Any, *, beta: float, sync_ref_model: bool) -> tuple[KlPath, str]:
    if beta != 0.0:
        if sync_ref_model:
            return KlPath.OFF, "sync_ref_model moves the reference, so its KL is not to the initial policy"
        return KlPath.LOGGED, ""
    configs = getattr(model, "peft_config", None)
    if not isinstance(configs, dict):
        return KlPath.OFF, "full fine-tuning at beta 0 keeps no copy of the initial weights"
    reason = _adapter_reason(model, configs)
    return (KlPath.OFF, reason) if reason else (KlPath.ADAPTER_OFF, "")


def _adapter_reason(model: Any, configs: dict[str, Any]) -> str:
    """Why switching the adapter off would not give the initial policy; empty when it does."""
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


def log_ratio_sum(
    policy_logp_BT: torch.Tensor, initial_logp_BT: torch.Tensor, mask_BT: torch.Tensor
) -> tuple[float, float]:
    """Sum of policy_logp - initial_logp over unmasked tokens, nats, and the number of tokens.

    The k1 estimate: for tokens drawn from the policy its mean is KL(policy || initial),
    unbiased; a small sample can come out below zero. k3, which cannot, has exp(initial_logp -
    policy_logp) in it: one token that the policy hardly ever writes and the initial model
    likes outweighs a whole batch, and a kill switch that reads it halts honest runs. Summed in
    float64. Shapes: B rollouts, T completion tokens.

    Tokens that an older policy drew (several updates on one generation) bias the estimate
    slightly. Reference: Schulman, Approximating KL Divergence (2020).
    """
    difference = (policy_logp_BT.double() - initial_logp_BT.double())[mask_BT.bool()]
    return float(difference.sum()), float(difference.numel())


HeldoutEval = Callable[[], float | HeldoutReading | None]


@dataclass(frozen=True, slots=True)
class Fold:
    """What the guard said of one reading, and how it is written.

    Attributes:
        status: the guard's answer, or that of an evaluation which gave up.
        reading: None where the evaluation gave up: nobody knows the truth.
        kl: to the initial policy, nats per token; None where there is none.
        seconds: evaluation and update together.
    """

    status: GuardStatus
    reading: float | HeldoutReading | None
    kl: float | None
    seconds: float

    def log_row(self) -> dict[str, float]:
        """``killswitch/fire`` (1.0 or 0.0), the averages that there are, and the figures of the evidence."""
        row: dict[str, float] = {"killswitch/fire": 1.0 if self.status.fire else 0.0}
        for name in ("in_loop_ema", "heldout_ema", "proxy_real_gap", "kl_ema"):
            value = getattr(self.status, name, None)
            if value is not None:
                row[f"killswitch/{name}"] = float(value)
        return row | {f"killswitch/{name}": float(value) for name, value in self._evidence().items()}

    def measured(self) -> dict[str, float]:
        """The score, the KL, and what else a reading knows."""
        fields: dict[str, float] = {} if self.reading is None else {"heldout/score": score_of(self.reading)}
        if self.kl is not None:
            fields["killswitch/kl_to_init"] = self.kl
        if not isinstance(self.reading, HeldoutReading):
            return fields
        fields["heldout/evaluation_idx"] = self.reading.evaluation_idx
        fields["heldout/infrastructure_failures"] = self.reading.infrastructure_failures
        if pairs := self.reading.pairs:
            fields["heldout/visible"] = sum(visible for visible, _ in pairs) / len(pairs)
            fields["heldout/hidden"] = sum(hidden for _, hidden in pairs) / len(pairs)
        return fields

    def verdict(self, round_idx: int, *, split_fingerprint: str, kl_path: str) -> dict[str, Any]:
        """A line of ``verdicts.jsonl``."""
        status = self.status
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
            split_fingerprint=split_fingerprint or getattr(self.reading, "split_fingerprint", ""),
        )
        return {**asdict(verdict), "kl_path": kl_path, **self._evidence()}

    def _evidence(self) -> dict[str, float]:
        figures = getattr(self.status, "evidence_figures", None)
        return {f"evidence_{name}": value for name, value in dict(figures or {}).items()}


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

    On several processes the evaluation runs once in total, and each process folds the same numbers. A ``ReadingGuard`` gets
    the whole reading, any other guard the score.

    Args:
        guard: as ``interfaces.Guard``.
        evaluate: the truth; runs without gradient. What it raises is raised, but a ``CollapseStopError`` is its own halt.
        round_idx: the label of the update.
        reward: the proxy.
        kl: asked only when a reading is there.
        split_fingerprint: of the held-out split; a reading of another is refused.
        every_process_joins: weights are sharded, so that each has to take part in the evaluation.

    Raises:
        InputError: the score was measured on another split (CR0884).
        ValueError: the guard refused a number.
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
    if isinstance(reading, HeldoutReading) and isinstance(guard, ReadingGuard):
        status = guard.update_from_reading(round_idx, reading, in_loop_reward=reward, kl_to_init=kl_to_init)
    else:
        score = score_of(reading)
        status = guard.update(round_idx, in_loop_reward=reward, heldout_score=score, kl_to_init=kl_to_init)
    return Fold(status, reading, kl_to_init, time.monotonic() - start)


def score_of(reading: float | HeldoutReading) -> float:
    """The score as a plain number."""
    return float(reading.score if isinstance(reading, HeldoutReading) else reading)


def refuse_foreign_split(found: str | None, expected: str, *, where: str) -> None:
    """Refuse what was measured on another split; where either is unknown, nothing is refused.

    Raises:
        InputError: it was (CR0884).
    """
    if found and expected and found != expected:
        raise InputError(
            "CR0884",
            f"it was measured on split {found}, but this run's split is {expected}.",
            where=where,
            fix="go on with the split that the run began with, or start a new run.",
        )


class GuardHook(TrlSurface):
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
    _has_trackers: bool = False
    _in_evaluation: bool = False
    _gate_step: int | None = None
    _last_round_idx: int | None = None
    _kl_path: KlPath = KlPath.LOGGED
    _kl_path_is_chosen: bool = False
    _kl_beta: float = 0.0
    _fold_rows: Any = None
    _weights_are_sharded: bool = False

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

        Without a guard nothing is read, called or logged. Without any finite in-loop reward so far the fold is skipped.

        Raises:
            CollapseStopError: the guard fired, or the evaluation gave up, and ``strict_killswitch`` is set.
            InputError, ValueError: as ``fold``.
        """
        guard = self.heldout_guard
        if guard is None:
            return
        evaluate = self.heldout_eval_fn
        signals = self.step_lines.signals
        signals.read(self._metrics.get("train", {}))
        reward, is_new = from_first((signals.reward, signals.is_reward_new))
        if reward is None:
            return
        if not is_new:
            self._count_stale_reward(reward)
        if evaluate is None:  # only reachable on an instance that skipped the constructor
            raise ValueError("heldout_guard is set but heldout_eval_fn is not")
        round_idx = self.state.global_step
        folded = fold(
            guard,
            evaluate,
            round_idx=round_idx,
            reward=reward,
            kl=lambda: self._kl_to_init(signals),
            split_fingerprint=self.split_fingerprint,
            every_process_joins=self._weights_are_sharded,
        )
        if folded is None:
            return
        if folded.reading is not None:
            signals.is_reward_new, self._last_round_idx = False, round_idx
        row, measured = folded.log_row(), folded.measured()
        off = f" ({self.kl_path_off_reason})" if self.kl_path_off_reason else ""
        verdict = folded.verdict(
            round_idx, split_fingerprint=self.split_fingerprint, kl_path=f"{self._kl_path.value}{off}"
        )
        self._write_verdict(verdict, {**row, "killswitch/eval_seconds": folded.seconds, **measured})
        self.log({**row, **measured} if self._has_trackers else row)
        if not folded.status.fire:
            return
        self.halted_at = round_idx
        if not self.strict_killswitch:
            self.control.should_training_stop = True
            return
        guard.raise_if_fired(folded.status)
        raise CollapseStopError(folded.status)

    def halt_for(self, reason: str, replica: int) -> None:
        """Another replica's guard has fired: stop as if it had been this one's, for the same reason."""
        self.halted_at = round_idx = self.state.global_step
        row = self.last_verdict or asdict(
            Verdict(round_idx, True, reason, None, None, None, 0.0, 0, 0, self.split_fingerprint)
        )
        changes = {"round_idx": round_idx, "fire": True, "reason": reason, "from_replica": replica}
        self._write_verdict({**row, **changes}, {"killswitch/fire": 1.0})
        self.control.should_training_stop = True

    def _write_verdict(self, verdict: dict[str, Any], fields: Mapping[str, float]) -> None:
        """Keep the verdict: on the trainer, and in the run folder where this process writes one."""
        self.last_verdict = verdict
        log = self.step_lines.log
        if log is None:
            return
        log.verdict(verdict)
        halted = {"halted": True} if verdict["fire"] else {}
        log.note({**fields, "killswitch/round_idx": verdict["round_idx"], **halted})

    def _kl_to_init(self, signals: InLoopSignals) -> float | None:
        """Mean KL to the initial policy, nats per token, over all processes; None where there is none."""
        if self._kl_path is KlPath.LOGGED:
            return from_first(signals.kl)
        if self._kl_path is KlPath.OFF:
            return None
        samples = [part for part in gathered(self._sample_initial_kl()) if part is not None]
        num_tokens = sum(count for _, count in samples)
        return sum(total for total, _ in samples) / num_tokens if num_tokens else None

    def choose_kl_path(self) -> str | None:
        """Decide where the guard's KL comes from; ``kl_path_off_reason`` afterwards, for a start screen."""
        if self.heldout_guard is not None and not self._kl_path_is_chosen:
            self._kl_path, reason = kl_path_of(
                self.model,
                beta=self.beta or self._kl_beta,
                sync_ref_model=bool(self.args.sync_ref_model),
                has_first_weights=self.channels is not None and self.channels.keep_first_weights,
            )
            self.kl_path_off_reason = reason or None
            self._kl_path_is_chosen = True
            if reason and process_rank() == 0:
                kl_logger.warning("KL path off: %s.", reason)
        return self.kl_path_off_reason

    def _sample_initial_kl(self) -> tuple[float, float] | None:
        """Sum of k1 over the tokens of this micro-batch and their number: a forward of either policy, without gradient."""
        rows = self._fold_rows
        if rows is None:
            return None
        num_columns = rows["completion_ids"].size(1)
        input_ids = torch.cat([rows["prompt_ids"], rows["completion_ids"]], dim=1)
        attention_mask = torch.cat([rows["prompt_mask"], rows["completion_mask"]], dim=1)
        with torch.no_grad(), self.chained_rows.scored_as(rows.get(SEGMENT_STARTS)):
            with self.router_replay.scored_as(rows):
                policy_logps, *_ = self._get_per_token_logps_and_entropies(
                    self.model, input_ids, attention_mask, num_columns
                )
            with self._as_initial_policy():
                initial_logps, *_ = self._get_per_token_logps_and_entropies(
                    self.model, input_ids, attention_mask, num_columns
                )
        return log_ratio_sum(policy_logps, initial_logps, rows["completion_mask"] * rows.get("tool_mask", 1))

    def _as_initial_policy(self) -> AbstractContextManager[None]:
        model = self.accelerator.unwrap_model(self.model)
        if self._kl_path is KlPath.ADAPTER_OFF:
            scope: AbstractContextManager[None] = model.disable_adapter()
            return scope
        first = None if self.channels is None else self.channels.first_weights
        if first is None:
            raise RuntimeError("no copy of the first weights was made")  # keep_first_weights said so
        return first.in_place_of(model)

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
