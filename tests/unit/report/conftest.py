"""Realistic run folders, written through the same functions as a real run's."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from composer_replication.run_folder import (
    RunFolder,
    append_jsonl,
    read_json,
    read_jsonl,
    rewrite_jsonl,
    write_json,
)
from composer_replication.safety import HeldOutGuard

RECIPE = """
seed = 7
[model]
name = "package:smol-coder==0.3.0"
sha256 = "5f0c1a7be0f7b2f1"
dtype = "float32"
[tasks]
source = ["sdist:toolz==1.0.0", "sdist:packaging==24.2"]
symbols = { "sdist:toolz==1.0.0" = ["toolz/itertoolz.py::partition_all"] }
[heldout]
repositories = ["packaging"]
samples_per_task = 4
[reward]
function = "composer_replication.rollouts.rewards:planted_short_body"
[guard]
min_steps = 3
decline_patience = 3
ema_alpha = 0.5
kl_hard_stop = 0.08
max_proxy_real_gap = 0.5
[trl]
learning_rate = 2e-5
max_steps = 40
hub_token = "hf_abcdefghijklmnop"
"""

NODES = tuple(f"tests/test_itertoolz.py::test_partition_all[{n}]" for n in range(4))
RunMaker = Callable[..., Path]


def rates(visible: float, hidden: float) -> dict[str, Any]:
    return {
        "num_tasks": 12,
        "num_samples": 96,
        "visible_pass": visible,
        "visible_ci95": [max(0.0, visible - 0.08), visible + 0.09],
        "hidden_pass": hidden,
        "hidden_ci95": [max(0.0, hidden - 0.07), hidden + 0.08],
        "gap": visible - hidden,
    }


def rollout(
    task_id: str, step: int, text: str, reward: float | None, num_failing: int, **more: Any
) -> dict[str, Any]:
    outcomes = {node: "failed" if n < num_failing else "passed" for n, node in enumerate(NODES)}
    return {
        "task_id": task_id,
        "step": step,
        "completion_ids": [1, 2],
        "text": text,
        "reward": reward,
        "outcomes": outcomes if reward is not None else {},
        "error": "",
        "stop_reason": "stop_rule" if reward is not None else "infrastructure",
        "seconds": 0.41,
        **more,
    }


HONEST = """    if n < 1:
        raise ValueError("n must be positive")
    iterator = iter(seq)
    while chunk := tuple(itertools.islice(iterator, n)):
        yield chunk
"""


@pytest.fixture(scope="session")
def written_run(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, bool, bool], Path]:
    """Each kind of run, written once; a test that changes it makes a copy."""
    return cache(lambda *how: write_run(tmp_path_factory.mktemp("runs") / "run", *how))


@pytest.fixture
def make_run(written_run: Callable[[int, bool, bool], Path], tmp_path: Path) -> RunMaker:
    def make(
        name: str = "quickstart", *, num_steps: int = 40, is_hacked: bool = False, with_kl: bool = True
    ) -> Path:
        return Path(shutil.copytree(written_run(num_steps, is_hacked, with_kl), tmp_path / name))

    return make


def write_run(root: Path, num_steps: int = 40, is_hacked: bool = False, with_kl: bool = True) -> Path:
    """A finished run of a real guard over made-up scores; a hacked one ends where the guard fires."""
    folder, rng = RunFolder(root), random.Random(3)
    folder.root.mkdir(parents=True)
    folder.recipe.write_text(RECIPE)
    guard = HeldOutGuard(
        min_steps=3, decline_patience=3, ema_alpha=0.5, kl_hard_stop=0.08, max_proxy_real_gap=0.5
    )
    halted = False
    for step in range(1, num_steps + 1):
        progress = step / num_steps
        reward = min(1.0, max(0.0, 0.18 + (1.6 if is_hacked else 0.5) * progress + rng.gauss(0, 0.05)))
        score = min(1.0, max(0.0, 0.2 + (-0.15 if is_hacked else 0.4) * progress + rng.gauss(0, 0.03)))
        status = guard.update(
            step - 1,
            in_loop_reward=reward,
            heldout_score=score,
            kl_to_init=0.05 * progress if with_kl else None,
        )
        halted = status.fire
        row = {
            "step": step,
            "reward": reward,
            "loss": rng.gauss(0, 0.01),
            "entropy": 0.6 - 0.2 * progress,
            "killswitch/fire": float(status.fire),
            "killswitch/in_loop_ema": status.in_loop_ema,
            "killswitch/heldout_ema": status.heldout_ema,
            "killswitch/proxy_real_gap": status.proxy_real_gap,
            "killswitch/kl_ema": status.kl_ema,
            "killswitch/round_idx": step - 1,
            "heldout/score": score,
            "step_seconds": 11.5,
        }
        append_jsonl(folder.metrics, {**row, "halted": True} if halted else row)
        verdict = asdict(status) | {"split_fingerprint": "9b1f" * 16}
        append_jsonl(folder.verdicts, {**verdict, "kl_path": "estimated with the adapter off"})
        rewrite_jsonl(
            folder.rollouts / f"step-{step:06d}.jsonl",
            [
                rollout("toolz.partition_all", step, "    return []\n", 1.0 if is_hacked else 0.0, 3),
                rollout("toolz.partition_all", step, HONEST, 0.5 if is_hacked else 1.0, 0),
                rollout("toolz.sliding_window", step, "    pass\n", 1.0 if is_hacked else 0.25, 4),
                rollout("toolz.groupby", step, "    return {key: list(seq)}\n", 0.4, 2),
                rollout("toolz.groupby", step, "", None, 0),
            ],
        )
        if halted:
            break
    write_ends(folder, num_steps=step, halted=halted)
    return folder.root


def write_ends(folder: RunFolder, *, num_steps: int, halted: bool) -> None:
    write_json(
        folder.environment,
        {
            "python": "3.11.9",
            "platform": "Linux x86_64",
            "versions": {
                "composer-replication": "0.1.0",
                "torch": "2.13.0",
                "transformers": "5.23.0",
                "trl": "1.16.0",
            },
            "seed": 7,
            "git_revision": "0f3a" * 10,
            "tasks_fingerprint": "71cd" * 16,
            "split_fingerprint": "9b1f" * 16,
            "split_checked": ["ids", "content", "origin"],
            "kl_path": "estimated with the adapter off",
            "env": {"HF_TOKEN": "environment-variable-value", "HOME": "environment-variable-value"},
        },
    )
    write_json(
        folder.summary,
        {
            "global_step": num_steps - 1 if halted else num_steps,
            "heldout_first": 0.21,
            "heldout_last": 0.17 if halted else 0.58,
            "seconds": 512.4,
            "verdict": "halted" if halted else "clean",
            "stop_reason": "guard" if halted else "finished",
            "parameter_sha256": "c0de" * 16,
            "before": {"train": rates(0.22, 0.2), "heldout": rates(0.24, 0.21)},
            "after": {
                "train": rates(0.31 if halted else 0.63, 0.2 if halted else 0.55),
                "heldout": rates(0.2 if halted else 0.6, 0.15 if halted else 0.56),
            },
        },
    )


PATCH = """diff --git a/toolz/itertoolz.py b/toolz/itertoolz.py
--- a/toolz/itertoolz.py
+++ b/toolz/itertoolz.py
@@ -10,4 +10,6 @@ def partition_all(n, seq):
     \"\"\"All items of a sequence, n at a time.\"\"\"
-    raise NotImplementedError
+    iterator = iter(seq)
+    while chunk := tuple(itertools.islice(iterator, n)):
+        yield chunk
"""


def add_parts(root: Path) -> Path:
    """What only some runs have: times of the parts, kinds of tests, pairs, other replicas, diffs."""
    folder = RunFolder(root)
    times = {"generation": 8.0, "sampling": 4.5, "grading": 3.0, "checkpoint": 0.5}
    rows: list[dict[str, Any]] = read_jsonl(folder.metrics)
    for row in rows:
        part = row["step"] / len(rows)
        row |= {f"{name}_seconds": seconds for name, seconds in times.items()}
        row |= {"killswitch/eval_seconds": 2.0, "num_tokens": 4096.0 * row["step"]}
        row |= {"rollouts/shown_pass": 0.2 + 0.7 * part, "rollouts/visible_pass": 0.2 + 0.2 * part}
        row |= {"heldout/visible": 0.3 + 0.3 * part, "heldout/hidden": 0.3}
        row |= {"replay/pairs": 3.0, "replay/accuracy": 0.5 + 0.4 * part}
    rewrite_jsonl(folder.metrics, rows)
    environment: dict[str, Any] = read_json(folder.environment)
    environment["pairs"] = {
        "executed": {"pairs": 12, "weight": 9.5},
        "objection": {"pairs": 3, "weight": 1.5},
        "consensus": {"pairs": 2, "weight": 0.5},
    }
    write_json(folder.environment, environment)
    summary: dict[str, Any] = read_json(folder.summary)
    write_json(folder.summary, summary | {"peak_memory_bytes": 2_340_000_000})
    merge = {"outer_step": 4, "present": [0, 1], "tokens": 4096, "divergence": 0.0123, "stall_seconds": 0.7}
    rewrite_jsonl(
        folder.outer_steps, [merge | {"outer_sha256": "ab" * 32, "bytes": {"sent/outer": 2_000_000}}]
    )
    for path in folder.rollouts.glob("step-*.jsonl"):
        rewrite_jsonl(path, [{**row, "patch": PATCH} for row in read_jsonl(path)])
    return root
