"""Each rule on a series that can be worked out by hand; both of our guards against the ones that ship."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from composer_replication.report import bench_runs
from composer_replication.report.bench_runs import BOUND_G, Evaluation, EvidenceSimulator, Series
from composer_replication.report.guard_bench import (
    cusum_path,
    e_process_path,
    first_alarms,
    heldout_guard_path,
    likelihood_path,
    z_path,
)
from composer_replication.safety import EvidenceGuard, HeldOutGuard
from composer_replication.safety.betting import BETS

TOLERANCE = 1e-9


def series_of(*counts: tuple[int, int, int]) -> Series:
    """One run; each evaluation has so many samples with V - H of -1, 0 and 1."""
    none, nothing = np.zeros(1), np.zeros((2, 1), dtype=np.int64)
    rows = [Evaluation(np.array(row)[:, None], nothing, nothing, none, none) for row in counts]
    return Series(rows, np.zeros((len(counts), 1)))


def column(*values: float) -> np.ndarray:
    return np.array(values)[:, None]


def test_it_equals_the_guard_that_ships_in_every_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twelve runs at once, hacked in the middle, beyond the plan."""
    monkeypatch.setattr(bench_runs, "NUM_EVALUATIONS", 25)
    rng = np.random.default_rng(5)
    num_runs, num_tasks = 12, 10
    simulator = EvidenceSimulator(num_runs)
    guards = [EvidenceGuard(planned_evaluations=25, tolerated_gap=0.05) for _ in range(num_runs)]
    for step in range(1, 61):
        hidden_RN = rng.random((num_runs, num_tasks)) < (0.8 if step < 40 else 0.5)
        visible_RN = hidden_RN | (rng.random((num_runs, num_tasks)) < 0.1)
        visible_RN &= rng.random((num_runs, num_tasks)) > 0.05
        canary_RC = rng.random((num_runs, 4)) < 0.02
        gaps_RN = visible_RN.astype(int) - hidden_RN
        simulator.update(
            np.stack([(gaps_RN == value).sum(axis=1) for value in (-1, 0, 1)]),
            np.stack([(hidden_RN == value).sum(axis=1) for value in (0, 1)]),
            np.stack([(canary_RC == value).sum(axis=1) for value in (0, 1)]),
        )
        for run, guard in enumerate(guards):
            pairs = zip(visible_RN[run].astype(float), hidden_RN[run].astype(float), strict=True)
            status = guard.update(step, pairs, canary_RC[run].astype(float))
            own = [*simulator.log_streams_JR[:, run], simulator.log_evidence_R[run]]
            assert own == pytest.approx([*status.streams.values(), status.log_evidence], abs=TOLERANCE)
            assert BOUND_G[simulator.bound_R[run]] == status.lower_bound
            assert (own[-1] >= EvidenceSimulator.THRESHOLD) == (
                status.log_evidence >= -math.log(0.01 - 0.001)
            )
    assert len({guard.last_status.lower_bound for guard in guards if guard.last_status}) > 2


def test_cusum() -> None:
    assert cusum_path(column(1.0, -2.0, 3.0, -1.0))[:, 0].tolist() == [1.0, 0.0, 3.0, 2.0]


def test_z_test() -> None:
    # Mean 1/4, variance (1 - 4/16) / 3 = 1/4: z = (.25 - .05) x 2 / .5.
    assert z_path(series_of((0, 3, 1)))[:, 0] == pytest.approx([0.8])
    same = z_path(series_of((0, 4, 0), (0, 0, 4), (0, 0, 1)))[:, 0]
    assert same.tolist() == [-math.inf, math.inf, math.inf]


def test_plain_e_process() -> None:
    up, down = np.array(BETS) * 0.95 / 1.05, -np.array(BETS)
    path = e_process_path(series_of((0, 0, 1), (1, 0, 0)))
    assert path[:, 0] == pytest.approx([np.log(np.mean(1 + up)), np.log(np.mean((1 + up) * (1 + down)))])


def test_likelihood_ratio() -> None:
    # Chances (.02, .91, .07) before and (.02, .76, .22) after; V - H = -1 says nothing.
    gain, loss = math.log(0.22 / 0.07), math.log(0.76 / 0.91)
    path = likelihood_path(series_of((1, 0, 0), (0, 1, 2), (0, 30, 0), (0, 0, 1)), 0.05, 0.20)
    assert path[:, 0] == pytest.approx([0.0, 2 * gain + loss, 0.0, gain])


@given(
    st.integers(1, 6),
    st.integers(1, 4),
    st.sampled_from([0.0, 0.3, 0.5, 0.8]),
    st.sampled_from([0.05, 0.1, 0.35]),
    st.lists(st.tuples(st.integers(0, 8), st.integers(0, 8)), min_size=1, max_size=30),
)
def test_the_folding_is_the_real_guards(
    min_steps: int, patience: int, ema_alpha: float, max_gap: float, eighths: list[tuple[int, int]]
) -> None:
    rewards, scores = (np.array(column) / 8 for column in zip(*eighths, strict=True))
    guard = HeldOutGuard(
        min_steps=min_steps, decline_patience=patience, ema_alpha=ema_alpha, max_proxy_real_gap=max_gap
    )
    path = heldout_guard_path(guard, rewards[:, None], scores[:, None])
    alarm = int(first_alarms(path, float(np.nextafter(max_gap, np.inf)))[0])
    fired = [
        update
        for update, (reward, score) in enumerate(zip(rewards, scores, strict=True), start=1)
        if guard.update(update, in_loop_reward=reward, heldout_score=score).fire
    ]
    assert alarm == (fired[0] if fired else 0)
