"""One of two processes of ``composer-rl train`` under DeepSpeed: ``train_worker.py [--resume] FOLDER``; the run is ``FOLDER/run``."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from zero_worker import use_deepspeed_on_processors

from composer_replication.cli.main import main

RECIPE = Path(__file__).parents[3] / "recipes" / "tiny-cpu" / "run.toml"
SETTINGS = {
    "trl.max_steps": 2,
    "trl.per_device_train_batch_size": 4,
    "trl.num_generations": 4,
    "trainer.checkpoint_every": 1,
    "heldout.every": 1,
    "heldout.before_and_after_samples": 1,
}


def train(folder: Path, *words: str) -> int:
    flags = [part for key, value in SETTINGS.items() for part in ("--set", f"{key}={value}")]
    return main(["train", str(RECIPE), "--out", str(folder / "run"), *flags, *words])


if __name__ == "__main__":
    use_deepspeed_on_processors()
    *given, place = sys.argv[1:]
    told = {"code": train(Path(place), *given)}
    (Path(place) / f"rank-{os.environ['RANK']}.json").write_text(json.dumps(told))
