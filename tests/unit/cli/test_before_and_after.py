"""Trained tasks may be measured by fewer samples than held-out ones, which are what a run is judged by."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from composer_replication.channel_tables import HeldoutSection
from composer_replication.cli.training_run import _measure_once
from composer_replication.rollouts.pass_rates import TaskResult


class CountedSamples:
    """Every sample passes; only their number is asked about."""

    def reporting(self, report: Any, label: str) -> nullcontext[None]:
        del report, label
        return nullcontext()

    def sample(
        self, tasks: tuple[str, ...], *, num_samples: int, seed: int, name: str
    ) -> tuple[list[TaskResult], int]:
        del seed, name
        return [TaskResult(task, (True,) * num_samples, (True,) * num_samples) for task in tasks], 0


@pytest.mark.parametrize(("of_trained", "counts"), [(None, (6, 3)), (1, (2, 3))])
def test_trained_tasks_have_a_number_of_samples_of_their_own(
    tmp_path: Path, of_trained: int | None, counts: tuple[int, int]
) -> None:
    section = HeldoutSection(before_and_after_samples=3, before_and_after_trained_samples=of_trained)
    parts: Any = SimpleNamespace(
        config=SimpleNamespace(heldout=section, seed=0),
        folder=SimpleNamespace(root=tmp_path),
        tasks=SimpleNamespace(train=("a", "b"), heldout=("c",)),
        sampler=CountedSamples(),
        trainer=SimpleNamespace(model=None),
        quiet=True,
    )
    rates = _measure_once(parts, "before", lambda _: None)
    assert rates is not None
    assert (rates["train"]["num_samples"], rates["heldout"]["num_samples"]) == counts
    assert rates["heldout"]["by_task"] == {"c": {"visible": 3, "hidden": 3, "samples": 3}}
