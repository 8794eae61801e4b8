"""Simulate a family, put every detector on it, and keep when each alarmed."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from composer_replication.report.bench_detectors import Detector
from composer_replication.report.bench_evidence import EvidenceSimulator, Floats, log_threshold
from composer_replication.report.bench_families import DELTA, EPS0, TOLERATED_GAP
from composer_replication.report.bench_series import (
    NUM_EVALUATIONS,
    Evaluation,
    Family,
    RunDraws,
    Series,
    Watched,
)

CHUNK = 1000
"""Runs simulated together: few enough for a processor's cache."""

ALPHAS = (0.01, 0.1, 0.05, 0.02, 0.005, 0.002)
"""Error levels of the calibration; the first is what policies that read the guard read."""

Alarms = npt.NDArray[np.int64]
Report = Callable[[int, int, str], None]


@dataclass(frozen=True, slots=True)
class Chunk:
    """Some runs of a family: what detectors read, and when the evidence reached each error level."""

    series: Series
    evidence_alarms_AR: Alarms


def simulate(
    family: Family,
    num_runs: int,
    *,
    seed: int,
    num_tasks: int,
    alphas: tuple[float, ...] = (0.01,),
    tick: Callable[[str], None] | None = None,
) -> Iterator[Chunk]:
    """The runs of a family, ``CHUNK`` at a time; each chunk has a seed of its own."""
    for start in range(0, num_runs, CHUNK):
        rng = np.random.default_rng([seed, zlib.crc32(family.name.encode()), start])
        yield _chunk(family, RunDraws(min(CHUNK, num_runs - start), num_tasks, rng, family.onset), alphas)
        if tick is not None:
            tick(family.name)


def _chunk(family: Family, draws: RunDraws, alphas: tuple[float, ...]) -> Chunk:
    evidence = EvidenceSimulator(
        draws.num_runs,
        planned_evaluations=NUM_EVALUATIONS,
        tolerated_gap=TOLERATED_GAP,
        alphas=alphas,
        delta=DELTA,
        eps0=EPS0,
    )
    next_evaluation = family.start(draws)
    thresholds_A1 = np.array([[log_threshold(alpha)] for alpha in alphas])
    alarms_AR = np.zeros((len(alphas), draws.num_runs), dtype=np.int64)
    evaluations: list[Evaluation] = []
    path_TR = np.empty((NUM_EVALUATIONS, draws.num_runs))
    for step in range(1, NUM_EVALUATIONS + 1):
        one = next_evaluation(Watched(step, evidence.log_evidence_AR[0]))
        evidence.update(one.gap_counts_XR, one.truth_counts_HR, one.canary_counts_HR)
        path_TR[step - 1] = evidence.log_evidence_AR[0]
        is_new_AR = (evidence.log_evidence_AR >= thresholds_A1) & (alarms_AR == 0)
        alarms_AR[is_new_AR] = step
        evaluations.append(one)
    return Chunk(_series(evaluations, path_TR), alarms_AR)


def _series(evaluations: Sequence[Evaluation], log_evidence_TR: Floats) -> Series:
    truth_THR = np.stack([one.truth_counts_HR for one in evaluations])
    return Series(
        gap_counts_TXR=np.stack([one.gap_counts_XR for one in evaluations]),
        truth_TR=truth_THR[:, 1] / np.maximum(truth_THR.sum(axis=1), 1),
        in_loop_TR=np.stack([one.in_loop_R for one in evaluations]),
        kl_TR=np.stack([one.kl_R for one in evaluations]),
        log_evidence_TR=log_evidence_TR,
    )


def first_alarms(path_TR: Floats, thresholds: Sequence[float]) -> Alarms:
    """The first evaluation, from 1, at which each run reaches each threshold; 0: never. Shape [H, R]."""
    highest_TR = np.maximum.accumulate(path_TR, axis=0)
    num_below_HR = np.stack([(highest_TR < threshold).sum(axis=0) for threshold in thresholds])
    return np.where(num_below_HR == len(path_TR), 0, num_below_HR + 1)


def highest(chunks: Iterator[Chunk], detectors: Sequence[Detector]) -> dict[str, Floats]:
    """The highest point of each run's path, by detector: what a threshold is tuned on."""
    found: dict[str, list[Floats]] = {detector.name: [] for detector in detectors}
    for chunk in chunks:
        for detector in detectors:
            found[detector.name].append(detector.path(chunk.series).max(axis=0))
    return {name: np.concatenate(parts) for name, parts in found.items()}


def all_alarms(
    chunks: Iterator[Chunk], detectors: Sequence[Detector], thresholds: Mapping[str, Sequence[float]]
) -> tuple[dict[str, Alarms], Alarms]:
    """When each detector alarmed at each of its thresholds, [H, R]; and the evidence at each level, [A, R]."""
    found: dict[str, list[Alarms]] = {detector.name: [] for detector in detectors}
    by_level: list[Alarms] = []
    for chunk in chunks:
        by_level.append(chunk.evidence_alarms_AR)
        for detector in detectors:
            found[detector.name].append(first_alarms(detector.path(chunk.series), thresholds[detector.name]))
    joined = {name: np.concatenate(parts, axis=1) for name, parts in found.items()}
    return joined, np.concatenate(by_level, axis=1)
