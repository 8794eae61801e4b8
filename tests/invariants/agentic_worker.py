"""A run of several turns in its own process, which kills itself among its rollouts: ``agentic_worker.py SPEC.json``."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "trainer"))

from scripted_tools import END, ThinkingSampler, said, sampler_of

from composer_replication.cli.train_verb import run_recipe
from composer_replication.records import Completion
from composer_replication.rollouts.episodes.policies import SampleOptions
from composer_replication.trainer import episode_rollouts

RECIPE = Path(__file__).parents[2] / "recipes" / "tiny-tools" / "run.toml"
NUMBERS = "tinymath/numbers.py"


def scripts() -> list[list[str]]:
    golden = (RECIPE.parents[1] / "tiny-cpu" / "project" / NUMBERS).read_text()
    return [
        [said("write_file", path=NUMBERS, content=golden), said("submit")],
        [said("fly_away", height=3), said("bash", command="echo hello"), f"I give up.{END}"],
        [said("bash", command="ls tinymath"), f"Nothing to do.{END}"],
    ]


class Deadly(ThinkingSampler):
    """Kills its process at the n-th batch, when other episodes of the generation are under way."""

    kill_at = 0
    num_batches = 0

    def __call__(self, prompts: list[tuple[int, ...]], options: list[SampleOptions]) -> Sequence[Completion]:
        Deadly.num_batches += 1
        if Deadly.num_batches == self.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__call__(prompts, options)


def run_or_resume(folder: Path, settings: dict[str, Any], *, kill_at: int = 0) -> dict[str, Any]:
    """Train to the end from the newest whole checkpoint; the summary."""
    Deadly.kill_at, Deadly.num_batches = kill_at, 0
    kept, episode_rollouts.model_sampler = episode_rollouts.model_sampler, sampler_of(scripts(), Deadly)
    try:
        summary, _ = run_recipe(RECIPE, settings, folder, resume=folder.exists(), quiet=True)
    finally:
        episode_rollouts.model_sampler = kept
    return summary


if __name__ == "__main__":
    spec = json.loads(Path(sys.argv[1]).read_text())
    run_or_resume(Path(spec["run"]), spec["settings"], kill_at=spec["kill_at"])
