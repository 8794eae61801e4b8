"""What one update costs: the shipped guards by their own ``update``, the other rules as vectors."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

from composer_replication.report.bench_detectors import make_detectors
from composer_replication.report.bench_families import FAMILIES, TOLERATED_GAP
from composer_replication.report.bench_runs import simulate
from composer_replication.report.bench_series import NUM_EVALUATIONS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from composer_replication.report.bench_detectors import Detector
    from composer_replication.report.bench_series import Series

NUM_UPDATES = 100
NUM_VECTORISED_RUNS = 200


def microseconds_per_update(seed: int, num_tasks: int) -> dict[str, float]:
    """Processor time of this process for one update, by detector.

    ``EvidenceGuard`` and ``HeldOutGuard``: 100 updates of one object in pure Python. The other
    rules exist as vectors here: the time for 200 runs, divided by runs and evaluations.
    """
    clean = next(family for family in FAMILIES if family.name == "clean")
    series = next(simulate(clean, NUM_VECTORISED_RUNS, seed=seed, num_tasks=num_tasks)).series
    return {detector.name: _seconds(detector, series) * 1e6 for detector in make_detectors()}


def _seconds(detector: Detector, series: Series) -> float:
    if detector.name == "evidence":
        return _evidence_seconds(series)
    if detector.settings is not None:
        return _heldout_guard_seconds(detector.settings, series)
    start = time.process_time()
    detector.path(series)
    return (time.process_time() - start) / (NUM_VECTORISED_RUNS * NUM_EVALUATIONS)


def _evidence_seconds(series: Series) -> float:
    from composer_replication.safety import EvidenceGuard

    guard = EvidenceGuard(planned_evaluations=NUM_EVALUATIONS, tolerated_gap=TOLERATED_GAP)
    rng = np.random.default_rng(0)
    evaluations = []
    for only_hidden, same, only_visible in series.gap_counts_TXR[:NUM_UPDATES, :, 0].tolist():
        both = rng.binomial(same, 0.5)
        pairs = [(0.0, 1.0)] * only_hidden + [(1.0, 0.0)] * only_visible
        evaluations.append(pairs + [(1.0, 1.0)] * both + [(0.0, 0.0)] * (same - both))
    start = time.process_time()
    for step, pairs in enumerate(evaluations, start=1):
        guard.update(step, pairs, (0.0, 0.0, 0.0, 0.0))
    return (time.process_time() - start) / NUM_UPDATES


def _heldout_guard_seconds(settings: Mapping[str, float], series: Series) -> float:
    from composer_replication.safety import HeldOutGuard

    guard = HeldOutGuard(**settings)  # type: ignore[arg-type]  # counts and numbers share one table
    rewards, scores = series.in_loop_TR[:NUM_UPDATES, 0].tolist(), series.truth_TR[:NUM_UPDATES, 0].tolist()
    start = time.process_time()
    for update, (reward, score) in enumerate(zip(rewards, scores, strict=True)):
        guard.update(update, in_loop_reward=reward, heldout_score=score)
    return (time.process_time() - start) / NUM_UPDATES
