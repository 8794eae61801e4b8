"""Joins our parts in the processes of verl, whose environment names the folder of ``composer-rl export-verl``."""

from __future__ import annotations

import json
import os
from functools import lru_cache
from pathlib import Path
from typing import Any

from composer_replication.cli.assembly import Attempts, make_guard, open_grader
from composer_replication.config import RunConfig, load_config
from composer_replication.engines.verl_agent_loop import AgentLoopParts, VerlPolicy, attempt, verl_output
from composer_replication.engines.verl_export import FOLDER_VARIABLE
from composer_replication.engines.verl_guard import GuardHook
from composer_replication.engines.verl_plugin import require_registered
from composer_replication.errors import UsageError
from composer_replication.tasks.store import TaskStore


class AgentLoop:
    """One attempt for verl, which makes an object for each; all of a process share their parts."""

    def __init__(self, settings: Any, server: Any, tokenizer: Any) -> None:
        self.rollout, self.server, self.tokenizer = settings.actor_rollout_ref.rollout, server, tokenizer
        self.end_token_ids = _end_token_ids(str(settings.actor_rollout_ref.model.path), tokenizer)

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> Any:
        """The attempt at the row's task."""
        config, parts = _parts(_folder(), self.tokenizer)
        about = row["extra_info"]
        policy = VerlPolicy(self.server, self.tokenizer, sampling_params, self.end_token_ids)
        how = {"seed": config.seed, "step": int(row.get("global_steps") or 0)}
        is_heldout = bool(about["is_heldout"])
        attempted = await attempt(parts, policy, str(about["task_id"]), is_heldout=is_heldout, **how)
        lengths = {name: int(getattr(self.rollout, name)) for name in ("prompt_length", "response_length")}
        return verl_output(attempted, policy, **lengths)


def open_agent_loop(trainer_config: Any, server_manager: Any, tokenizer: Any, **more: Any) -> AgentLoop:
    """What ``agent_loops.yaml`` names."""
    del more
    require_registered()
    return AgentLoop(trainer_config.config, server_manager, tokenizer)


def open_guard() -> GuardHook | None:
    """The guard of the recipe; None where it has none."""
    folder = _folder()
    guard = make_guard(load_config(folder / "run.toml"))
    return None if guard is None else GuardHook(guard, folder)


def _folder() -> Path:
    if name := os.environ.get(FOLDER_VARIABLE, ""):
        return Path(name)
    problem = f"verl's agent loop does not know its folder: {FOLDER_VARIABLE} is not set."
    fix = "start verl with run.sh of the folder that composer-rl export-verl wrote."
    raise UsageError("CR0951", problem, where=FOLDER_VARIABLE, fix=fix)


@lru_cache(maxsize=1)
def _parts(folder: Path, tokenizer: Any) -> tuple[RunConfig, AgentLoopParts]:
    config = load_config(folder / "run.toml")
    grader = open_grader(config, TaskStore.open(Path(config.tasks.store)))
    attempts = Attempts(config, grader, tokenizer)
    return config, AgentLoopParts(attempts.player(), attempts.player(is_evaluation=True), grader)


def _end_token_ids(model: str, tokenizer: Any) -> list[int]:
    """What ends an answer: the tokenizer's end token and those of the model's generation settings, where they are here."""
    path = Path(model) / "generation_config.json"
    ends = json.loads(path.read_text()).get("eos_token_id") if path.is_file() else None
    more = ends if isinstance(ends, list) else [] if ends is None else [ends]
    return [int(each) for each in dict.fromkeys([tokenizer.eos_token_id, *more]) if each is not None]
