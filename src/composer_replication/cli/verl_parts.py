"""Joins our parts in the processes of verl, whose environment names the folder of ``composer-rl export-verl``."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

from composer_replication.cli.assembly import Attempts, make_guard, open_grader
from composer_replication.config import load_config
from composer_replication.engines.verl_agent_loop import AgentLoop, AgentLoopParts
from composer_replication.engines.verl_export import job_folder
from composer_replication.engines.verl_guard import GuardHook
from composer_replication.engines.verl_plugin import require_registered
from composer_replication.rollouts.episodes.shortcut_judge import open_judge
from composer_replication.tasks.store import TaskStore


def open_agent_loop(trainer_config: Any, server_manager: Any, tokenizer: Any, **more: Any) -> AgentLoop:
    """What ``agent_loops.yaml`` names."""
    del more
    require_registered()
    return AgentLoop(trainer_config.config, server_manager, tokenizer, _parts)


def open_guard() -> GuardHook | None:
    """The guard of the recipe; None where it has none."""
    folder = job_folder()
    guard = make_guard(load_config(folder / "run.toml"))
    return None if guard is None else GuardHook(guard, folder)


@lru_cache(maxsize=1)
def _parts(tokenizer: Any) -> AgentLoopParts:
    config = load_config(job_folder() / "run.toml")
    grader = open_grader(config, TaskStore.open(Path(config.tasks.store)))
    judge = None if config.agent is None else open_judge(config.agent.judge)
    attempts = Attempts(config, grader, tokenizer, judge=judge)
    return AgentLoopParts(attempts.player(), attempts.player(is_evaluation=True), grader, config.seed)
