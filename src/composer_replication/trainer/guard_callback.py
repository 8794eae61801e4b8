"""The guard for any trainer built on transformers: SFT, DPO, GRPO, RLOO and others of TRL.

    trainer = SFTTrainer(..., callbacks=[HeldOutGuardCallback(guard, evaluate, proxy_key="-loss")])

``ComposerReplicationTrainer`` has the guard inside and needs no callback.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from composer_replication.errors import InputError
from composer_replication.interfaces import Guard, GuardStatus, Stateful
from composer_replication.records import HeldoutReading
from composer_replication.run_folder import RunFolder, append_jsonl
from composer_replication.trainer.guard import Fold, HeldoutEval, fold, raise_halt, refuse_foreign_split
from composer_replication.trainer.metrics_log import finite, json_row, keep_rows
from composer_replication.trainer.model_modes import evaluation_mode, weights_are_sharded
from composer_replication.trainer.processes import from_first, process_rank, wait_for_gloo_at_exit

logger = logging.getLogger(__name__)
STATE_KEY = "composer_replication.held_out_guard"
"""Where the guard's state stands in ``stateful_callbacks`` of ``trainer_state.json``. Not the name of the
class: with ``restore_callback_states_from_checkpoint`` transformers would make a new one of it."""


class HeldOutGuardCallback(TrainerCallback):
    """Asks a guard whenever the trainer logs its reward, and ends the run when it fires.

    At a logged row with ``proxy_key``, at least ``every`` steps after the fold before: the truth is measured on the present
    weights, the guard folds (proxy, truth, KL) under ``global_step``, the verdict is written (into the row, and as a line of
    ``verdicts.jsonl`` in ``args.output_dir``), then acted on. A row without a finite proxy is counted and folds nothing.

    When it fires: the step is finished, a checkpoint is saved (whatever ``save_strategy`` says, but for ``best``), training
    stops, and with ``strict`` ``train()`` raises ``CollapseStopError`` at its end. The guard's state is in every checkpoint, and that of
    ``heldout_eval_fn`` where it is ``Stateful``; a checkpoint under a fired guard is not trained on. Reporters that come before
    the callback, several processes: docs/guard-anywhere.md.

    Args:
        guard: ``HeldOutGuard`` or anything with its methods (``interfaces.Guard``).
        heldout_eval_fn: the truth, as a number or a ``HeldoutReading``; None: not due. It runs without gradient and with the
            model in evaluation mode. An error of it ends the run; ``PatientEvaluation`` around it halts at the third in a row.
        proxy_key: the logged name of what is trained on; a leading minus where lower is better (``-loss``): the number is
            turned round, and the truth must then be turned round too.
        kl_key: the logged name of the KL to the initial policy, nats; None, or a name that no row has: the KL path is off,
            which is said once and in each verdict. TRL's ``kl`` can be blown up by single tokens; choose ``kl_hard_stop`` for it.
        every: least distance of two folds, global steps.
        strict: raise when it fires; else ``train()`` returns.
        split_fingerprint: of the held-out split; a reading or checkpoint of another is refused.

    ``halted_at`` is the ``global_step`` of the fold that fired, ``last_verdict`` the newest row of ``verdicts.jsonl``, or None;
    ``num_rows_without_proxy`` training rows could not be folded.
    """

    def __init__(
        self,
        guard: Guard,
        heldout_eval_fn: HeldoutEval,
        *,
        proxy_key: str = "reward",
        kl_key: str | None = "kl",
        every: int = 1,
        strict: bool = True,
        split_fingerprint: str = "",
    ) -> None:
        wait_for_gloo_at_exit()
        self.guard, self.heldout_eval_fn, self.split_fingerprint = guard, heldout_eval_fn, split_fingerprint
        self.proxy_key, self.kl_key, self.every, self.strict = proxy_key, kl_key, every, strict
        self.halted_at: int | None = None
        self.last_verdict: dict[str, Any] | None = None
        self.num_rows_without_proxy = 0
        self._last_round_idx: int | None = None
        self._halting_status: GuardStatus | None = None
        self._has_said_kl_is_off = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Go on where the checkpoint was, or begin; a guard that had fired before ends the run."""
        self.halted_at = self._halting_status = self._last_round_idx = None
        self.num_rows_without_proxy = 0
        saved = state.stateful_callbacks.get(STATE_KEY)
        if saved is not None:
            self._restore(saved)
        elif state.global_step > 0:
            logger.warning("the checkpoint has no guard state: the guard starts afresh from here.")
        if self.guard.should_halt():
            raise_halt(self.guard)
        if process_rank() == 0:  # a resumed run writes later rows again, one that begins anew all
            keep_rows(RunFolder(Path(args.output_dir)).verdicts, "round_idx", state.global_step or -1)

    def on_log(
        self, args: Any, state: Any, control: Any, logs: Any = None, model: Any = None, **kwargs: Any
    ) -> None:
        if not logs or self.halted_at is not None:
            return
        is_turned = self.proxy_key.startswith("-") and self.proxy_key not in logs
        proxy = finite(logs.get(self.proxy_key[1:] if is_turned else self.proxy_key))
        if proxy is None:
            if "loss" in logs and not any(name.startswith("eval_") for name in logs):  # a row of training
                self.num_rows_without_proxy += 1
                if self.num_rows_without_proxy == 1:
                    words = "killswitch: a logged row has no finite %r, so the guard was not asked; the row has %s"
                    logger.warning(words, self.proxy_key, ", ".join(sorted(map(str, logs))))
            return
        step = state.global_step
        if self._last_round_idx is not None and step - self._last_round_idx < self.every:
            return
        kl = None if self.kl_key is None else finite(logs.get(self.kl_key))
        reward, kl = from_first((-proxy if is_turned else proxy, kl))

        def evaluate() -> float | HeldoutReading | None:
            with evaluation_mode(model):
                return self.heldout_eval_fn()

        try:
            folded = fold(
                self.guard,
                evaluate,
                round_idx=step,
                reward=reward,
                kl=lambda: kl,
                split_fingerprint=self.split_fingerprint,
                every_process_joins=weights_are_sharded(model),
            )
        finally:  # an evaluation that was not due may count as well
            state.stateful_callbacks[STATE_KEY] = self._state()
        if folded is None:
            return
        self._last_round_idx = step
        self._write(args, state, logs, folded)
        state.stateful_callbacks[STATE_KEY] = self._state()
        if folded.status.fire:
            self.halted_at, self._halting_status = step, folded.status
            logger.warning("killswitch: the guard halts training at step %d: %s", step, folded.status.reason)
            control.should_save = control.should_training_stop = True

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.halted_at is not None:
            control.should_save = False  # the end of the epoch would save it a second time

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The run is over and saved: a strict guard that fired now raises."""
        if self._halting_status is not None and self.strict:
            raise_halt(self.guard, self._halting_status)

    def _write(self, args: Any, state: Any, logs: dict[str, Any], folded: Fold) -> None:
        """Into the logged row, whose copy the trainer has kept already, and into ``verdicts.jsonl``."""
        row = folded.said | folded.measured
        logs.update(row)
        if state.log_history and state.log_history[-1].get("step") == state.global_step:
            state.log_history[-1].update(row)
        is_off = folded.verdict["kl_ema"] is None
        if is_off and not self._has_said_kl_is_off:
            self._has_said_kl_is_off = True
            why = f"no row has {self.kl_key!r} (TRL logs none at beta 0)" if self.kl_key else "kl_key is None"
            logger.warning("killswitch: the KL path is off: %s.", why)
        kl_path = "off (no row has had a finite KL)" if is_off else f"logged as {self.kl_key}"
        self.last_verdict = {**folded.verdict, "kl_path": kl_path}
        if process_rank() == 0:
            append_jsonl(RunFolder(Path(args.output_dir)).verdicts, json_row(self.last_verdict))

    def _state(self) -> dict[str, Any]:
        evaluator: object = self.heldout_eval_fn
        return {
            "guard": self.guard.state_dict(),
            "evaluator": evaluator.state_dict() if isinstance(evaluator, Stateful) else None,
            "last_round_idx": self._last_round_idx,
            "last_verdict": self.last_verdict,
            "split_fingerprint": self.split_fingerprint,
        }

    def _restore(self, saved: Mapping[str, Any]) -> None:
        refuse_foreign_split(saved.get("split_fingerprint"), self.split_fingerprint, where="the checkpoint")
        try:
            self.guard.load_state_dict(saved["guard"])
            evaluator: object = self.heldout_eval_fn
            if saved["evaluator"] is not None and isinstance(evaluator, Stateful):
                evaluator.load_state_dict(saved["evaluator"])
            self._last_round_idx = saved["last_round_idx"]
            self.last_verdict = saved["last_verdict"]
        except (KeyError, TypeError, ValueError) as error:
            words = f"the guard's state in the checkpoint cannot be used: {error}."
            fix = "resume with the kind of guard that the run began with, or from another checkpoint."
            where = f"trainer_state.json, stateful_callbacks.{STATE_KEY}"
            raise InputError("CR0884", words, where=where, fix=fix) from error
