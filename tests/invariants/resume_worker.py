"""A training run in its own process, which kills itself: ``resume_worker.py SPEC.json``."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "trainer"))

import torch
from tiny_trainer import build_trainer
from transformers import TrainerCallback

from composer_replication.run_folder import RunFolder
from composer_replication.safety import HeldOutGuard
from composer_replication.trainer.parameter_hash import parameter_sha256


class KillAt(TrainerCallback):
    """SIGKILL in the middle of a step: nothing can be flushed, closed or finished."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step - 1:
            os.kill(os.getpid(), signal.SIGKILL)


def run_or_resume(folder: Path, settings: dict[str, Any], *, kill_at: int = 0) -> dict[str, Any]:
    """Train to the end from the newest whole checkpoint; final weights' hash and the guard's state."""
    run = RunFolder(folder)
    trainer = build_trainer(
        output_dir=run.checkpoints,
        run_folder=run,
        heldout_guard=HeldOutGuard(min_steps=1000),
        heldout_eval_fn=lambda: 0.5,
        save_strategy="steps",
        callbacks=[KillAt(kill_at)] if kill_at else [],
        **settings,
    )
    trainer.train(resume_from_checkpoint=True)
    return {"sha256": parameter_sha256(trainer.model), "guard": trainer.heldout_guard.state_dict()}


if __name__ == "__main__":
    torch.set_num_threads(1)
    spec = json.loads(Path(sys.argv[1]).read_text())
    run_or_resume(Path(spec["run"]), spec["settings"], kill_at=spec["kill_at"])
