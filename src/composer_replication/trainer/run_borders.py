"""What happens before the first step of a run and after its last.

A mixin of the trainer.
"""

from __future__ import annotations

import logging
from collections.abc import Sized
from pathlib import Path
from typing import Any

from transformers import TrainerState
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import TrainOutput

from composer_replication.errors import CollapseStopError, InputError
from composer_replication.interfaces import Guard
from composer_replication.run_folder import RunFolder
from composer_replication.trainer.checkpoints import check_is_resumable, checkpoint_step
from composer_replication.trainer.early_refusals import refuse_few_prompts
from composer_replication.trainer.guard_hook import GuardHook
from composer_replication.trainer.initial_kl import InitialKl
from composer_replication.trainer.metrics_log import RunLog, StepWindow
from composer_replication.trainer.model_modes import weights_are_sharded
from composer_replication.trainer.processes import gathered, num_processes, process_rank, together
from composer_replication.trainer.prompt_fit import refuse_unfit_prompts
from composer_replication.trainer.run_callback import RunCallback
from composer_replication.trainer.setting_errors import TrainerSettingError

logger = logging.getLogger(__name__)


class RunBorders(GuardHook, InitialKl):
    """Checks, fresh or restored state, and the orderly end of a halted run."""

    run_folder: RunFolder | None = None
    model: Any
    callback_handler: Any
    add_callback: Any
    is_in_train: Any
    train_dataset: Any
    num_generations: Any
    processing_class: Any
    rollout_func: Any
    environment_factories: Any
    chat_template: Any
    chat_template_kwargs: Any
    tools: Any
    max_completion_length: Any
    _check_prefix_settings: Any
    _check_policy_settings: Any
    _begin_checks: Any
    get_train_dataloader: Any
    _load_from_checkpoint: Any
    _prepare_for_training: Any
    _read_own_state: Any
    _save_checkpoint: Any
    _num_permutations_to_skip: int = 0
    _run_callback: RunCallback | None = None
    _halt_is_saved: bool = False

    def _check_before_training(self) -> None:
        if getattr(self.model.config, "is_encoder_decoder", False):
            raise InputError(
                "CR0701",
                f"a {self.model.config.model_type} model is not a causal language model.",
                where="ComposerReplicationTrainer(model=)",
                fix="take a decoder-only model that AutoModelForCausalLM loads.",
            )
        self._check_prefix_settings()
        self._check_policy_settings()
        if self.heldout_guard is not None and not self.args.logging_steps > 0:
            raise TrainerSettingError(
                "CR0710",
                "logging_steps is the guard's cadence and must be above 0.",
                where="trl.logging_steps",
                fix="set trl.logging_steps = 1.",
            )
        self._check_prompts()
        if isinstance(self.train_dataset, Sized):
            refuse_few_prompts(self.args, self.num_generations, len(self.train_dataset))
        if len(set(gathered(self.heldout_guard is None))) > 1:
            raise TrainerSettingError(
                "CR0710",
                "some processes have a guard and some have none.",
                where="ComposerReplicationTrainer(heldout_guard=)",
                fix="construct the trainer alike on every process.",
            )

    def _check_prompts(self) -> None:
        """Where the data's prompts are what the model reads: a rollout function and environments make their own."""
        if self.rollout_func is None and self.environment_factories is None:
            refuse_unfit_prompts(
                self.train_dataset,
                self.processing_class,
                self.model,
                template_options={
                    **self.chat_template_kwargs,
                    "tools": self.tools or None,
                    "chat_template": self.chat_template,
                },
                max_new_tokens=self.max_completion_length,
            )

    def _begin_run(self, checkpoint: Path | None) -> None:
        """Set our own state to the run's start, or to the checkpoint."""
        self._gate_step = self._last_round_idx = self.halted_at = None
        self._loss_seen, self._halt_is_saved = 0.0, False
        self._step_window = StepWindow()
        self._num_permutations_to_skip = 0
        if self._run_callback is None:
            self._run_callback = RunCallback(self)
            self.add_callback(self._run_callback)
        self._has_trackers = bool(self.args.report_to)
        self._begin_checks()  # after it: a run that the checks stop has its line
        if checkpoint is not None:
            together(lambda: self._read_own_state(checkpoint))
            self._window().take(self._metrics["train"])
        self.choose_kl_path()
        self._weights_are_sharded = weights_are_sharded(self.model)

    def _refuse_inexact_resume(self, checkpoint: Path | None) -> None:
        """Where steps are still to be taken. A collective call."""
        if checkpoint is not None and not self._has_all_steps(checkpoint):
            together(
                lambda: check_is_resumable(checkpoint, rank=process_rank(), num_processes=num_processes())
            )

    def _open_run_log(self, checkpoint: Path | None) -> None:
        if self.run_folder is not None and process_rank() == 0:
            self._run_log = RunLog(self.run_folder)
            self._run_log.cut_back(
                0 if checkpoint is None else checkpoint_step(checkpoint), self._last_round_idx
            )

    def _refuse_halted_run(self, guard: Guard, checkpoint: Path | None) -> TrainOutput:
        """A guard that has fired stays fired: weights and step are loaded, nothing is trained or written."""
        self.halted_at = self._last_round_idx
        if checkpoint is not None:
            self._load_without_training(checkpoint)
        if self.strict_killswitch:
            guard.raise_if_fired()
            raise CollapseStopError(getattr(guard, "last_status", None))
        logger.warning("the guard had halted this run before; nothing was trained.")
        return TrainOutput(self.state.global_step, 0.0, {})

    def _has_all_steps(self, checkpoint: Path) -> bool:
        """Whether ``max_steps`` were taken; transformers would take one more in the middle of an epoch."""
        max_steps = int(self.args.max_steps)
        return 0 < max_steps <= checkpoint_step(checkpoint)

    def _keep_finished_run(self, checkpoint: Path) -> TrainOutput:
        """All steps were taken before the run was cut: weights and step are loaded, nothing is trained."""
        self._load_without_training(checkpoint)
        logger.warning("all %d steps were taken before; nothing was trained.", self.state.global_step)
        return TrainOutput(self.state.global_step, 0.0, {})

    def _load_without_training(self, checkpoint: Path) -> None:
        self.state = TrainerState.load_from_json(str(checkpoint / TRAINER_STATE_NAME))
        if self._weights_are_sharded:  # they are spread first, and each process loads its parts
            self._prepare_for_training(self.state.max_steps, self.get_train_dataloader(), str(checkpoint))
        else:
            self._load_from_checkpoint(str(checkpoint))

    def _finish_halted_run(self, trial: Any) -> None:
        """Line, checkpoint and the callbacks' end of a run that the guard stopped inside a step."""
        self._finish_broken_line()
        self.model.zero_grad()  # what the broken-off step had accumulated
        self._save_checkpoint(self.model, trial)
        self.control = self.callback_handler.on_save(self.args, self.state, self.control)
        if self.is_in_train:
            self.control = self.callback_handler.on_train_end(self.args, self.state, self.control)
            self.is_in_train = False
