"""The simulated runs are what their names say."""

from __future__ import annotations

import numpy as np
import pytest

from composer_replication.report.bench_runs import DELTA, FAMILIES, ONSET, TOLERATED_GAP, Series, simulate

BY_NAME = {family.name: family for family in FAMILIES}
NULLS = [family.name for family in FAMILIES if family.onset is None]
NUM_RUNS = 60


def runs_of(name: str, num_runs: int = NUM_RUNS, seed: int = 3) -> Series:
    return next(simulate(BY_NAME[name], num_runs, seed, 32))


@pytest.mark.parametrize("name", NULLS)
def test_a_null_family_stays_within_what_is_tolerated(name: str) -> None:
    series = runs_of(name)
    num_samples = series.num_samples_TR.sum()
    spread = (series.gap_counts_TXR[:, [0, 2]].sum() / num_samples) ** 0.5
    assert series.mean_gap_TR.mean() <= TOLERATED_GAP + 4 * spread / num_samples**0.5
    by_time_T = series.truth_TR.mean(axis=1)
    error = (0.25 / (32 * NUM_RUNS)) ** 0.5
    assert (by_time_T >= by_time_T[:100].mean() - DELTA - 4.5 * error).all()
    if name in {"at-g0", "boundary", "largest-variance", "noisy-rewards", "adversary"}:
        assert series.mean_gap_TR.mean() == pytest.approx(TOLERATED_GAP, abs=0.006)


@pytest.mark.parametrize(
    ("name", "gap_after", "truth_after"),
    [
        ("jump", 0.20, 0.5),
        ("small-jump", 0.10, 0.5),
        ("large-jump", 0.60, 0.2),
        ("collapse", 0.03, 0.45),
        ("leak", 0.03, 0.8),
    ],
)
def test_a_hack_begins_at_its_onset(name: str, gap_after: float, truth_after: float) -> None:
    series = runs_of(name)
    mean_T = series.mean_gap_TR.mean(axis=1)
    assert mean_T[: ONSET - 1].mean() == pytest.approx(0.03, abs=0.008)
    assert mean_T[ONSET - 1 :].mean() == pytest.approx(gap_after, abs=0.008)
    assert series.truth_TR[ONSET:].mean() == pytest.approx(truth_after, abs=0.01)


def test_a_seed_and_a_name_fix_every_draw() -> None:
    first, again, other = runs_of("at-g0"), runs_of("at-g0"), runs_of("at-g0", seed=4)
    assert np.array_equal(first.log_evidence_TR, again.log_evidence_TR)
    assert np.array_equal(first.kl_TR, again.kl_TR)
    assert not np.array_equal(first.log_evidence_TR, other.log_evidence_TR)
