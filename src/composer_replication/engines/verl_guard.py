"""The guard in a job of verl: it sees each step's numbers, keeps its verdicts on disk, and ends the job with its exit code."""

from __future__ import annotations

import atexit
import json
import math
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from composer_replication.errors import CollapseStopError
from composer_replication.interfaces import Guard
from composer_replication.run_folder import append_jsonl, write_json

HELDOUT = "composer-heldout"
"""``data_source`` of the held-out rows, under which verl logs their means."""
IN_LOOP = "critic/score/mean"
HELDOUT_SCORE = f"val-core/{HELDOUT}/acc/mean@1"
KL = "actor/composer_kl"
_HALTED = "halted.json"


class GuardHook:
    """Asked once a step in which held-out tasks were measured.

    Args:
        guard: judges.
        folder: ``verdicts.jsonl`` and, after a halt, ``halted.json`` are written there.
    """

    def __init__(self, guard: Guard, folder: Path) -> None:
        self.guard, self.folder = guard, folder
        self._num_rounds = 0
        (folder / _HALTED).unlink(missing_ok=True)

    def look(self, metrics: Mapping[str, Any], *, step: int) -> None:
        """Judge the numbers that verl logs of a step.

        Raises:
            CollapseStopError: the guard fired (CR0601).
        """
        reward, score = _number(metrics, IN_LOOP), _number(metrics, HELDOUT_SCORE)
        if reward is None or score is None:
            return
        status = self.guard.update(
            self._num_rounds, in_loop_reward=reward, heldout_score=score, kl_to_init=_number(metrics, KL)
        )
        row = {
            "round_idx": self._num_rounds,
            "step": step,
            "in_loop_reward": reward,
            "heldout_score": score,
            "fire": bool(status.fire),
            "reason": str(status.reason),
        }
        append_jsonl(self.folder / "verdicts.jsonl", row)
        self._num_rounds += 1
        if status.fire:
            write_json(self.folder / _HALTED, row)
            raise CollapseStopError(status)


def end_with_our_code(folder: Path) -> None:
    """At the end of this process: say the verdict and take the guard's exit code, where the guard halted the job.

    verl runs its trainer in another process and ends with 1 whatever is raised there.
    """
    (folder / _HALTED).unlink(missing_ok=True)

    def end() -> None:
        path = folder / _HALTED
        if not path.is_file():
            return
        reason = json.loads(path.read_text())["reason"]
        sys.stdout.flush()
        print(f"CR0601: the guard halted training: {reason} [{folder}]", file=sys.stderr, flush=True)  # noqa: T201
        os._exit(CollapseStopError.exit_code)

    atexit.register(end)


def _number(metrics: Mapping[str, Any], name: str) -> float | None:
    try:
        value = float(metrics[name])
    except (KeyError, TypeError, ValueError):
        return None
    return value if math.isfinite(value) else None
