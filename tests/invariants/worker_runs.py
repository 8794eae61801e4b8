"""Runs that the workers of two processes have in common, whole weights or spread ones."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "trainer"))

from tiny_trainer import build_trainer

from composer_replication.errors import CollapseStopError
from composer_replication.run_folder import RunFolder
from composer_replication.safety import HeldOutGuard
from composer_replication.trainer.parameter_hash import parameter_sha256


def under_a_falling_truth(folder: Path, **settings: Any) -> tuple[Any, dict[str, Any]]:
    """The guard fires at the fourth fold. Adapters, so that the KL to the initial policy is measured too."""
    calls: list[int] = []

    def evaluate() -> float:
        calls.append(1)
        return 1.0 - 0.3 * len(calls)

    guard = HeldOutGuard(
        min_steps=4, decline_patience=99, ema_alpha=0.0, kl_hard_stop=99.0, max_proxy_real_gap=0.5
    )
    run = RunFolder(folder)
    trainer = build_trainer(
        output_dir=run.checkpoints,
        run_folder=run,
        heldout_guard=guard,
        heldout_eval_fn=evaluate,
        max_steps=8,
        lora_adapter=True,
        learning_rate=1e-2,
        **settings,
    )
    try:
        trainer.train()
    except CollapseStopError as error:
        outcome = str(error)
    else:
        outcome = "finished"
    return trainer, {
        "outcome": outcome,
        "calls": len(calls),
        "step": trainer.state.global_step,
        "guard": guard.state_dict(),
        "sha256": parameter_sha256(trainer.model),
    }


def whole_and_resumed(folder: Path, **settings: Any) -> dict[str, str]:
    """Four steps at once, and two and two; saved inside a generation, so each process keeps its own rows."""
    settings = {
        "save_strategy": "steps",
        "save_steps": 2,
        "steps_per_generation": 4,
        "num_prompts": 16,
        **settings,
    }
    whole = build_trainer(output_dir=folder / "whole", max_steps=4, learning_rate=1e-2, **settings)
    whole.train()
    build_trainer(output_dir=folder / "halves", max_steps=2, learning_rate=1e-2, **settings).train()
    resumed = build_trainer(output_dir=folder / "halves", max_steps=4, learning_rate=1e-2, **settings)
    resumed.train(resume_from_checkpoint=True)
    return {"whole": parameter_sha256(whole.model), "resumed": parameter_sha256(resumed.model)}
