"""Properties of the run-level guard over whole runs, against exact arithmetic that shares no code with it.

The oracle works with fractions and the closed form of the average. Scores are sixteenths
and ``ema_alpha`` a quarter or a half, so that floats are exact too and a boundary is one.
"""

from __future__ import annotations

import json
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as tried
from hypothesis import strategies as st

from composer_replication.safety import HeldOutGuard, TripwireStatus

pytestmark = pytest.mark.no_cover  # other tests reach all that these do, and traced they take thrice as long

Row = tuple[float, float, float | None]

SIXTEENTHS = st.integers(0, 16).map(lambda number: number / 16)
ROWS = st.lists(st.tuples(SIXTEENTHS, SIXTEENTHS, st.none() | SIXTEENTHS), min_size=1, max_size=12)
SETTINGS = st.fixed_dictionaries(
    {
        "min_steps": st.integers(1, 8),
        "decline_patience": st.integers(1, 4),
        "ema_alpha": st.sampled_from([0.0, 0.25, 0.5, 0.75]),
        "kl_hard_stop": st.integers(1, 16).map(lambda number: number / 16),
        "max_proxy_real_gap": st.integers(1, 16).map(lambda number: number / 16),
    }
)


def step(guard: HeldOutGuard, label: int, row: Row) -> TripwireStatus:
    return guard.update(label, in_loop_reward=row[0], heldout_score=row[1], kl_to_init=row[2])


def average(values: list[float], ema_alpha: float) -> Fraction:
    """``a^n x_0 + (1 - a) sum_i a^(n - i) x_i`` for the last of ``x_0 ... x_n``."""
    alpha, last = Fraction(ema_alpha), len(values) - 1
    return alpha**last * Fraction(values[0]) + (1 - alpha) * sum(
        alpha ** (last - place) * Fraction(value) for place, value in enumerate(values) if place
    )


def causes(rows: list[Row], settings: dict[str, Any]) -> set[str]:
    """What fires at the last of these rows, latch and warm-up aside."""
    averages = [
        [
            average([row[column] or 0.0 for row in rows[: end + 1]], settings["ema_alpha"])
            for end in range(len(rows))
        ]
        for column in (0, 1)
    ]
    streak = 0
    for before, now in zip(range(len(rows)), range(1, len(rows)), strict=False):
        declines = averages[1][now] < averages[1][before] and averages[0][now] > averages[0][before]
        streak = streak + 1 if declines else 0
    gap = (averages[0][-1] - averages[0][0]) - (averages[1][-1] - averages[1][0])
    kls = [row[2] for row in rows if row[2] is not None]
    found = set()
    if kls and average(kls, settings["ema_alpha"]) > Fraction(settings["kl_hard_stop"]):
        found.add("kl_to_init")
    if streak >= settings["decline_patience"]:
        found.add("consecutive")
    if gap > Fraction(settings["max_proxy_real_gap"]):
        found.add("Hacking Gap")
    return found


def named(reason: str) -> set[str]:
    return {word for word in ("kl_to_init", "consecutive", "Hacking Gap") if word in reason}


@given(rows=ROWS, settings=SETTINGS)
def test_every_verdict_is_that_of_exact_arithmetic(rows: list[Row], settings: dict[str, Any]) -> None:
    guard = HeldOutGuard(**settings)
    first: set[str] = set()
    for number, row in enumerate(rows, start=1):
        status = step(guard, 10 * number, row)
        now = causes(rows[:number], settings) if number >= settings["min_steps"] else set()
        is_latched = bool(first)
        first = first or now
        assert status.fire == status.halt == guard.should_halt() == bool(first)
        assert named(status.reason) == first
        assert status.reason.startswith("latched:") == is_latched
        assert status.reason.count("latched:") == int(is_latched)
        assert (status.round_idx, status.num_updates) == (10 * number, number)


@tried(max_examples=30)
@given(
    rows=st.lists(
        st.tuples(*[st.floats(-1e6, 1e6)] * 2, st.none() | st.floats(0, 1e6)), min_size=2, max_size=30
    ),
    ema_alpha=st.floats(0.0, 0.99),
)
def test_averages_and_gap_agree_with_pandas_at_every_update(rows: list[Row], ema_alpha: float) -> None:
    import pandas as pd  # here: it takes longer to import than most tests of this folder take

    guard = HeldOutGuard(ema_alpha=ema_alpha, min_steps=10**6)
    statuses = [step(guard, number, row) for number, row in enumerate(rows)]
    frame = pd.DataFrame(rows, columns=["in_loop", "heldout", "kl"], dtype=float)
    smooth = frame[["in_loop", "heldout"]].ewm(alpha=1 - ema_alpha, adjust=False).mean()
    kl = frame["kl"].dropna().ewm(alpha=1 - ema_alpha, adjust=False).mean().reindex(frame.index).ffill()
    gap = (smooth["in_loop"] - smooth["in_loop"].iloc[0]) - (smooth["heldout"] - smooth["heldout"].iloc[0])
    ours = pd.DataFrame(
        [[s.in_loop_ema, s.heldout_ema, s.kl_ema, s.proxy_real_gap] for s in statuses], dtype=float
    )
    theirs = pd.concat([smooth, kl, gap], axis=1)
    np.testing.assert_allclose(ours.to_numpy(), theirs.to_numpy(), rtol=1e-9, atol=1e-6)


@tried(max_examples=40)
@given(
    rows=ROWS,
    settings=SETTINGS,
    baselines=st.dictionaries(st.integers(0, 11), st.lists(SIXTEENTHS, min_size=1, max_size=3), max_size=4),
)
def test_restored_at_every_cut_a_calibrated_run_goes_on_as_if_uninterrupted(
    rows: list[Row], settings: dict[str, Any], baselines: dict[int, list[float]]
) -> None:
    def go_on(guard: HeldOutGuard, start: int) -> list[tuple[TripwireStatus, str]]:
        series = []
        for number in range(start, len(rows)):
            if number in baselines:
                guard.calibrate_kl_threshold(baselines[number])
            series.append(
                (step(guard, number, rows[number]), json.dumps(guard.state_dict(), allow_nan=False))
            )
        return series

    whole = go_on(HeldOutGuard(**settings), 0)
    for cut in range(1, len(rows) + 1):
        restored = HeldOutGuard(min_steps=99, ema_alpha=0.99)
        restored.load_state_dict(json.loads(whole[cut - 1][1]))
        assert restored.last_status == whole[cut - 1][0]
        assert go_on(restored, cut) == whole[cut:]
