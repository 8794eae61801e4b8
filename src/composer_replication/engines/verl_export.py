"""From tasks to a folder with which stock verl trains: rows in Parquet, our agent loop, arguments and a script that starts it."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from composer_replication.config import RunConfig
from composer_replication.engines.verl_guard import HELDOUT
from composer_replication.engines.verl_plugin import NAME, TRAINER
from composer_replication.errors import UsageError
from composer_replication.records import Task
from composer_replication.run_folder import write_atomic

TRAINED = "composer-train"
FOLDER_VARIABLE = "COMPOSER_RL_VERL"
"""Names the folder to every process of the job."""
_LOOP = "composer_replication.cli.verl_parts.open_agent_loop"


def job_folder() -> Path:
    """The folder of this process's job."""
    if name := os.environ.get(FOLDER_VARIABLE, ""):
        return Path(name)
    problem = f"verl's agent loop does not know its folder: {FOLDER_VARIABLE} is not set."
    fix = "start verl with run.sh of the folder that composer-rl export-verl wrote."
    raise UsageError("CR0951", problem, where=FOLDER_VARIABLE, fix=fix)


def not_carried(config: RunConfig) -> list[str]:
    """What of the recipe has no place in verl."""
    found = {
        "trainer.alpha_sdpo (hints need the teacher's logits)": config.trainer.alpha_sdpo != 0.0,
        "trainer.beta_replay": config.trainer.beta_replay != 0.0,
        "trainer.preset": bool(config.trainer.preset),
        "[curriculum]": config.curriculum is not None,
        "[ray]": config.ray is not None,
        "[evidence]": config.evidence is not None,
        "trl.beta (the KL to the initial policy)": bool(config.trl.get("beta", 0.0)),
    }
    return [name for name, is_set in found.items() if is_set]


def rows_of(tasks: Sequence[Task], messages: Sequence[str], *, is_heldout: bool) -> list[dict[str, Any]]:
    """verl's columns: the first message as a chat, our agent loop, and which task it is."""
    source = HELDOUT if is_heldout else TRAINED
    return [
        {
            "data_source": source,
            "prompt": [{"role": "user", "content": message}],
            "agent_name": NAME,
            "ability": "code",
            "reward_model": {"style": "rule", "ground_truth": task.task_id},
            "extra_info": {"index": index, "task_id": task.task_id, "is_heldout": is_heldout},
        }
        for index, (task, message) in enumerate(zip(tasks, messages, strict=True))
    ]


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """One Parquet file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pylist(list(rows)), path)


def write_start(folder: Path, arguments: Mapping[str, Any]) -> None:
    """``agent_loops.yaml`` and ``run.sh``, which hands further arguments on to verl."""
    write_atomic(folder / "agent_loops.yaml", f"- name: {NAME}\n  _target_: {_LOOP}\n")
    words = [f"{key}={_hydra(value)}" for key, value in arguments.items()]
    lines = " \\\n  ".join(shlex.quote(word) for word in words)
    write_atomic(
        folder / "run.sh",
        "#!/bin/sh\n# Stock verl over the tasks of this folder; what is typed behind is given to verl and wins.\n"
        f"export {FOLDER_VARIABLE}={shlex.quote(str(folder))}\n"
        f'exec "${{PYTHON:-python3}}" -m verl.trainer.main_ppo \\\n  {lines} "$@"\n',
    )
    (folder / "run.sh").chmod(0o755)


def verl_arguments(
    folder: Path, trl: Mapping[str, Any], *, model: str, limits: Mapping[str, int], num_tasks: int
) -> dict[str, Any]:
    """A recipe's settings under verl's names; what verl has no name for is not carried.

    Args:
        folder: of the export.
        trl: the recipe's ``[trl]``.
        model: folder or name of the weights.
        limits: ``prompt`` and ``response``, in tokens.
        num_tasks: to train on; a batch has no more.
    """
    num_generations = int(trl.get("num_generations", 8))
    rows = int(trl.get("per_device_train_batch_size", 8)) * int(trl.get("gradient_accumulation_steps", 1))
    num_prompts = max(1, min(rows // num_generations, num_tasks))
    return {
        "algorithm.adv_estimator": NAME,
        "actor_rollout_ref.actor.policy_loss.loss_mode": NAME,
        "trainer.v1.trainer_mode": TRAINER,
        "data.train_files": str(folder / "train.parquet"),
        "data.val_files": str(folder / "heldout.parquet"),
        "data.train_batch_size": num_prompts,
        "data.max_prompt_length": limits["prompt"],
        "data.max_response_length": limits["response"],
        "data.return_raw_chat": True,
        "actor_rollout_ref.model.path": model,
        "actor_rollout_ref.actor.ppo_mini_batch_size": num_prompts,
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 1,
        "actor_rollout_ref.actor.optim.lr": float(trl.get("learning_rate", 1e-6)),
        "actor_rollout_ref.actor.use_kl_loss": False,
        "actor_rollout_ref.actor.loss_agg_mode": "seq-mean-token-sum-norm",
        "actor_rollout_ref.rollout.n": num_generations,
        "actor_rollout_ref.rollout.temperature": float(trl.get("temperature", 1.0)),
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": 1,
        "actor_rollout_ref.rollout.calculate_log_probs": True,
        "actor_rollout_ref.rollout.agent.default_agent_loop": NAME,
        "actor_rollout_ref.rollout.agent.agent_loop_config_path": str(folder / "agent_loops.yaml"),
        "trainer.total_training_steps": int(trl.get("max_steps", -1)) if trl.get("max_steps") else "null",
        "trainer.test_freq": 1,
        "trainer.val_before_train": False,
        "trainer.logger": "console",
        "trainer.n_gpus_per_node": 1,
        "trainer.nnodes": 1,
    }


def _hydra(value: Any) -> str:
    return json.dumps(value) if isinstance(value, bool | int | float) else str(value)
