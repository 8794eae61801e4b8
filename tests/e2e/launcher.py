"""``composer-rl launch`` in a folder of its own, as somebody types it there: the tiny recipe, small, on one target."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

RECIPE = Path(__file__).parents[2] / "recipes" / "tiny-cpu" / "run.toml"
WAIT_SECONDS = 1500
SETTINGS = {
    "trl.per_device_train_batch_size": 4,
    "trl.num_generations": 4,
    "trl.max_completion_length": 8,
    "heldout.before_and_after_samples": 0,
    "heldout.every": 100,
    "trainer.checkpoint_every": 1000,
    "trainer.save_model": "false",
}
HALTS = {"guard.min_steps": 1, "guard.max_proxy_real_gap": 1e-6, "heldout.every": 1, "trl.max_steps": 40}


@dataclass
class Launcher:
    """``variables`` are those by which the target is found; ``options`` are given to each launch, filled with its name."""

    folder: Path
    target: str
    options: Mapping[str, object] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)
    recipe: Path = RECIPE

    def answer(self, *words: object) -> tuple[int, dict[str, Any]]:
        command = [
            sys.executable,
            "-m",
            "composer_replication.cli.main",
            "launch",
            *map(str, words),
            "--json",
        ]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **self.variables}
        done = subprocess.run(
            command,
            cwd=self.folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        return done.returncode, json.loads(done.stdout or json.dumps({"stderr": done.stderr}))

    def __call__(self, *words: object, code: int = 0) -> dict[str, Any]:
        found, answer = self.answer(*words)
        assert found == code, answer
        return answer

    def launch(self, name: str, *words: object, code: int = 0, **settings: object) -> dict[str, Any]:
        given = [f"{key}={str(value).format(name=name)}" for key, value in self.options.items()]
        options = [part for text in given for part in ("--option", text)]
        flags = [
            part for key, value in {**SETTINGS, **settings}.items() for part in ("--set", f"{key}={value}")
        ]
        return self(self.recipe, "--to", self.target, "--name", name, *options, *flags, *words, code=code)

    def state(self, name: str) -> str:
        return str(self.answer("status", name)[1]["state"])

    def ended(self, name: str, code: int) -> dict[str, Any]:
        """Wait for the end; ``status`` must have this exit code then."""
        wait_for(lambda: self.state(name) not in ("waiting", "running"))
        found, answer = self.answer("status", name)
        logs = self("logs", name)["logs"]
        assert found == code, (answer, logs[-3000:])
        return {**answer, "logs": logs}


def wait_for(happened: Callable[[], bool]) -> None:
    """Asking takes what a busy machine would have given to the run, so the more an answer takes the rarer it is asked."""
    deadline = time.monotonic() + WAIT_SECONDS
    asked = time.monotonic()
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(max(2.0, 4 * (time.monotonic() - asked)))
        asked = time.monotonic()
