"""TRL's GRPO trainer with a kill switch, exact resume, one log line a step and prefix sharing.

Everything here is off unless it is asked for: without a guard, a run folder and prefix sharing,
training is TRL's, bit for bit.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers.trainer_utils import rotate_checkpoints
from trl import GRPOTrainer

from composer_replication.errors import CollapseStopError
from composer_replication.interfaces import Guard, Stateful
from composer_replication.run_folder import RunFolder
from composer_replication.trainer.checkpoints import (
    MANIFEST_NAME,
    check_manifest,
    checkpoint_step,
    newest_whole_checkpoint,
    remove_partial_checkpoints,
    write_manifest,
)
from composer_replication.trainer.guard_hook import GuardHook, HeldoutEval
from composer_replication.trainer.initial_kl import KlPath, choose_kl_path, k3_sum
from composer_replication.trainer.metrics_log import RunLog, StepWindow
from composer_replication.trainer.own_state import OwnState
from composer_replication.trainer.prefix_wiring import PrefixWiring
from composer_replication.trainer.processes import gathered, once, process_rank, wait_for_all
from composer_replication.trainer.run_callback import InterruptOnce, RunCallback
from composer_replication.trainer.setting_errors import ChannelNotBuiltError, TrainerSettingError

logger = logging.getLogger(__name__)


class ComposerReplicationTrainer(GRPOTrainer, GuardHook, OwnState, PrefixWiring):
    """GRPO under a guard.

    total loss = TRL's loss + alpha_sdpo * L_sdpo + beta_replay * L_replay, where a channel of
    weight 0 is not computed at all (both are 0 in this version).

    Takes every argument of ``GRPOTrainer``, and by keyword:

    Args:
        heldout_guard: asked once every ``args.logging_steps`` global steps, on the first
            micro-step, before that step's update.
        heldout_eval_fn: the truth for the guard; None from it means not due.
        strict_killswitch: a verdict that fires raises ``CollapseStopError``; otherwise training
            stops and ``train`` returns. Either way checkpoint and verdict are on disk first.
        alpha_sdpo: weight of hint distillation; must be 0.
        beta_replay: weight of trace replay; must be 0.
        prefix_sharing: forward each distinct prompt once (exact; see ``prefix_wiring``).
        is_finished: the text so far of one row is complete, so the row stops. Only with
            prefix sharing, whose sampling can stop single rows.
        run_folder: where ``metrics.jsonl`` and ``verdicts.jsonl`` go; None writes neither.
        stateful: extra states saved in and restored from each checkpoint, by name.
        split_fingerprint: of the held-out split; readings and checkpoints of another are refused.

    Raises:
        TrainerSettingError: a guard without ``heldout_eval_fn`` (CR0710; a ``ValueError`` too).
        ChannelNotBuiltError: a channel's weight is not 0 (CR0711; a ``ValueError`` too).
    """

    alpha_sdpo: float = 0.0
    beta_replay: float = 0.0
    run_folder: RunFolder | None = None
    _keeps_logps: bool = False
    _newest_logps: torch.Tensor | None = None
    _kl_path_is_chosen: bool = False
    _interrupt: InterruptOnce | None = None
    _run_callback: RunCallback | None = None
    _step_window: StepWindow | None = None
    _loss_seen: float = 0.0
    _halt_is_saved: bool = False

    def __init__(
        self,
        *args: Any,
        heldout_guard: Guard | None = None,
        heldout_eval_fn: HeldoutEval | None = None,
        strict_killswitch: bool = True,
        alpha_sdpo: float = 0.0,
        beta_replay: float = 0.0,
        prefix_sharing: bool = False,
        is_finished: Callable[[str], bool] | None = None,
        run_folder: RunFolder | None = None,
        stateful: Mapping[str, Stateful] | None = None,
        split_fingerprint: str = "",
        **kwargs: Any,
    ) -> None:
        if heldout_guard is not None and heldout_eval_fn is None:
            raise TrainerSettingError(
                "CR0710",
                "heldout_guard needs heldout_eval_fn: without the held-out score it has no truth to compare.",
                where="ComposerReplicationTrainer(heldout_eval_fn=)",
                fix="pass a function that returns the held-out score.",
            )
        for name, weight in (("alpha_sdpo", alpha_sdpo), ("beta_replay", beta_replay)):
            if weight != 0.0:
                raise ChannelNotBuiltError(name)
        self.heldout_guard = heldout_guard
        self.heldout_eval_fn = heldout_eval_fn
        self.strict_killswitch = strict_killswitch
        self.alpha_sdpo = alpha_sdpo
        self.beta_replay = beta_replay
        self.prefix_sharing = prefix_sharing
        self.is_finished = is_finished
        self.run_folder = run_folder
        self.stateful = stateful
        self.split_fingerprint = split_fingerprint
        super().__init__(*args, **kwargs)

    # ---- loss -----------------------------------------------------------------------------

    def _compute_loss(self, model: Any, inputs: Any) -> Any:
        """TRL's loss plus the weighted channels; on the cadence the guard is asked."""
        is_open = self._gate_is_open()
        self._keeps_logps = is_open and self.heldout_guard is not None and self._kl_path is KlPath.ADAPTER_OFF
        loss = super()._compute_loss(model, inputs)
        components = {"loss/grpo": loss}
        if self.alpha_sdpo != 0.0:
            components["loss/sdpo"] = self._compute_sdpo_loss(model, inputs)
            loss = loss + self.alpha_sdpo * components["loss/sdpo"]
        if self.beta_replay != 0.0:
            components["loss/trace_replay"] = self._compute_trace_replay_loss(model, inputs)
            loss = loss + self.beta_replay * components["loss/trace_replay"]
        if is_open:
            self._gate_step = self.state.global_step
            if len(components) > 1:
                for name, value in components.items():
                    self._metrics["train"].setdefault(name, []).append(float(value))
            if self._keeps_logps:
                self._kl_sample = self._sample_initial_kl(inputs)
                self._keeps_logps = False
            self._maybe_update_killswitch()
        return loss

    def _compute_sdpo_loss(self, model: Any, inputs: Any) -> Any:
        """Hint distillation.

        Raises:
            ChannelNotBuiltError: always, in this version.
        """
        raise ChannelNotBuiltError("alpha_sdpo")

    def _compute_trace_replay_loss(self, model: Any, inputs: Any) -> Any:
        """Trace replay.

        Raises:
            ChannelNotBuiltError: always, in this version.
        """
        raise ChannelNotBuiltError("beta_replay")

    def _sample_initial_kl(self, inputs: Any) -> tuple[float, float] | None:
        """Sum of k3 over this micro-batch's tokens and their number: one forward with the adapter off."""
        policy_logps, self._newest_logps = self._newest_logps, None
        if policy_logps is None:
            return None
        input_ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        attention_mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
        mask = inputs["completion_mask"] * inputs.get("tool_mask", 1)
        with torch.no_grad(), self.accelerator.unwrap_model(self.model).disable_adapter():
            initial_logps, _, _ = self._get_per_token_logps_and_entropies(
                self.model, input_ids, attention_mask, inputs["completion_ids"].size(1)
            )
        return k3_sum(policy_logps, initial_logps, mask)

    # ---- log-probabilities and sampling -----------------------------------------------------

    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        compute_entropy: bool = False,
        compute_aux_loss: bool = False,
        **multimodal: Any,
    ) -> Any:
        """As TRL's; with prefix sharing each distinct prompt is forwarded once."""
        if self.prefix_sharing and self._may_share(
            "log-probabilities", self._logps_sharing_reason(model, compute_aux_loss, multimodal)
        ):
            answer: Any = self._shared_logps(model, input_ids, attention_mask, logits_to_keep, compute_entropy)
        else:
            answer = super()._get_per_token_logps_and_entropies(
                model,
                input_ids,
                attention_mask,
                logits_to_keep,
                batch_size=batch_size,
                compute_entropy=compute_entropy,
                compute_aux_loss=compute_aux_loss,
                **multimodal,
            )
        if self._keeps_logps and torch.is_grad_enabled():
            self._newest_logps = answer[0].detach()
        return answer

    def _generate_single_turn(
        self, prompt_ids: Any, images: Any, multimodal_fields: Any, num_generations: int, has_tool_images: bool = False
    ) -> Any:
        """As TRL's; with prefix sharing one prefill a distinct prompt, and rows stop by ``is_finished``."""
        if self.prefix_sharing and self._may_share(
            "sampling", self._generation_sharing_reason(images, multimodal_fields)
        ):
            return self._shared_completions(prompt_ids), None
        return super()._generate_single_turn(prompt_ids, images, multimodal_fields, num_generations, has_tool_images)

    # ---- evaluation and logging -----------------------------------------------------------------

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> Any:
        """As TRL's; the guard is never folded meanwhile."""
        was_in_evaluation, self._in_evaluation = self._in_evaluation, True
        try:
            return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)
        finally:
            self._in_evaluation = was_in_evaluation

    def prediction_step(
        self, model: Any, inputs: Any, prediction_loss_only: Any, ignore_keys: list[str] | None = None
    ) -> Any:
        """As TRL's; the guard is never folded meanwhile."""
        was_in_evaluation, self._in_evaluation = self._in_evaluation, True
        try:
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        finally:
            self._in_evaluation = was_in_evaluation

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """As TRL's, but a row of ``killswitch/`` keys alone passes by TRL's merge and clear."""
        if logs and all(name.startswith("killswitch/") for name in logs):
            super(GRPOTrainer, self).log(logs, start_time)
            return
        metrics = self._metrics["train"]
        self._signals().read(metrics)
        super().log(logs, start_time)
        self._signals().after_clearing(metrics)
        self._window().after_clearing(metrics)
        if "loss" in logs:
            self._loss_seen = 0.0

    def _window(self) -> StepWindow:
        if self._step_window is None:
            self._step_window = StepWindow()
        return self._step_window

    def finish_step_line(self, seconds: float) -> None:
        """The optimizer step is over: put its numbers into its line."""
        if self._run_log is None:
            return
        metrics = self._metrics["train"]
        fields: dict[str, Any] = dict(self._window().take(metrics))
        self._signals().read(metrics)
        fields["reward_is_new"] = "reward" in fields
        fields.setdefault("reward", self._signals().reward)  # trained on, but sampled in an earlier step
        total = float(self._tr_loss)
        fields["loss"], self._loss_seen = total - self._loss_seen, total
        self._run_log.finish_step(self.state.global_step, {**fields, "step_seconds": seconds})

    def add_trl_row(self, logs: Mapping[str, Any]) -> None:
        """Take what only TRL's own row knows over into the step's line."""
        if self._run_log is not None:
            self._run_log.add_trl_row(self.state.global_step, logs)

    def flush_run_log(self) -> None:
        if self._run_log is not None:
            self._run_log.flush()

    @property
    def is_interrupted(self) -> bool:
        return self._interrupt is not None and self._interrupt.is_requested

    # ---- training -------------------------------------------------------------------------------

    def train(
        self, resume_from_checkpoint: Any = None, trial: Any = None, ignore_keys_for_eval: list[str] | None = None
    ) -> Any:
        """Train, or go on from a checkpoint, exactly.

        Args:
            resume_from_checkpoint: True for the newest whole checkpoint of ``args.output_dir`` (none
                there: from the start; half-written ones are deleted), or one checkpoint's folder.
            trial: as in transformers.
            ignore_keys_for_eval: as in transformers.

        Raises:
            CollapseStopError: the guard fired, after the last checkpoint and verdict were written. The
                checkpoint is of ``state.global_step``: the step under way left no trace in weights and
                optimizer. A checkpoint under a fired guard is not trained on.
            KeyboardInterrupt: after a first Ctrl-C, when the step was finished and saved.
            InputError: the checkpoint is damaged (CR0716), half-written (CR0717) or another run's
                (CR0502, CR0714, CR0715).
            TrainerSettingError: settings that cannot work (CR0712, CR0713, CR0718, CR0719).
        """
        self._check_before_training()
        checkpoint = once(lambda: self._choose_checkpoint(resume_from_checkpoint))
        self._begin_run(checkpoint)
        self._interrupt = InterruptOnce()
        try:
            with self._interrupt:
                output = super().train(None if checkpoint is None else str(checkpoint), trial, ignore_keys_for_eval)
        except CollapseStopError:
            self._finish_halted_run(trial)
            raise
        finally:
            self.flush_run_log()
        if self.halted_at is not None and not self._halt_is_saved:
            self._finish_halted_run(trial)
        if self.is_interrupted:
            raise KeyboardInterrupt
        return output

    def choose_kl_path(self) -> str | None:
        """Decide where the guard's KL comes from; ``kl_path_off_reason`` afterwards, for a start screen."""
        if self.heldout_guard is not None and not self._kl_path_is_chosen:
            self._kl_path, reason = choose_kl_path(
                self.model, beta=self.beta, sync_ref_model=bool(self.args.sync_ref_model)
            )
            self.kl_path_off_reason = reason or None
            self._kl_path_is_chosen = True
            if reason and process_rank() == 0:
                logger.warning("KL path off: %s.", reason)
        return self.kl_path_off_reason

    def _check_before_training(self) -> None:
        self._check_prefix_settings()
        if self.heldout_guard is not None and not self.args.logging_steps > 0:
            raise TrainerSettingError(
                "CR0718",
                "logging_steps is the guard's cadence and must be above 0.",
                where="trl.logging_steps",
                fix="set trl.logging_steps = 1.",
            )
        if len(set(gathered(self.heldout_guard is None))) > 1:
            raise TrainerSettingError(
                "CR0719",
                "some processes have a guard and some have none.",
                where="ComposerReplicationTrainer(heldout_guard=)",
                fix="construct the trainer alike on every process.",
            )

    def _choose_checkpoint(self, wanted: Any) -> Path | None:
        if wanted is None or wanted is False:
            return None
        if wanted is True:
            for partial in remove_partial_checkpoints(Path(self.args.output_dir)):
                logger.warning("removed the half-written checkpoint %s.", partial)
            return newest_whole_checkpoint(Path(self.args.output_dir))
        check_manifest(Path(wanted))
        return Path(wanted)

    def _begin_run(self, checkpoint: Path | None) -> None:
        """Set our own state to the run's start, or to the checkpoint."""
        self._gate_step = self._last_round_idx = self.halted_at = None
        self._loss_seen, self._halt_is_saved = 0.0, False
        self._step_window = StepWindow()
        self._num_permutations_to_skip = 0
        if checkpoint is not None:
            self._read_own_state(checkpoint)
            self._window().take(self._metrics["train"])
        if self.heldout_guard is not None and self.heldout_guard.should_halt():
            self.heldout_guard.raise_if_fired()
        self.choose_kl_path()
        self._weights_are_sharded = bool(
            self.is_fsdp_enabled
            or self.is_deepspeed_enabled
            or any(hasattr(parameter, "full_tensor") for parameter in self.model.parameters())
        )
        if self.run_folder is not None and process_rank() == 0:
            self._run_log = RunLog(self.run_folder)
            self._run_log.cut_back(0 if checkpoint is None else checkpoint_step(checkpoint), self._last_round_idx)
        if self._run_callback is None:
            self._run_callback = RunCallback(self)
            self.add_callback(self._run_callback)

    def _finish_halted_run(self, trial: Any) -> None:
        """Line, checkpoint and the callbacks' end of a run that the guard stopped inside a step."""
        if self._run_log is not None and self._run_log.has_open_step:
            self._run_log.finish_step(self.state.global_step + 1, self._window().take(self._metrics["train"]))
        self.model.zero_grad()  # what the broken-off step had accumulated
        self._save_checkpoint(self.model, trial)
        self.control = self.callback_handler.on_save(self.args, self.state, self.control)
        if self.is_in_train:
            self.control = self.callback_handler.on_train_end(self.args, self.state, self.control)
            self.is_in_train = False

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """transformers' files, ours, then the manifest; older checkpoints go only after that."""
        self.flush_run_log()
        folder = Path(self._get_output_dir(trial=trial))
        checkpoint = folder / f"checkpoint-{self.state.global_step}"
        if process_rank() == 0:
            (checkpoint / MANIFEST_NAME).unlink(missing_ok=True)
        wait_for_all()
        limit, self.args.save_total_limit = self.args.save_total_limit, None
        try:
            super()._save_checkpoint(model, trial)
        finally:
            self.args.save_total_limit = limit
        self._write_own_state(checkpoint)
        wait_for_all()
        if process_rank() == 0:
            write_manifest(checkpoint)
            rotate_checkpoints(
                output_dir=str(folder),
                save_total_limit=limit,
                best_model_checkpoint=self.state.best_model_checkpoint,
                use_mtime=True,
            )
        wait_for_all()
        self._halt_is_saved = self.halted_at is not None

    def _get_train_sampler(self, dataset: Any = None) -> Any:
        """As TRL's; on a resume the permutations of the finished epochs are drawn first.

        TRL's sampler starts from its seed in every process, so without this a resumed second epoch
        would repeat the order of the first.
        """
        sampler = super()._get_train_sampler(dataset)
        if getattr(sampler, "shuffle", False):
            for _ in range(self._num_permutations_to_skip):
                torch.randperm(sampler.num_samples, generator=sampler.generator)
        self._num_permutations_to_skip = 0
        return sampler
