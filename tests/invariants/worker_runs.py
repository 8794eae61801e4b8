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
from composer_replication.trainer.model_modes import parameter_sha256
from composer_replication.trainer.policy import InProcessPolicy


def sampled_text(trainer: Any) -> str:
    """What an evaluation in the middle of training samples of the weights as they are."""
    policy = InProcessPolicy(trainer.model, trainer.processing_class)
    ((answer,),) = policy.generate(["def add("], num_samples=1, max_new_tokens=4, temperature=1.0, seed=7)
    return answer.text


def under_a_falling_truth(folder: Path, **settings: Any) -> tuple[Any, dict[str, Any]]:
    """The guard fires at the fourth fold. Adapters, so that the KL to the initial policy is measured too."""
    calls: list[str] = []

    def evaluate() -> float:
        calls.append(sampled_text(trainer))
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
        "sampled": calls,
        "step": trainer.state.global_step,
        "guard": guard.state_dict(),
        "sha256": parameter_sha256(trainer.model),
    }


def whole_and_resumed(folder: Path, **settings: Any) -> dict[str, str]:
    """Four steps at once, and two and two; saved inside a generation, so each process keeps its own rows.

    ``kept`` is what the finished run has when it is resumed once more: nothing is trained.
    """
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
    kept = build_trainer(output_dir=folder / "halves", max_steps=4, learning_rate=1e-2, **settings)
    kept.train(resume_from_checkpoint=True)
    trainers = {"whole": whole, "resumed": resumed, "kept": kept}
    return {name: parameter_sha256(trainer.model) for name, trainer in trainers.items()}
