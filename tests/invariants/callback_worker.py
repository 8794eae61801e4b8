"""A plain transformers Trainer under the guard's callback; ``callback_worker.py FOLDER`` is killed inside a step."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "trainer"))

import torch
from datasets import Dataset
from tiny_trainer import PROMPTS, KillAt, tiny_model, tiny_tokenizer
from transformers import Trainer, TrainingArguments

from composer_replication.errors import CollapseStopError, InputError
from composer_replication.safety import HeldOutGuard
from composer_replication.trainer.guard_callback import HeldOutGuardCallback
from composer_replication.trainer.model_modes import parameter_sha256


class CountingTruth:
    """A truth with a state: the n-th evaluation gives a score that depends on n."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> float:
        self.calls += 1
        return 0.1 * self.calls

    def state_dict(self) -> dict[str, Any]:
        return {"calls": self.calls}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.calls = state["calls"]


def build(folder: Path, callback: HeldOutGuardCallback, **settings: Any) -> Trainer:
    rows = [tiny_tokenizer()(text)["input_ids"][:8] for text in PROMPTS * 4]
    arguments = TrainingArguments(
        output_dir=str(folder),
        **{
            "per_device_train_batch_size": 2,
            "max_steps": 8,
            "logging_steps": 1,
            "save_strategy": "steps",
            "save_steps": 3,
            "report_to": [],
            "use_cpu": True,
            "disable_tqdm": True,
            "learning_rate": 1e-2,
            **settings,
        },
    )
    data = Dataset.from_dict({"input_ids": rows, "labels": rows})
    return Trainer(model=tiny_model(), args=arguments, train_dataset=data, callbacks=[callback])


def run_or_resume(folder: Path, *, kill_at: int = 0, resume: bool = False) -> dict[str, Any]:
    """Eight steps; what is left of them."""
    callback = HeldOutGuardCallback(HeldOutGuard(min_steps=1000), CountingTruth(), proxy_key="-loss", every=2)
    trainer = build(folder, callback)
    if kill_at:
        trainer.add_callback(KillAt(kill_at))
    trainer.train(resume_from_checkpoint=resume)
    return {
        "sha256": parameter_sha256(trainer.model),
        "guard": callback.guard.state_dict(),
        "calls": callback.heldout_eval_fn.calls,
        "folds": [row["step"] for row in trainer.state.log_history if "killswitch/fire" in row],
    }


def halting_and_failing(folder: Path) -> dict[str, Any]:
    """One run that halts and one whose evaluation fails, on two processes."""
    results = {}
    for name, guard in (
        ("halting", HeldOutGuard(min_steps=3, ema_alpha=0.0, max_proxy_real_gap=5.0)),
        ("failing", HeldOutGuard()),
    ):
        calls: list[int] = []

        def evaluate(calls: list[int] = calls, name: str = name) -> float:
            calls.append(1)
            if name == "failing":
                raise InputError("CR0999", "the grader is gone.")
            return -10.0 * len(calls)

        callback = HeldOutGuardCallback(guard, evaluate, proxy_key="-loss")
        trainer = build(folder / name, callback, save_strategy="no")
        try:
            trainer.train()
            outcome = "finished"
        except (CollapseStopError, InputError) as error:
            outcome = error.code
        results[name] = {
            "outcome": outcome,
            "calls": len(calls),
            "step": trainer.state.global_step,
            "guard": guard.state_dict(),
            "sha256": parameter_sha256(trainer.model),
        }
    return results


if __name__ == "__main__":
    torch.set_num_threads(1)
    run_or_resume(Path(sys.argv[1]), kill_at=6)
