"""Recorded real runs: what each detector, at its nominal threshold, says about them.

A recorded run is a folder with the ``metrics.jsonl`` of a run of ours. It may hold a
``recorded.json``, ``{"onset_step": N}`` (null: honest), where the onset is known otherwise;
without it the first step counts whose reward is at least .25 above the pass rate of the visible
tests it is meant to stand for: reward that no passed test has earned. No such step: honest.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from composer_replication.errors import InputError
from composer_replication.report.bench_detectors import make_detectors
from composer_replication.report.bench_evidence import EvidenceSimulator, Floats
from composer_replication.report.bench_families import DELTA, EPS0, TOLERATED_GAP
from composer_replication.report.bench_runs import first_alarms
from composer_replication.report.bench_series import Series
from composer_replication.report.run_data import RunData, number, read_run
from composer_replication.run_folder import read_json

if TYPE_CHECKING:
    from composer_replication.report.bench_detectors import Detector

UNEARNED_REWARD = 0.25
MOST_SAMPLES = 512
"""Sizes of an evaluation that are tried when the size is worked out from the means."""

ONSET_FILE = "recorded.json"


@dataclass(frozen=True, slots=True)
class Reading:
    """One held-out evaluation with the newest reward and KL; None where the run did not measure."""

    step: int
    reward: float
    score: float
    visible: float | None
    hidden: float | None
    kl: float | None


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """A recorded run: its name, its evaluations, and the first hacked step (None: honest)."""

    name: str
    readings: tuple[Reading, ...]
    onset_step: int | None


def shipped_recordings() -> Path | None:
    """The recorded runs of a source checkout; None in an installation, which has none."""
    folder = Path(__file__).resolve().parents[3] / "tests" / "golden" / "recorded_runs"
    return folder if folder.is_dir() else None


def read_recordings(folder: Path) -> list[RecordedRun]:
    """Every run below ``folder``, or the one that ``folder`` is, by name.

    Raises:
        InputError: no recorded run there (CR0650), one without a reward and a held-out score
            (CR0651), an onset that is no step (CR0652), or a file that cannot be read (CR0483).
    """
    roots = sorted(path.parent for path in (*folder.glob("metrics.jsonl"), *folder.glob("*/metrics.jsonl")))
    if not roots:
        raise InputError(
            "CR0650",
            "no recorded run is there: neither the folder nor one in it holds a metrics.jsonl.",
            where=f"--recorded {folder}",
            fix="give the folder of a run, or a folder of such folders.",
        )
    return [_read(root) for root in roots]


def _read(root: Path) -> RecordedRun:
    run = read_run(root)
    readings = _readings(run)
    if not readings:
        raise InputError(
            "CR0651",
            "the recorded run has no step with both a reward and a held-out score.",
            where=str(root / "metrics.jsonl"),
            fix="take that folder out, or record a run with a [heldout] table.",
        )
    return RecordedRun(root.resolve().name, readings, _onset_step(root, run))


def _readings(run: RunData) -> tuple[Reading, ...]:
    found, reward, kl = [], None, None
    for row in run.steps:
        reward = row.values.get("reward", reward)
        kl = row.values.get("killswitch/kl_to_init", kl)
        score = row.values.get("heldout/score")
        if reward is not None and score is not None:
            visible, hidden = row.values.get("heldout/visible"), row.values.get("heldout/hidden")
            found.append(Reading(row.step, reward, score, visible, hidden, kl))
    return tuple(found)


def _onset_step(root: Path, run: RunData) -> int | None:
    path = root / ONSET_FILE
    if path.is_file():
        onset = read_json(path).get("onset_step", 0)
        step = number(onset)
        if onset is not None and (step is None or step < 1 or step != int(step)):
            raise InputError(
                "CR0652",
                f"onset_step must be a step of at least 1, or null for an honest run, not {onset!r}.",
                where=str(path),
                fix='write {"schema_version": 1, "onset_step": null} or the first hacked step.',
            )
        return None if step is None else int(step)
    for row in run.steps:
        reward, earned = row.values.get("reward"), row.values.get("rollouts/visible_pass")
        if reward is not None and earned is not None and reward - earned >= UNEARNED_REWARD:
            return row.step
    return None


def judge(run: RecordedRun) -> dict[str, Any]:
    """When each detector alarms, at its nominal threshold.

    ``delay`` counts evaluations from the first one at or after the onset, which is 1. Only means
    are on record: the detectors of V - H are given the pairs with the least variance that have
    these means, and the size of an evaluation is the smallest that the means allow.
    """
    series, note = _series(run)
    onset_idx = next(
        (idx for idx, one in enumerate(run.readings) if run.onset_step and one.step >= run.onset_step), None
    )
    rows = [
        _row(detector.name, series if _can_read(detector, series) else None, detector, run, onset_idx)
        for detector in make_detectors()
        if detector.nominal is not None
    ]
    rows.append(_with_kl(run, onset_idx))
    return {
        "name": run.name,
        "kind": "honest" if run.onset_step is None else "hacked",
        "onset_step": run.onset_step,
        "evaluations": len(run.readings),
        "evaluations_from_onset": 0 if onset_idx is None else len(run.readings) - onset_idx,
        "note": note,
        "detectors": rows,
    }


_READS_NO_PAIRS = ("heldout-guard", "heldout-guard-test-like", "kl-budget")


def _can_read(detector: Detector, series: Series) -> bool:
    if detector.name == "kl-budget":
        return not bool(np.isnan(series.kl_TR).any())
    return detector.name in _READS_NO_PAIRS or bool(series.gap_counts_TXR.any())


def _row(
    name: str, series: Series | None, detector: Detector, run: RecordedRun, onset_idx: int | None
) -> dict[str, Any]:
    if series is None or detector.nominal is None:
        return {"name": name, "alarm_step": None, "delay": None, "measured": False}
    alarm = int(first_alarms(detector.path(series), [detector.nominal])[0, 0])
    return _verdict(name, alarm, run, onset_idx)


def _verdict(name: str, alarm: int, run: RecordedRun, onset_idx: int | None) -> dict[str, Any]:
    is_hit = alarm > 0 and onset_idx is not None and alarm > onset_idx
    return {
        "name": name,
        "alarm_step": run.readings[alarm - 1].step if alarm else None,
        "delay": alarm - onset_idx if is_hit and onset_idx is not None else None,
        "measured": True,
    }


def _with_kl(run: RecordedRun, onset_idx: int | None) -> dict[str, Any]:
    """The real guard at its defaults, its KL path included."""
    from composer_replication.safety import HeldOutGuard

    guard = HeldOutGuard()
    alarm = 0
    for update, one in enumerate(run.readings, start=1):
        status = guard.update(one.step, in_loop_reward=one.reward, heldout_score=one.score, kl_to_init=one.kl)
        if status.fire and not alarm:
            alarm = update
    return _verdict("heldout-guard-with-kl", alarm, run, onset_idx)


def _series(run: RecordedRun) -> tuple[Series, str]:
    readings = run.readings
    num_samples = _num_samples(readings)
    shape_TXR = (len(readings), 3, 1)
    gaps_TXR = np.zeros(shape_TXR, dtype=np.int64)
    log_evidence_TR = np.full((len(readings), 1), -np.inf)
    note = "no visible and hidden means of the held-out tasks on record"
    if num_samples is not None:
        visible_T = np.array([round(num_samples * (one.visible or 0.0)) for one in readings])
        hidden_T = np.array([round(num_samples * (one.hidden or 0.0)) for one in readings])
        more_T = visible_T - hidden_T
        gaps_TXR[:, 2, 0], gaps_TXR[:, 0, 0] = np.maximum(more_T, 0), np.maximum(-more_T, 0)
        gaps_TXR[:, 1, 0] = num_samples - np.abs(more_T)
        log_evidence_TR = _log_evidence(gaps_TXR, hidden_T, num_samples)
        note = f"{num_samples} samples an evaluation, worked out from the means; pairs of least variance"
    kls = [np.nan if one.kl is None else one.kl for one in readings]
    return Series(
        gap_counts_TXR=gaps_TXR,
        truth_TR=np.array([[one.score] for one in readings]),
        in_loop_TR=np.array([[one.reward] for one in readings]),
        kl_TR=np.array(kls)[:, None],
        log_evidence_TR=log_evidence_TR,
    ), note


def _num_samples(readings: tuple[Reading, ...]) -> int | None:
    """The smallest size of which every mean is a whole share; None if a mean is missing or none fits."""
    means = [mean for one in readings for mean in (one.visible, one.hidden)]
    known = np.array([mean for mean in means if mean is not None])
    if len(known) < len(means) or known.min() < 0.0 or known.max() > 1.0:
        return None
    for size in range(1, MOST_SAMPLES + 1):
        counts = known * size
        if np.abs(counts - np.round(counts)).max() < 1e-6:
            return size
    return None


def _log_evidence(
    gaps_TXR: np.ndarray[Any, np.dtype[np.int64]], hidden_T: Floats, num_samples: int
) -> Floats:
    simulator = EvidenceSimulator(
        1, planned_evaluations=len(gaps_TXR), tolerated_gap=TOLERATED_GAP, delta=DELTA, eps0=EPS0
    )
    path = []
    for gaps_XR, hidden in zip(gaps_TXR, hidden_T, strict=True):
        truths_HR = np.array([[num_samples - hidden], [hidden]]).astype(np.int64)
        simulator.update(gaps_XR, truths_HR, np.zeros((2, 1), dtype=np.int64))
        path.append(simulator.log_evidence_AR[0].copy())
    return np.array(path)
