"""One of two trainer processes: ``two_process_worker.py FOLDER``; the rank comes from the environment.

Writes ``rank-R.json``: what each scenario gave on this rank.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from callback_worker import halting_and_failing
from channel_runs import CHANNELS, trained, weights_of
from tiny_trainer import build_trainer
from worker_runs import under_a_falling_truth, whole_and_resumed

from composer_replication.errors import InputError
from composer_replication.records import TaskOutcome
from composer_replication.rollouts.curriculum import Curriculum
from composer_replication.run_folder import RunFolder
from composer_replication.safety import HeldOutGuard
from composer_replication.trainer import checkpoints
from composer_replication.trainer.composer_trainer import ComposerReplicationTrainer
from composer_replication.trainer.model_modes import head_of, parameter_sha256
from composer_replication.trainer.preset_settings import PolicyOptions
from composer_replication.trainer.processes import once


def halting_run(folder: Path) -> dict[str, Any]:
    trainer, result = under_a_falling_truth(folder, num_prompts=8, prefix_sharing=True)
    return {**result, "sharing_off": trainer.shared_prompts.off_reasons}


def failing_run(folder: Path) -> dict[str, Any]:
    def evaluate() -> float:
        raise InputError("CR0999", "the grader is gone.")

    trainer = build_trainer(
        output_dir=folder / "checkpoints",
        run_folder=RunFolder(folder),
        heldout_guard=HeldOutGuard(),
        heldout_eval_fn=evaluate,
        num_prompts=8,
        max_steps=2,
    )
    try:
        trainer.train()
    except InputError as error:
        return {"error": error.code, "notes": getattr(error, "__notes__", [])}
    return {"error": None}


def failing_saves(folder: Path) -> dict[str, Any]:
    """The first process's disk is full for one file of a checkpoint after the other."""

    def full(*_: Any) -> None:
        if dist.get_rank() == 0:
            raise OSError("the disk is full")

    found = {}
    for place, name in ((checkpoints.OwnState, "write"), (checkpoints, "write_manifest")):
        trainer = build_trainer(output_dir=folder / name, num_prompts=8, max_steps=1, save_strategy="steps")
        with patch.object(place, name, full):
            try:
                trainer.train()
            except OSError as error:
                found[name] = str(error)
    return found


def joint_failure(_: Path) -> dict[str, Any]:
    """Sharded weights: each process runs the evaluation, and the second one fails."""

    class Unpicklable(Exception):
        """Of a local class: it cannot travel."""

    def work() -> str:
        if dist.get_rank() == 1:
            raise Unpicklable("out of memory")
        return "reading"

    try:
        once(work, every_process_joins=True)
    except Exception as error:  # noqa: BLE001 - the kind is what the test looks at
        return {"error": f"{type(error).__name__}: {error}"}
    return {"error": None}


def bare_fold(_: Path) -> dict[str, Any]:
    """Bare instances whose processes saw different rewards fold the first one's."""
    trainer: Any = ComposerReplicationTrainer.__new__(ComposerReplicationTrainer)
    calls: list[int] = []
    rows: list[dict[str, float]] = []
    trainer.heldout_guard = HeldOutGuard()
    trainer.heldout_eval_fn = lambda: calls.append(1) or 0.25
    trainer.state = SimpleNamespace(global_step=0)
    trainer.args = SimpleNamespace(logging_steps=1)
    trainer.control = SimpleNamespace(should_training_stop=False)
    trainer._metrics = {"train": {"reward": [0.5 + dist.get_rank()]}}
    trainer.log = rows.append
    trainer._maybe_update_killswitch()
    return {"calls": len(calls), "rows": rows}


def disagreeing_processes(folder: Path) -> dict[str, Any]:
    own = {"heldout_guard": HeldOutGuard(), "heldout_eval_fn": lambda: 0.5} if dist.get_rank() == 0 else {}
    trainer = build_trainer(output_dir=folder, num_prompts=8, **own)
    try:
        trainer.train()
    except ValueError as error:
        return {"error": str(error)}
    return {"error": None}


def fresh_groups_run(folder: Path) -> dict[str, Any]:
    """One process has a dull group where the other has none, and the third step overflows on one of them alone."""

    def reward(prompts: list[str], trainer_state: Any, **kwargs: Any) -> list[float]:
        if dist.get_rank() == 1 and trainer_state.global_step == 2:
            return [3e38 * (number % 4 == 0) for number in range(len(prompts))]
        is_dull = ["twice" in prompt or "first" in prompt for prompt in prompts]
        return [1.0 if dull else float(number % 4 == 0) for number, dull in enumerate(is_dull)]

    trainer = build_trainer(
        output_dir=folder / "checkpoints",
        run_folder=RunFolder(folder),
        max_steps=5,
        num_prompts=8,
        lora_adapter=True,
        reward=reward,
        loss_type="dr_grpo",
        scale_rewards="none",
        beta=0.05,
        learning_rate=1e-2,
        policy_options=PolicyOptions(kl_in_reward=True, effort_weight=1e-4, dynamic_sampling_rounds=2),
    )
    trainer.train()
    return {
        "sha256": parameter_sha256(trainer.model),
        "replaced": [row.get("dynamic_sampling/replaced_groups") for row in trainer.state.log_history],
        "findings": [[finding.step, finding.name] for finding in trainer.checks.findings],
        "is_finite": all(bool(weight.isfinite().all()) for weight in trainer.model.parameters()),
    }


def curriculum_run(folder: Path) -> dict[str, Any]:
    """Each process grades its own rows; groups of four over two processes of two rows lie across both."""
    rows = [{"prompt": f"def made_{n}(x):", "task_id": f"t{n}"} for n in range(8)]
    curriculum = type("NeverFades", (Curriculum,), {"half_life": 1e9})(rows, seed=2)
    graded: Counter[str] = Counter()

    def reward(completions: list[str], task_id: list[str], **kwargs: Any) -> list[float]:
        values = [sum(ord(letter) < 100 for letter in text) / max(len(text), 1) for text in completions]
        graded.update(task_id)
        curriculum.note([TaskOutcome(name, value > 0.5) for name, value in zip(task_id, values, strict=True)])
        return values

    trainer = build_trainer(
        output_dir=folder,
        max_steps=4,
        num_prompts=8,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=1,
        reward=reward,
        prompt_source=curriculum,
        learning_rate=1e-2,
    )
    trainer.train()
    curriculum.chosen_rows(1)  # the last generation is counted now
    known = {
        task_id: round(standing.passed + standing.failed)
        for task_id, standing in curriculum.standings.items()
    }
    return {
        "sha256": parameter_sha256(trainer.model),
        "state": curriculum.state_dict(),
        "known": known,
        "graded_here": dict(graded),
    }


def channel_run(folder: Path, channel: str) -> dict[str, bool]:
    """Two steps with a channel; the weights are left beside, for a comparison with those of one process."""
    trainer = trained(folder / channel, channel, num_processes=2)
    torch.save(weights_of(trainer), folder / f"{channel}-{dist.get_rank()}.pt")
    return {"in_place": head_of(trainer.model)[1]["adds_to_weight_grad"]}


def channel_runs(folder: Path) -> dict[str, dict[str, bool]]:
    folder.mkdir(exist_ok=True)
    return {channel: channel_run(folder, channel) for channel in CHANNELS}


SCENARIOS: dict[str, Callable[[Path], Any]] = {
    "halting": halting_run,
    "bare": bare_fold,
    "disagreeing": disagreeing_processes,
    "channels": channel_runs,
    "failing": failing_run,
    "saves": failing_saves,
    "joint": joint_failure,
    "fresh": fresh_groups_run,
    "curriculum": curriculum_run,
    "resumed": lambda folder: whole_and_resumed(folder, prefix_sharing=True),
    "callback": halting_and_failing,
}


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    results = {name: scenario(folder / name) for name, scenario in SCENARIOS.items()}
    (folder / f"rank-{dist.get_rank()}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
