"""The rules of the run-level guard, one by one."""

from __future__ import annotations

import math
import pickle
import sys
from collections.abc import Sequence
from dataclasses import FrozenInstanceError
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from composer_replication.safety import CollapseStopError, HeldOutGuard, TripwireStatus, kl_token_trust_filter

LARGEST = sys.float_info.max


def make(**changes: Any) -> HeldOutGuard:
    """Test-like settings whose gap never fires unless asked for."""
    settings: dict[str, Any] = {
        "min_steps": 3,
        "decline_patience": 3,
        "ema_alpha": 0.5,
        "kl_hard_stop": 0.08,
        "max_proxy_real_gap": 100.0,
    }
    return HeldOutGuard(**{**settings, **changes})


def feed(guard: HeldOutGuard, rows: Sequence[tuple[float, float, float | None]]) -> list[TripwireStatus]:
    return [
        guard.update(round_idx, in_loop_reward=proxy, heldout_score=truth, kl_to_init=kl)
        for round_idx, (proxy, truth, kl) in enumerate(rows)
    ]


def parting(num: int) -> list[tuple[float, float, float | None]]:
    """The in-loop reward rises and the held-out score falls at every update."""
    return [(0.1 + 0.01 * step, 0.9 - 0.01 * step, None) for step in range(num)]


def test_settings_are_readable_and_defaults_exist() -> None:
    guard = HeldOutGuard(
        min_steps=4, decline_patience=5, ema_alpha=0.25, kl_hard_stop=0.5, max_proxy_real_gap=2
    )
    assert (guard.min_steps, guard.decline_patience, guard.ema_alpha) == (4, 5, 0.25)
    assert (guard.kl_hard_stop, guard.max_proxy_real_gap) == (0.5, 2.0)
    assert HeldOutGuard().kl_hard_stop == 0.08
    with pytest.raises(TypeError):
        HeldOutGuard(3)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("ema_alpha", bad) for bad in (1.0, -0.01, 2, math.nan, math.inf, True, "0.5", None)],
        *[("kl_hard_stop", bad) for bad in (0.0, -1, math.nan, math.inf, True, "1", None)],
        *[("max_proxy_real_gap", bad) for bad in (0, -0.1, math.nan, math.inf, False, None)],
        *[("decline_patience", bad) for bad in (0, -3, 2.0, True, "3", None)],
        *[("min_steps", bad) for bad in (0, -1, 1.5, True, None, np.array([1, 2]))],
    ],
)
def test_a_bad_setting_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=field):
        make(**{field: value})


def test_an_ema_alpha_of_zero_keeps_no_past() -> None:
    guard = make(ema_alpha=0)
    assert feed(guard, [(0.2, 0.2, None), (0.9, 0.4, None)])[-1].in_loop_ema == 0.9


def test_the_gap_of_the_worked_example() -> None:
    guard = make()
    assert guard.proxy_real_gap() == 0.0
    statuses = feed(guard, [(0.20, 0.20, None), (0.60, 0.30, None)])
    assert statuses[0].proxy_real_gap == 0.0
    assert guard.proxy_real_gap() == pytest.approx(0.15)
    assert statuses[1].proxy_real_gap == guard.proxy_real_gap()


def test_status_is_frozen_and_complete() -> None:
    guard = make()
    assert guard.last_status is None
    status = guard.update(70, in_loop_reward=0.25, heldout_score=1, kl_to_init=0.5)
    assert status == TripwireStatus(
        fire=False,
        reason="",
        round_idx=70,
        num_updates=1,
        in_loop_ema=0.25,
        heldout_ema=1.0,
        kl_ema=0.5,
        proxy_real_gap=0.0,
        decline_streak=0,
    )
    assert guard.last_status is status
    assert status.halt is False
    with pytest.raises(FrozenInstanceError):
        setattr(status, "fire", True)  # noqa: B010  (a plain assignment would not pass the type check)


def test_the_update_that_reaches_min_steps_may_fire_whatever_the_labels() -> None:
    guard = make(min_steps=3)
    fires = [
        guard.update(label, in_loop_reward=0.1, heldout_score=0.1, kl_to_init=9.0).fire
        for label in (900, 7, -5, 7)
    ]
    assert fires == [False, False, True, True]


def test_a_streak_fires_at_the_patience_and_not_before() -> None:
    statuses = feed(make(), parting(5))
    assert [status.decline_streak for status in statuses] == [0, 1, 2, 3, 4]
    assert [status.fire for status in statuses] == [False, False, False, True, True]
    assert "held-out" in statuses[3].reason
    assert "consecutive" in statuses[3].reason
    assert "kl_to_init" not in statuses[3].reason
    assert "Hacking Gap" not in statuses[3].reason


@pytest.mark.parametrize("clean", [(0.9, 0.99, None), (0.0, 0.0, None), (0.0, 0.99, None)])
def test_one_clean_update_resets_the_streak(clean: tuple[float, float, float | None]) -> None:
    guard = make()
    statuses = feed(guard, [*parting(3), clean])
    assert [status.decline_streak for status in statuses] == [0, 1, 2, 0]
    assert not guard.should_halt()


def test_the_streak_counts_during_the_warm_up() -> None:
    statuses = feed(make(min_steps=6), parting(6))
    assert [status.fire for status in statuses] == [False] * 5 + [True]
    assert statuses[-1].decline_streak == 5


def test_the_first_update_is_no_decline_even_below_zero() -> None:
    assert feed(make(decline_patience=1, min_steps=1), [(5.0, -5.0, None)])[0].decline_streak == 0


def test_rounding_is_no_decline() -> None:
    guard = make(ema_alpha=0.99, decline_patience=2)
    statuses = feed(guard, [(0.1 + 0.001 * step, 0.3, None) for step in range(300)])
    assert {status.decline_streak for status in statuses} == {0}


def test_the_kl_path_names_itself_and_needs_a_kl() -> None:
    fired = feed(make(), [(0.5, 0.5, 0.2)] * 3)[-1]
    assert fired.fire
    assert "kl_to_init" in fired.reason
    assert "hard stop" in fired.reason
    boundary = feed(make(kl_hard_stop=0.25), [(0.5, 0.5, 0.25)] * 5)
    assert not any(status.fire for status in boundary)
    inert = feed(make(kl_hard_stop=1e-9), [(0.5, 0.5, None)] * 5)
    assert not any(status.fire for status in inert)
    assert inert[-1].kl_ema is None


def test_an_update_without_a_kl_leaves_its_average() -> None:
    statuses = feed(make(), [(0.5, 0.5, 0.04), (0.5, 0.5, None), (0.5, 0.5, 0.02)])
    assert [status.kl_ema for status in statuses] == [0.04, 0.04, pytest.approx(0.03)]


def test_the_gap_fires_while_the_truth_still_rises() -> None:
    guard = make(max_proxy_real_gap=0.1)
    statuses = feed(guard, [(0.1, 0.1, None), (0.3, 0.12, None), (0.6, 0.14, None)])
    assert statuses[-1].heldout_ema > statuses[0].heldout_ema
    assert [status.fire for status in statuses] == [False, False, True]
    assert "Hacking Gap" in statuses[-1].reason
    exact = feed(make(ema_alpha=0, max_proxy_real_gap=0.25), [(0.5, 0.5, None)] * 2 + [(0.75, 0.5, None)] * 2)
    assert not any(status.fire for status in exact)


def test_several_paths_at_once_are_all_named_in_order() -> None:
    guard = make(max_proxy_real_gap=1e-6, min_steps=4)
    reason = feed(guard, [(proxy, truth, 1.0) for proxy, truth, _ in parting(4)])[-1].reason
    assert reason.index("kl_to_init") < reason.index("consecutive") < reason.index("Hacking Gap")


def test_a_fired_guard_stays_fired_and_keeps_its_first_cause() -> None:
    guard = make()
    first = feed(guard, [(0.5, 0.5, 0.2)] * 3)[-1]
    later = [guard.update(9, in_loop_reward=0.5, heldout_score=1.0, kl_to_init=0.0) for _ in range(20)]
    assert later[-1].kl_ema == pytest.approx(0.0, abs=1e-6)
    assert all(status.fire and status.halt for status in later)
    assert {status.reason for status in later} == {f"latched: {first.reason}"}
    assert guard.should_halt()


def test_raise_if_fired_carries_the_very_status() -> None:
    guard = make()
    guard.raise_if_fired()
    calm = guard.update(0, in_loop_reward=0.5, heldout_score=0.5)
    guard.raise_if_fired()
    fired = feed(guard, [(0.5, 0.5, 0.9)] * 3)[-1]
    with pytest.raises(CollapseStopError, match="hard stop") as caught:
        guard.raise_if_fired()
    assert caught.value.status is fired
    with pytest.raises(CollapseStopError) as caught:
        make().raise_if_fired(fired)
    assert caught.value.status is fired
    guard.raise_if_fired(calm)


def test_the_stop_survives_pickling_with_its_status() -> None:
    guard = make()
    feed(guard, [(0.5, 0.5, 0.9)] * 3)
    with pytest.raises(CollapseStopError) as caught:
        guard.raise_if_fired()
    copy = pickle.loads(pickle.dumps(caught.value))
    assert type(copy) is CollapseStopError
    assert copy.status == guard.last_status
    assert str(copy) == str(caught.value)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, True, "0.5", [0.5], 1 + 0j, 10**400])
@pytest.mark.parametrize("name", ["in_loop_reward", "heldout_score", "kl_to_init"])
def test_bad_input_is_refused_by_name_and_round_and_changes_nothing(name: str, bad: Any) -> None:
    guard = make()
    feed(guard, parting(2))
    before, status = guard.state_dict(), guard.last_status
    arguments: dict[str, Any] = {"in_loop_reward": 0.5, "heldout_score": 0.5, "kl_to_init": 0.01, name: bad}
    with pytest.raises(ValueError, match=rf"(?s){name}.*round 41"):
        guard.update(41, **arguments)
    assert guard.state_dict() == before
    assert guard.last_status is status


@pytest.mark.parametrize("name", ["in_loop_reward", "heldout_score"])
def test_a_missing_score_is_refused(name: str) -> None:
    arguments: dict[str, Any] = {"in_loop_reward": 0.5, "heldout_score": 0.5, name: None}
    with pytest.raises(ValueError, match=name):
        make().update(0, **arguments)


@pytest.mark.parametrize("label", [1.0, "1", None, True, np.array([1, 2])])
def test_a_label_that_is_no_integer_is_refused(label: Any) -> None:
    with pytest.raises(ValueError, match="round_idx"):
        make().update(label, in_loop_reward=0.5, heldout_score=0.5)


def test_other_number_types_are_welcome() -> None:
    numbers: dict[str, Any] = {
        "round_idx": np.int64(3),
        "in_loop_reward": np.float32(0.5),
        "heldout_score": Fraction(1, 4),
        "kl_to_init": np.float64(0.01),
    }
    status = make().update(**numbers)
    assert (status.round_idx, status.in_loop_ema, status.heldout_ema) == (3, 0.5, 0.25)
    assert type(status.round_idx) is int
    assert type(status.in_loop_ema) is float


@pytest.mark.no_cover
@given(
    rows=st.lists(st.tuples(*[st.floats(allow_nan=False, allow_infinity=False)] * 3), min_size=1, max_size=8)
)
def test_numbers_stay_finite_for_any_finite_input(rows: list[tuple[float, float, float | None]]) -> None:
    for status in feed(make(), rows):
        numbers = (status.in_loop_ema, status.heldout_ema, status.kl_ema, status.proxy_real_gap)
        assert all(number is not None and math.isfinite(number) for number in numbers)


@pytest.mark.parametrize(
    ("first", "second", "gap"),
    [
        ((-LARGEST, LARGEST), (LARGEST, -LARGEST), LARGEST),
        ((LARGEST, -LARGEST), (-LARGEST, LARGEST), -LARGEST),
        ((-LARGEST, -LARGEST), (LARGEST, LARGEST), 0.0),
        ((0.0, 0.0), (LARGEST, -LARGEST), LARGEST),
    ],
)
def test_the_gap_of_the_largest_floats_is_a_number(
    first: tuple[float, float], second: tuple[float, float], gap: float
) -> None:
    assert feed(make(ema_alpha=0), [(*first, None), (*second, None)])[-1].proxy_real_gap == gap


def test_calibration_only_tightens() -> None:
    guard = make()
    assert guard.calibrate_kl_threshold([0.01, 0.01]) == guard.kl_hard_stop == pytest.approx(0.03)
    assert guard.calibrate_kl_threshold(iter([0.5, 0.7])) == pytest.approx(0.03)
    assert guard.calibrate_kl_threshold([0.01], factor=0.5) == pytest.approx(0.005)
    assert guard.calibrate_kl_threshold([1e308, 1e308]) == pytest.approx(0.005)


@pytest.mark.parametrize("baseline", [[0.0], [0.0, 0.0, -0.0], [5e-324]])
def test_calibration_never_ends_at_zero(baseline: list[float]) -> None:
    guard = make()
    assert guard.calibrate_kl_threshold(baseline, factor=0.1) == 0.08


@pytest.mark.parametrize(
    ("baseline", "factor", "words"),
    [
        ([], 3.0, "non-empty"),
        ([0.1], 0.0, "factor must be > 0"),
        ([0.1], -1.0, "factor must be > 0"),
        ([0.1], math.nan, "factor must be > 0"),
        ([0.1], math.inf, "factor must be > 0"),
        ([0.1], True, "factor"),
        ([0.1, -0.1], 3.0, "non-negative"),
        ([math.nan], 3.0, "baseline_kls"),
        ([True], 3.0, "baseline_kls"),
        (["0.1"], 3.0, "baseline_kls"),
    ],
)
def test_a_bad_calibration_is_refused_and_changes_nothing(
    baseline: list[Any], factor: Any, words: str
) -> None:
    guard = make()
    with pytest.raises(ValueError, match=words):
        guard.calibrate_kl_threshold(baseline, factor)
    assert guard.kl_hard_stop == 0.08


def test_the_token_filter_masks_strictly_above_its_threshold() -> None:
    assert kl_token_trust_filter(0.0800001) is True
    assert kl_token_trust_filter(0.08) is False
    assert kl_token_trust_filter(0.0) is False
    assert kl_token_trust_filter(0.3, threshold=0.5) is False
    assert kl_token_trust_filter(1e-9, threshold=0.0) is True
    assert kl_token_trust_filter(math.inf) is True


@pytest.mark.parametrize(
    ("token_kl", "threshold", "name"),
    [
        (math.nan, 0.08, "token_kl"),
        ("1", 0.08, "token_kl"),
        (0.1, -0.1, "threshold"),
        (0.1, math.nan, "threshold"),
        (0.1, math.inf, "threshold"),
    ],
)
def test_the_token_filter_refuses_bad_input(token_kl: Any, threshold: float, name: str) -> None:
    with pytest.raises(ValueError, match=name):
        kl_token_trust_filter(token_kl, threshold)
