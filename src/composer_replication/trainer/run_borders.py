"""What happens before the first step of a run and after its last.

A mixin of the trainer.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sized
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerState
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import TrainOutput

from composer_replication.errors import CollapseStopError, InputError
from composer_replication.interfaces import Guard, PromptChooser, PromptSource, Stateful
from composer_replication.run_folder import RunFolder, write_json
from composer_replication.trainer.checkpoints import (
    STATE_NAME,
    check_is_resumable,
    checkpoint_step,
    identity_of,
    read_state,
    refuse_foreign_run,
)
from composer_replication.trainer.checks.judgement import Judgement
from composer_replication.trainer.guard import GuardHook, refuse_foreign_split
from composer_replication.trainer.metrics_log import RunLines, RunLog, StepWindow
from composer_replication.trainer.model_modes import weights_are_sharded
from composer_replication.trainer.processes import gathered, num_processes, process_rank, together
from composer_replication.trainer.run_callback import RunCallback
from composer_replication.trainer.setting_errors import TrainerSettingError, refuse_few_prompts

logger = logging.getLogger(__name__)


_PLAIN_STATE = {
    "micro_step": "_step",
    "gate_step": "_gate_step",
    "last_round_idx": "_last_round_idx",
    "num_cadence_hits_without_new_reward": "num_cadence_hits_without_new_reward",
    "num_groups_replaced": "num_groups_replaced",
    "last_verdict": "last_verdict",
}
"""What ``composer_state.json`` has as it is, by its name there and on the trainer."""


class OwnState(RunLines):
    """Writes and reads ``composer_state.json`` and the buffered rollouts."""

    heldout_guard: Guard | None = None
    stateful: Mapping[str, Stateful] | None = None
    prompt_source: PromptSource | None = None
    num_groups_replaced: int = 0
    split_fingerprint: str = ""
    run_identity: str = ""
    num_cadence_hits_without_new_reward: int = 0
    last_verdict: dict[str, Any] | None = None
    _gate_step: int | None = None
    _last_round_idx: int | None = None
    _num_permutations_to_skip: int = 0
    _judgement: Judgement | None = None

    def _write_own_state(self, checkpoint: Path) -> None:
        """Add our files to a folder that transformers has written. Every process calls it."""
        if self._is_inside_generation():
            torch.save({"inputs": self._buffered_inputs}, checkpoint / _buffer_name())
        if process_rank() != 0:
            return
        metrics = {
            name: [_finite_or_none(value) for value in values]
            for name, values in self._metrics["train"].items()
        }
        parts = self._parts_with_state().items()
        state: dict[str, Any] = {name: None if part is None else part.state_dict() for name, part in parts}
        state |= {key: getattr(self, attribute) for key, attribute in _PLAIN_STATE.items()}
        state |= {
            "run": self._identity(),
            "global_step": self.state.global_step,
            "has_buffered_inputs": self._is_inside_generation(),
            "num_permutations_done": self._num_epochs_done(),
            "metrics": metrics,
            "split_fingerprint": self.split_fingerprint,
            "stateful": {name: part.state_dict() for name, part in (self.stateful or {}).items()},
        }
        write_json(checkpoint / STATE_NAME, state)

    def _parts_with_state(self) -> dict[str, Stateful | None]:
        return {
            "guard": self.heldout_guard,
            "in_loop_signals": self._signals(),
            "checks": self._judgement,
            "prompt_source": self.prompt_source,
        }

    def _read_own_state(self, checkpoint: Path) -> None:
        """Restore what ``_write_own_state`` wrote.

        Raises:
            InputError: another run (CR0884), another split (CR0884), other extra states (CR0884), or rollouts of this
                process are missing (CR0706).
            TrainerSettingError: the checkpoint was guarded and this trainer is not (CR0884).
        """
        saved = read_state(checkpoint)
        self._check_belongs(saved, checkpoint)
        for key, attribute in _PLAIN_STATE.items():
            if key in saved:  # an older checkpoint has fewer
                setattr(self, attribute, saved[key])
        self._buffered_inputs = (
            _read_buffer(checkpoint, self.args.device) if saved["has_buffered_inputs"] else None
        )
        self._num_permutations_to_skip = 0 if self.args.ignore_data_skip else saved["num_permutations_done"]
        self._in_loop_signals = None
        for name, values in saved["metrics"].items():
            self._metrics["train"][name] = [math.nan if value is None else value for value in values]
        for name, part in self._parts_with_state().items():
            if part is not None and saved.get(name) is not None:
                part.load_state_dict(saved[name])
        for name, part in (self.stateful or {}).items():
            part.load_state_dict(saved["stateful"][name])
        if isinstance(self.prompt_source, PromptChooser) and saved.get("prompt_source") is None:
            logger.warning("%s has no state of the prompt source: it starts afresh from here.", checkpoint)

    def _check_belongs(self, saved: Mapping[str, Any], checkpoint: Path) -> None:
        refuse_foreign_run(saved, self._identity(), checkpoint)
        refuse_foreign_split(saved["split_fingerprint"], self.split_fingerprint, where=str(checkpoint))
        if saved["guard"] is not None and self.heldout_guard is None:
            raise TrainerSettingError(
                "CR0884",
                "the checkpoint was written under a guard, and this trainer has none.",
                where=str(checkpoint),
                fix="pass heldout_guard and heldout_eval_fn again.",
            )
        if saved["guard"] is None and self.heldout_guard is not None:
            logger.warning("%s has no guard state: the guard starts afresh from here.", checkpoint)
        names = set(self.stateful or {})
        if names != set(saved["stateful"]):
            raise InputError(
                "CR0884",
                f"the checkpoint has extra states {sorted(saved['stateful'])}, this trainer {sorted(names)}.",
                where=str(checkpoint),
                fix="pass the same stateful parts as in the run that saved it.",
            )

    def _identity(self) -> dict[str, str]:
        return identity_of(self.run_identity, self.accelerator.unwrap_model(self.model))

    def _is_inside_generation(self) -> bool:
        """The buffered rollouts are still needed by the next micro-step."""
        every = self.args.steps_per_generation * self.num_iterations
        return self._buffered_inputs is not None and self._step % every != 0

    def _num_epochs_done(self) -> int:
        """How many permutations the sampler has used up, by transformers' own count of epochs."""
        try:
            num_batches = len(self.callback_handler.train_dataloader)
        except TypeError:  # an iterable dataset has no length and no permutation
            return 0
        return int(
            self.state.global_step // max(math.ceil(num_batches / self.args.gradient_accumulation_steps), 1)
        )


def _finite_or_none(value: float | None) -> float | None:
    return float(value) if value is not None and math.isfinite(value) else None


def _buffer_name() -> str:
    return f"buffered_inputs_{process_rank()}.pt"


def _read_buffer(checkpoint: Path, device: Any) -> Any:
    path = checkpoint / _buffer_name()
    if not path.is_file():
        raise InputError(
            "CR0706",
            "the checkpoint has no buffered rollouts for this process.",
            where=str(path),
            fix="resume with as many processes as the run had.",
        )
    # Storages go to the CPU whatever their tag: a process group tags CPU tensors "cpu:0", which loads nowhere.
    inputs = torch.load(path, map_location=lambda storage, _tag: storage, weights_only=True)["inputs"]
    return [
        {name: part.to(device) if isinstance(part, torch.Tensor) else part for name, part in batch.items()}
        for batch in inputs
    ]


class RunBorders(GuardHook):
    """Checks, fresh or restored state, and the orderly end of a halted run."""

    run_folder: RunFolder | None = None
    _num_permutations_to_skip: int = 0
    _run_callback: RunCallback | None = None
    _halt_is_saved: bool = False

    def _check_before_training(self) -> None:
        self._check_prefix_settings()
        self._check_policy_settings()
        if self.heldout_guard is not None and not self.args.logging_steps > 0:
            raise TrainerSettingError(
                "CR0710",
                "logging_steps is the guard's cadence and must be above 0.",
                where="trl.logging_steps",
                fix="set trl.logging_steps = 1.",
            )
        if isinstance(self.train_dataset, Sized):
            refuse_few_prompts(self.args, self.num_generations, len(self.train_dataset))
        if len(set(gathered(self.heldout_guard is None))) > 1:
            raise TrainerSettingError(
                "CR0710",
                "some processes have a guard and some have none.",
                where="ComposerReplicationTrainer(heldout_guard=)",
                fix="construct the trainer alike on every process.",
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
