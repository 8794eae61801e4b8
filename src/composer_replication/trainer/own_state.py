"""What a checkpoint needs beyond transformers' own for an exact resume, and the guard's state.

A mixin of the trainer. transformers saves weights, optimizer, scheduler, RNG and its trainer
state. Lost with those alone: TRL's micro-step counter and the rollouts it has buffered, its
metrics not yet logged, how often the sampler has been drawn from, the guard, and every extra
``Stateful``.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from composer_replication.errors import InputError
from composer_replication.interfaces import Guard, PromptChooser, PromptSource, Stateful
from composer_replication.run_folder import write_json
from composer_replication.trainer.checkpoints import STATE_NAME, identity_of, read_state, refuse_foreign_run
from composer_replication.trainer.checks.judgement import Judgement
from composer_replication.trainer.guard_fold import foreign_split
from composer_replication.trainer.metrics_log import InLoopSignals
from composer_replication.trainer.processes import process_rank
from composer_replication.trainer.setting_errors import TrainerSettingError

logger = logging.getLogger(__name__)


class OwnState:
    """Writes and reads ``composer_state.json`` and the buffered rollouts."""

    heldout_guard: Guard | None = None
    stateful: Mapping[str, Stateful] | None = None
    prompt_source: PromptSource | None = None
    num_groups_replaced: int = 0
    split_fingerprint: str = ""
    run_identity: str = ""
    model: Any
    accelerator: Any
    num_cadence_hits_without_new_reward: int = 0
    last_verdict: dict[str, Any] | None = None
    state: Any
    args: Any
    callback_handler: Any
    num_iterations: Any
    _metrics: Any
    _step: Any
    _buffered_inputs: Any
    _gate_step: int | None = None
    _last_round_idx: int | None = None
    _in_loop_signals: InLoopSignals | None = None
    _num_permutations_to_skip: int = 0
    _judgement: Judgement | None = None

    def _write_own_state(self, checkpoint: Path) -> None:
        """Add our files to a folder that transformers has written. Every process calls it."""
        if self._is_inside_generation():
            torch.save({"inputs": self._buffered_inputs}, checkpoint / _buffer_name())
        if process_rank() != 0:
            return
        guard = self.heldout_guard
        write_json(
            checkpoint / STATE_NAME,
            {
                "run": self._identity(),
                "global_step": self.state.global_step,
                "micro_step": self._step,
                "has_buffered_inputs": self._is_inside_generation(),
                "num_permutations_done": self._num_epochs_done(),
                "gate_step": self._gate_step,
                "last_round_idx": self._last_round_idx,
                "num_cadence_hits_without_new_reward": self.num_cadence_hits_without_new_reward,
                "in_loop_signals": None
                if self._in_loop_signals is None
                else self._in_loop_signals.state_dict(),
                "metrics": {
                    name: [_finite_or_none(value) for value in values]
                    for name, values in self._metrics["train"].items()
                },
                "guard": None if guard is None else guard.state_dict(),
                "stateful": {name: part.state_dict() for name, part in (self.stateful or {}).items()},
                "checks": None if self._judgement is None else self._judgement.state_dict(),
                "prompt_source": None if self.prompt_source is None else self.prompt_source.state_dict(),
                "num_groups_replaced": self.num_groups_replaced,
                "last_verdict": self.last_verdict,
                "split_fingerprint": self.split_fingerprint,
            },
        )

    def _read_own_state(self, checkpoint: Path) -> None:
        """Restore what ``_write_own_state`` wrote.

        Raises:
            InputError: another run (CR0884), another split (CR0884), other extra states (CR0884), or rollouts of this
                process are missing (CR0706).
            TrainerSettingError: the checkpoint was guarded and this trainer is not (CR0884).
        """
        saved = read_state(checkpoint)
        self._check_belongs(saved, checkpoint)
        self._step = saved["micro_step"]
        self._buffered_inputs = (
            _read_buffer(checkpoint, self.args.device) if saved["has_buffered_inputs"] else None
        )
        self._num_permutations_to_skip = 0 if self.args.ignore_data_skip else saved["num_permutations_done"]
        self._gate_step = saved["gate_step"]
        self._last_round_idx = saved["last_round_idx"]
        self.num_cadence_hits_without_new_reward = saved["num_cadence_hits_without_new_reward"]
        self.last_verdict = saved["last_verdict"]
        self._in_loop_signals = InLoopSignals()
        if saved["in_loop_signals"] is not None:
            self._in_loop_signals.load_state_dict(saved["in_loop_signals"])
        for name, values in saved["metrics"].items():
            self._metrics["train"][name] = [math.nan if value is None else value for value in values]
        if self.heldout_guard is not None and saved["guard"] is not None:
            self.heldout_guard.load_state_dict(saved["guard"])
        for name, part in (self.stateful or {}).items():
            part.load_state_dict(saved["stateful"][name])
        self.num_groups_replaced = saved.get(
            "num_groups_replaced", 0
        )  # an older checkpoint has none of these
        for own, state in (
            (self._judgement, saved.get("checks")),
            (self.prompt_source, saved.get("prompt_source")),
        ):
            if own is not None and state is not None:
                own.load_state_dict(state)
        if isinstance(self.prompt_source, PromptChooser) and saved.get("prompt_source") is None:
            logger.warning("%s has no state of the prompt source: it starts afresh from here.", checkpoint)

    def _check_belongs(self, saved: Mapping[str, Any], checkpoint: Path) -> None:
        refuse_foreign_run(saved, self._identity(), checkpoint)
        found = saved["split_fingerprint"]
        if found and self.split_fingerprint and found != self.split_fingerprint:
            raise foreign_split(found, self.split_fingerprint, where=str(checkpoint))
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
