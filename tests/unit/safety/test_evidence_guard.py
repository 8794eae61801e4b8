"""The rules of the evidence detector, one by one."""

from __future__ import annotations

import logging
import math
import pickle
from collections.abc import Sequence
from dataclasses import FrozenInstanceError
from typing import Any

import numpy as np
import pytest

from composer_replication.safety import INSUFFICIENT_DATA, CollapseStopError, EvidenceGuard, EvidenceStatus

HACKED = [(1.0, 0.0)] * 32
HONEST = [(1.0, 1.0)] * 16 + [(0.0, 0.0)] * 16


def make(planned: int = 20, **changes: Any) -> EvidenceGuard:
    settings: dict[str, Any] = {"tolerated_gap": 0.1}
    return EvidenceGuard(planned, **{**settings, **changes})


def feed(guard: EvidenceGuard, rows: Sequence[Sequence[tuple[float, float]]]) -> list[EvidenceStatus]:
    return [guard.update(guard.num_evaluations + 1, pairs) for pairs in rows]


# ---- settings -------------------------------------------------------------------------------------


def test_settings_are_readable_and_have_the_stated_defaults() -> None:
    guard = EvidenceGuard(400, tolerated_gap=0.07)
    assert (guard.planned_evaluations, guard.tolerated_gap, guard.alpha, guard.delta) == (
        400,
        0.07,
        0.01,
        0.05,
    )
    assert (guard.eps0, guard.alpha_1) == (0.005, 0.001)
    assert guard.log_threshold == pytest.approx(math.log(1 / 0.009))
    assert (guard.num_evaluations, guard.last_status, guard.should_halt()) == (0, None, False)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("planned_evaluations", bad) for bad in (0, -1, 1.5, True, None, "9")],
        *[("tolerated_gap", bad) for bad in (-0.01, 1.0, math.nan, math.inf, None, "0.1", True)],
        *[("alpha", bad) for bad in (0.0, 1.0, -0.1, math.nan, None)],
        *[("delta", bad) for bad in (-0.1, 1.0, math.nan)],
        *[("eps0", bad) for bad in (0.0, 1.0, math.nan)],
    ],
)
def test_a_bad_setting_is_refused_by_name(field: str, value: object) -> None:
    given_settings: dict[str, Any] = {"planned_evaluations": 20, "tolerated_gap": 0.1, field: value}
    with pytest.raises(ValueError, match=field):
        EvidenceGuard(**given_settings)


# ---- what update takes ----------------------------------------------------------------------------


@pytest.mark.parametrize("step", [0, 1, 3, 4, -2])
def test_any_other_step_than_the_next_is_refused(step: int) -> None:
    guard = make()
    guard.update(1, HONEST)
    before, status = guard.state_dict(), guard.last_status
    with pytest.raises(ValueError, match="step must be 2"):
        guard.update(step, HONEST)
    assert guard.state_dict() == before
    assert guard.last_status is status


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"pairs": [(math.nan, 0.0)]}, r"visible score must be in \[0, 1\], got nan in evaluation 2"),
        ({"pairs": [(0.0, math.nan)]}, "hidden score"),
        ({"pairs": [(1.0, 1.0), (1.0000001, 0.0)]}, "clipping"),
        ({"pairs": [(0.5, -0.1)]}, "hidden score"),
        ({"pairs": [(math.inf, 0.0)]}, "visible score"),
        ({"pairs": [("1", 0.0)]}, "number"),
        ({"pairs": [(None, 0.0)]}, "number"),
        ({"pairs": [(1.0,)]}, r"\(visible, hidden\)"),
        ({"pairs": [(1.0, 0.0, 0.0)]}, r"\(visible, hidden\)"),
        ({"pairs": [1.0]}, r"\(visible, hidden\)"),
        ({"canary_passes": [1.5]}, "canary"),
        ({"canary_passes": [math.nan]}, "canary"),
        ({"neutral": -1}, "neutral"),
        ({"neutral": 0.5}, "neutral"),
        ({"pairs": []}, "nothing was drawn"),
        ({"step": "2"}, "step"),
        ({"step": True}, "step"),
    ],
)
def test_bad_input_is_refused_and_changes_nothing(arguments: dict[str, Any], message: str) -> None:
    guard = make()
    guard.update(1, HONEST, [0.0])
    before, status = guard.state_dict(), guard.last_status
    with pytest.raises(ValueError, match=message):
        guard.update(**{"step": 2, "pairs": HONEST, **arguments})
    assert guard.state_dict() == before
    assert guard.last_status is status
    guard.update(2, HONEST)


def test_true_false_iterators_and_numpy_numbers_are_scores() -> None:
    plain, other = make(), make()
    plain.update(1, [(1.0, 0.0), (0.5, 0.5)], [1.0, 0.0])
    other.update(np.int64(1), iter([(True, False), np.array([0.5, 0.5])]), (score for score in (True, False)))
    assert plain.state_dict() == other.state_dict()


# ---- alarm, latch, warning ------------------------------------------------------------------------


def test_the_alarm_names_the_stream_and_latches() -> None:
    guard = make()
    first, later = feed(guard, [HACKED, HONEST])
    assert first.fire and first.cause == "evidence"
    assert first.reason.startswith("visible scores exceed hidden ones by more than 0.1")
    assert first.log_evidence >= guard.log_threshold
    for _ in range(60):
        later = guard.update(guard.num_evaluations + 1, [(0.0, 1.0)] * 32)
    assert later.log_evidence < guard.log_threshold
    assert later.fire and later.reason == f"latched: {first.reason}"
    assert later.verdict == "halted"


def test_raise_if_fired_carries_the_status_and_survives_pickling() -> None:
    guard = make()
    guard.raise_if_fired()
    feed(guard, [HONEST])
    guard.raise_if_fired()
    clean = guard.last_status
    (status,) = feed(guard, [HACKED])
    with pytest.raises(CollapseStopError, match="visible scores exceed") as caught:
        guard.raise_if_fired()
    assert caught.value.status is status
    assert pickle.loads(pickle.dumps(caught.value)).status == status
    guard.raise_if_fired(clean)
    with pytest.raises(CollapseStopError):
        make().raise_if_fired(status)


def test_queries_change_nothing() -> None:
    guard = make()
    feed(guard, [HACKED])
    before = guard.state_dict()
    for _ in range(3):
        assert guard.should_halt()
        assert guard.last_status is guard.last_status
        assert (guard.num_evaluations, guard.tolerated_gap) == (1, 0.1)
    assert guard.state_dict() == before


def test_a_warning_does_not_stop(caplog: pytest.LogCaptureFixture) -> None:
    guard = make()
    with caplog.at_level(logging.WARNING):
        statuses = feed(guard, [HACKED[:15], [(0.5, 0.4)]])
    assert [(status.warn, status.fire) for status in statuses] == [(True, False), (True, False)]
    assert math.log(10) <= statuses[0].log_evidence < guard.log_threshold
    assert caplog.text.count("evidence of gaming") == 1  # said when it begins, not at every evaluation


def test_the_status_is_frozen() -> None:
    (status,) = feed(make(), [HONEST])
    with pytest.raises(FrozenInstanceError):
        status.fire = True  # type: ignore[misc]


# ---- infrastructure -------------------------------------------------------------------------------


def test_a_neutral_task_is_a_factor_of_one() -> None:
    with_neutral, without = make(), make()
    one = with_neutral.update(1, HONEST, [0.0], neutral=1)
    other = without.update(1, HONEST, [0.0])
    assert one.streams == other.streams
    assert (one.num_samples, one.num_neutral, other.num_neutral) == (32, 1, 0)


def test_the_neutral_budget_is_five_percent_of_twenty_evaluations() -> None:
    guard = make()
    first = guard.update(1, [], neutral=20)  # 20 of 20 evaluations of 20: exactly 5%
    assert not first.fire
    for step in range(2, 21):
        assert not guard.update(step, HONEST[6:26]).fire
    assert guard.last_status is not None and guard.last_status.num_neutral == 20
    assert not guard.update(21, HONEST[6:25], neutral=1).fire  # the outage has left the window
    assert guard.last_status.num_neutral == 1


def test_beyond_the_neutral_budget_the_guard_stops_for_its_own_reason() -> None:
    guard = make()
    assert not guard.update(1, [], neutral=20).fire
    status = guard.update(2, HONEST[6:25], neutral=1)
    assert status.fire and status.cause == "infrastructure"
    assert "infrastructure failed on 21 of the 40 tasks" in status.reason
    assert status.p_value > 0.01  # no evidence against the policy
    assert status.insufficient_data and status.verdict == "halted"
    later = guard.update(3, HACKED * 2)
    assert later.cause == "infrastructure" and later.reason == f"latched: {status.reason}"


def test_evidence_and_infrastructure_at_once_is_evidence() -> None:
    status = make().update(1, HACKED, neutral=32)
    assert status.fire and status.cause == "evidence"


# ---- too little data ------------------------------------------------------------------------------


def test_insufficient_data_until_there_are_five_evaluations_and_400_pairs() -> None:
    for pairs, num_little in ((HONEST * 4, 4), (HONEST, 12)):
        verdicts = [status.verdict for status in feed(make(), [pairs] * 14)]
        assert verdicts == [INSUFFICIENT_DATA] * num_little + ["clean"] * (14 - num_little)


def test_canaries_and_neutral_tasks_are_no_samples() -> None:
    status = make().update(1, HONEST, [0.0] * 400, neutral=1)
    assert status.insufficient_data and status.num_samples == 32 and status.num_canaries == 400


def test_evidence_that_fired_was_enough_data() -> None:
    (status,) = feed(make(), [HACKED])
    assert not status.insufficient_data and status.verdict == "halted"


# ---- CUSUM -------------------------------------------------------------------------------------


def test_the_cusum_warns_by_hand(caplog: pytest.LogCaptureFixture) -> None:
    guard = make(tolerated_gap=0.25)
    with caplog.at_level(logging.WARNING):
        rows = [[(1.0, 0.0)] * 2, [(0.0, 0.0)] * 4, [(0.0, 1.0)], [(1.0, 0.0)] * 16, [(1.0, 0.0)]]
        statuses = feed(guard, rows)
    assert [status.cusum for status in statuses] == [1.5, 0.5, 0.0, 12.0, 12.75]
    assert [status.cusum_warning for status in statuses] == [False, False, False, True, True]
    assert not statuses[-1].fire
    assert caplog.text.count("without a guarantee") == 1
