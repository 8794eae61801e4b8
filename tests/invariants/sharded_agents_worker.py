"""One of two processes that train by episodes of several turns: ``sharded_agents_worker.py SPEC FOLDER``.

``SPEC`` is JSON: the settings, and whether FSDP2 spreads the weights or each process has them whole. Writes ``rank-R.json``.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from agentic_worker import RECIPE, scripts
from scripted_tools import ThinkingSampler, sampler_of
from sharded_worker import shard_the_weights

from composer_replication.cli.training_run import run_recipe
from composer_replication.errors import ComposerError, InputError
from composer_replication.rollouts.episodes.batching_policy import SampleOptions
from composer_replication.trainer import episode_rollouts
from composer_replication.trainer.joint_sampler import JointSampler, forwards_need_others


class Unscored(ThinkingSampler):
    """Log-probabilities would need forwards of their own, which the processes would have to make together."""

    def own_logps(self, prompt: tuple[int, ...], ids: list[int], temperature: float) -> list[float]:
        return []


class JointThinking(Unscored, JointSampler):
    """Draws its thoughts together with the other process, at times of its own.

    The forwards are counted: those that answer a prompt of this process, and the stand-ins for the other's sake.
    """

    num_batches = 0
    num_stand_ins = 0
    fails_at = 0

    def meet(self, options: Sequence[SampleOptions]) -> None:
        super().meet([replace(each, max_new_tokens=self.num_thoughts) for each in options])

    def sampled(self, prompts: Any, options: Any, **more: Any) -> Any:
        is_stand_in = len(prompts[0]) == 1
        JointThinking.num_stand_ins += is_stand_in
        JointThinking.num_batches += not is_stand_in
        if not is_stand_in and JointThinking.num_batches == self.fails_at and os.environ["RANK"] == "1":
            more["goes_on"] = fail
        return super().sampled(prompts, options, **more)


def scripted(model: Any, trainer: Any) -> Any:
    """In the place of ``model_sampler``; before training begins each process has the weights whole."""
    kind = JointThinking if forwards_need_others(trainer.model) else Unscored
    return sampler_of(scripts(), kind)(model, trainer)


def fail(runs: bool) -> bool:
    raise InputError("CR0999", "amid a batch.")


def main(spec: dict[str, Any], folder: Path) -> None:
    rank = os.environ["RANK"]
    JointThinking.fails_at = spec.get("fails_at", 0)
    if spec["is_sharded"]:
        shard_the_weights()
    if spec["is_scripted"]:
        episode_rollouts.model_sampler = scripted
    result: dict[str, Any] = {}
    try:
        summary, _ = run_recipe(RECIPE, spec["settings"], folder / "run", resume=False, quiet=True)
        result |= {"sha256": summary["parameter_sha256"], "steps": summary["steps"]}
    except ComposerError as error:
        result |= {"error": error.code, "notes": getattr(error, "__notes__", [])}
    result |= {"batches": JointThinking.num_batches, "stand_ins": JointThinking.num_stand_ins}
    (folder / f"rank-{rank}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
