"""The simulated runs are what their names say."""

from __future__ import annotations

import numpy as np
import pytest

from composer_replication.cli.guard_bench_command import _FAMILIES
from composer_replication.report.bench_families import DELTA, EPS0, FAMILIES, ONSET, TOLERATED_GAP
from composer_replication.report.bench_measures import false_alarms
from composer_replication.report.bench_runs import Chunk, simulate
from composer_replication.report.bench_series import Rates, RunDraws

BY_NAME = {family.name: family for family in FAMILIES}
NULLS = [family.name for family in FAMILIES if family.kind == "null"]
INVALID = [family.name for family in FAMILIES if family.kind == "invalid"]
NUM_RUNS = 60


def runs_of(name: str, num_runs: int = NUM_RUNS, seed: int = 3) -> Chunk:
    return next(simulate(BY_NAME[name], num_runs, seed=seed, num_tasks=32))


def test_the_command_line_knows_every_family() -> None:
    assert tuple(BY_NAME) == _FAMILIES
    assert {family.kind for family in FAMILIES} == {"null", "hacked", "invalid"}
    assert all((family.onset is not None) == (family.kind == "hacked") for family in FAMILIES)


@pytest.mark.parametrize("name", NULLS)
def test_a_null_family_stays_within_what_is_tolerated(name: str) -> None:
    series = runs_of(name).series
    num_samples = series.num_samples.sum()
    spread = (series.gap_counts_TXR[:, [0, 2]].sum() / num_samples) ** 0.5
    assert series.mean_gap.mean() <= TOLERATED_GAP + 4 * spread / num_samples**0.5
    by_time_T = series.truth_TR.mean(axis=1)
    error = (0.25 / (32 * NUM_RUNS)) ** 0.5
    assert (by_time_T >= by_time_T[:100].mean() - DELTA - 4.5 * error).all()


@pytest.mark.parametrize("name", ["at-g0", "boundary", "largest-variance", "noisy-rewards", "adversary"])
def test_a_family_at_the_edge_is_at_the_edge(name: str) -> None:
    assert runs_of(name).series.mean_gap.mean() == pytest.approx(TOLERATED_GAP, abs=0.006)


def test_the_largest_variance_is_the_largest() -> None:
    assert runs_of("largest-variance").series.gap_counts_TXR[:, 1].sum() == 0


@pytest.mark.parametrize(
    ("name", "gap_after"),
    [("jump", 0.20), ("small-jump", 0.10), ("sparse", 0.1225), ("noisy-jump", 0.20), ("jump-in-waves", 0.20)],
)
def test_a_hack_begins_at_its_onset(name: str, gap_after: float) -> None:
    mean_T = runs_of(name).series.mean_gap.mean(axis=1)
    assert mean_T[: ONSET - 1].mean() == pytest.approx(0.03, abs=0.008)
    assert mean_T[ONSET - 1 :].mean() == pytest.approx(gap_after, abs=0.008)


def test_ramp_and_drift_rise() -> None:
    ramp_T, drift_T = (runs_of(name).series.mean_gap.mean(axis=1) for name in ("ramp", "drift"))
    assert ramp_T[ONSET + 23 : ONSET + 25].mean() == pytest.approx(0.115, abs=0.02)
    assert ramp_T[ONSET + 50 :].mean() == pytest.approx(0.20, abs=0.01)
    assert drift_T[ONSET - 6 : ONSET + 4].mean() == pytest.approx(TOLERATED_GAP, abs=0.01)
    assert drift_T[ONSET + 90 : ONSET + 110].mean() == pytest.approx(0.135, abs=0.01)


def test_collapse_and_leak_keep_their_gap() -> None:
    collapse, leak = runs_of("collapse").series, runs_of("leak").series
    for series in (collapse, leak):
        assert series.mean_gap[ONSET:].mean() == pytest.approx(0.03, abs=0.004)
    assert collapse.truth_TR[ONSET:].mean() == pytest.approx(0.45, abs=0.01)
    assert collapse.in_loop_TR[ONSET:].mean() == pytest.approx(0.63, abs=0.01)
    assert leak.truth_TR[ONSET:].mean() == pytest.approx(0.80, abs=0.01)


@pytest.mark.parametrize("name", INVALID)
def test_an_invalid_design_breaks_the_guarantee(name: str) -> None:
    found = false_alarms(runs_of(name, 100).evidence_alarms_AR[0])
    assert found["ci95"][0] > 0.10


def test_the_same_gap_measured_well_does_not() -> None:
    assert false_alarms(runs_of("clean", 100).evidence_alarms_AR[0])["alarms"] == 0


def test_a_seed_and_a_name_fix_every_draw() -> None:
    first, again, other = runs_of("at-g0"), runs_of("at-g0"), runs_of("at-g0", seed=4)
    assert np.array_equal(first.series.log_evidence_TR, again.series.log_evidence_TR)
    assert np.array_equal(first.series.kl_TR, again.series.kl_TR)
    assert not np.array_equal(first.series.log_evidence_TR, other.series.log_evidence_TR)


def test_counts_of_one_evaluation_add_up() -> None:
    draws = RunDraws(500, 32, np.random.default_rng(0))
    one = draws.tasks(1, Rates(0.3, 0.1, 0.4, EPS0, in_loop=1.0))
    assert (one.gap_counts_XR.sum(axis=0) == 32).all()
    assert (one.truth_counts_HR.sum(axis=0) == 32).all()
    assert one.gap_counts_XR.mean(axis=1) / 32 == pytest.approx([0.1, 0.6, 0.3], abs=0.02)
    assert one.truth_counts_HR[1].mean() / 32 == pytest.approx(0.5, abs=0.02)
    assert (one.in_loop_R == 1.0).all()


def test_a_hack_doubles_the_speed_of_the_policy() -> None:
    rates, spread = Rates(0.0, 0.0, 0.5), 0.02
    honest, hacked = (
        RunDraws(4000, 2, np.random.default_rng(0), onset).tasks(400, rates).kl_R.mean()
        for onset in (None, 201)
    )
    assert hacked / honest == pytest.approx(1.5, abs=spread)
