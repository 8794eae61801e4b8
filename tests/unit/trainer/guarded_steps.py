"""The guard's hook and its callback without a training run, asked through the same few methods."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from composer_replication.run_folder import RunFolder, read_json, write_json
from composer_replication.safety import HeldOutGuard
from composer_replication.trainer.composer_trainer import ComposerReplicationTrainer
from composer_replication.trainer.guard_callback import HeldOutGuardCallback


class Only:
    """Has these attributes; reading any other is a failure."""

    def __init__(self, **fields: Any) -> None:
        self.__dict__.update(fields)

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"the hook read {name}")


def bare_trainer(**fields: Any) -> Any:
    """Made with ``__new__``: it has what the contract names, so reading anything more of TRL's is a failure."""
    trainer: Any = ComposerReplicationTrainer.__new__(ComposerReplicationTrainer)
    trainer.asked, trainer.rows = [], []
    settings: dict[str, Any] = {
        "heldout_guard": HeldOutGuard(min_steps=3, decline_patience=3, ema_alpha=0.5, kl_hard_stop=0.08),
        "heldout_eval_fn": lambda: trainer.asked.append(trainer.state.global_step) or 0.25,
        "strict_killswitch": True,
        "alpha_sdpo": 0.0,
        "beta_replay": 0.0,
        "state": Only(global_step=0),
        "args": Only(logging_steps=10),
        "control": SimpleNamespace(should_training_stop=False),
        "_metrics": {"train": {"reward": [0.5]}},
        "log": lambda row: trainer.rows.append(dict(row)),
    }
    vars(trainer).update(settings | fields)
    return trainer


class HookSteps:
    """The trainer's hook, called by its loss, for which TRL's own has to be a stub."""

    def __init__(
        self, folder: Path, guard: Any, evaluate: Any, *, checkpoint: Path | None = None, **settings: Any
    ) -> None:
        self.said: dict[int, dict[str, Any]] = {}
        self.trainer = bare_trainer(
            heldout_guard=guard,
            heldout_eval_fn=evaluate,
            strict_killswitch=settings.get("strict", True),
            split_fingerprint=settings.get("split_fingerprint", ""),
            args=Only(logging_steps=settings.get("every", 1), ignore_data_skip=True),
            has_trackers=True,
            _metrics={"train": {}},
            log=lambda row: self.said.update({self.trainer.state.global_step: row}),
        )
        self.control, self.hook = self.trainer.control, self.trainer.guard_hook
        self.trainer.step_lines.folder = RunFolder(folder)
        self.verdicts = RunFolder(folder).verdicts
        if checkpoint is not None:
            self.trainer.own_state.read(checkpoint)

    def log(self, step: int, **measured: Any) -> None:
        """A step of three micro-batches with these figures; what the guard logs of it is in ``said``."""
        self.trainer.state.global_step = step
        for name, value in measured.items():
            self.trainer._metrics["train"].setdefault(name, []).append(value)
        for _ in range(3):
            assert self.trainer._compute_loss(object(), {}) == 2.0

    def end(self) -> None:
        """A hook that has to raise has raised by now."""

    def save(self, checkpoint: Path) -> None:
        self.trainer.args.steps_per_generation = 1
        self.trainer.callback_handler = Only(train_dataloader=iter(()))
        vars(self.trainer).update(num_iterations=1, _step=0, _buffered_inputs=None)
        self.trainer.own_state.write(checkpoint)


class CallbackSteps:
    """The callback, told of a trainer's log."""

    def __init__(
        self, folder: Path, guard: Any, evaluate: Any, *, checkpoint: Path | None = None, **settings: Any
    ) -> None:
        self.callback = self.hook = HeldOutGuardCallback(guard, evaluate, **settings)
        self.control = SimpleNamespace(should_save=False, should_training_stop=False)
        self.state = SimpleNamespace(global_step=0, log_history=[], stateful_callbacks={})
        if checkpoint is not None:
            vars(self.state).update(read_json(checkpoint / "state.json"))
        self.verdicts = RunFolder(folder).verdicts
        self.of_trainer = (SimpleNamespace(output_dir=str(folder)), self.state, self.control)
        self.said: dict[int, dict[str, Any]] = {}
        self.callback.on_train_begin(*self.of_trainer)

    def log(self, step: int, **measured: Any) -> None:
        """A logged row with these figures; what the guard adds to it is in ``said``."""
        row = {"loss": 1.0, **measured}
        self.state.global_step = step
        self.callback.on_log(*self.of_trainer, logs=row, model=None)
        if added := {name: value for name, value in row.items() if name not in {"loss", *measured}}:
            self.said[step] = added

    def end(self) -> None:
        self.callback.on_train_end(*self.of_trainer)

    def save(self, checkpoint: Path) -> None:
        write_json(checkpoint / "state.json", vars(self.state))
