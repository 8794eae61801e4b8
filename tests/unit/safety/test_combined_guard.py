"""Both guards behind one hook: either halts, one state, no half updates."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from composer_replication.interfaces import Guard, Stateful
from composer_replication.records import HeldoutReading
from composer_replication.safety import (
    INSUFFICIENT_DATA,
    CollapseStopError,
    CombinedGuard,
    CombinedStatus,
    EvidenceGuard,
    HeldOutGuard,
)

UNIT = st.floats(0.0, 1.0)
READINGS = st.tuples(UNIT, st.lists(st.tuples(UNIT, UNIT), min_size=1, max_size=4), st.none() | UNIT)
EVENTS = st.lists(READINGS, min_size=1, max_size=7)
HACKED = ((1.0, 0.0),) * 32
HONEST = ((1.0, 1.0), (0.0, 0.0)) * 16


def make(**changes: Any) -> CombinedGuard:
    heldout: dict[str, Any] = {"min_steps": 2, "ema_alpha": 0.5, "max_proxy_real_gap": 0.3}
    evidence: dict[str, Any] = {"tolerated_gap": 0.1}
    heldout |= {name: value for name, value in changes.items() if name in heldout}
    evidence |= {name: value for name, value in changes.items() if name not in heldout}
    return CombinedGuard(HeldOutGuard(**heldout), EvidenceGuard(10, **evidence))


def reading(
    idx: int, pairs: Any = HONEST, *, score: float = 0.5, canaries: Any = (), failures: int = 0
) -> HeldoutReading:
    return HeldoutReading(idx, score, tuple(pairs), tuple(canaries), "split", 0.1, failures)


def fold(
    guard: CombinedGuard, pairs: Any = HONEST, *, reward: float = 0.5, score: float = 0.5
) -> CombinedStatus:
    idx = guard.evidence.num_evaluations + 1
    return guard.update_from_reading(100 * idx, reading(idx, pairs, score=score), in_loop_reward=reward)


def test_it_is_a_guard_of_the_trainer() -> None:
    guard: Guard = make()
    assert callable(guard.update_from_reading)
    assert isinstance(guard, Stateful)
    assert not hasattr(HeldOutGuard(), "update_from_reading")


def test_each_guard_gets_its_part_of_a_reading() -> None:
    guard, heldout, evidence = (
        make(),
        HeldOutGuard(ema_alpha=0.5, min_steps=2),
        EvidenceGuard(10, tolerated_gap=0.1),
    )
    status = guard.update_from_reading(
        700,
        reading(1, HONEST, score=0.25, canaries=[0.0] * 4, failures=1),
        in_loop_reward=0.75,
        kl_to_init=0.01,
    )
    other = heldout.update(700, in_loop_reward=0.75, heldout_score=0.25, kl_to_init=0.01)
    assert guard.heldout.last_status == other
    alone = evidence.update(1, HONEST, [0.0] * 4, neutral=1)
    assert status.evidence.streams == alone.streams
    assert (status.evidence.num_neutral, status.evidence.num_canaries, status.evidence.step) == (1, 4, 1)
    assert (status.round_idx, status.num_updates, status.in_loop_ema, status.heldout_ema) == (
        700,
        1,
        0.75,
        0.25,
    )
    assert (status.kl_ema, status.proxy_real_gap, status.decline_streak) == (0.01, 0.0, 0)
    assert status.evidence_figures == status.evidence.figures
    assert status.evidence_figures["gap"] == status.evidence.gap_log_evidence
    assert guard.last_status is status


def test_the_evidence_halts_alone() -> None:
    guard = make()
    status = fold(guard, HACKED)
    assert status.fire and status.halt and status.verdict == "halted"
    assert not guard.heldout.should_halt()
    assert status.reason.startswith("visible scores exceed")
    assert guard.should_halt()
    with pytest.raises(CollapseStopError, match="visible scores exceed") as caught:
        guard.raise_if_fired()
    assert caught.value.status is status


def test_the_smoothed_rules_halt_alone() -> None:
    guard = make()
    fold(guard)
    guard.raise_if_fired()
    status = fold(guard, reward=1.0, score=0.1)
    assert status.fire and not status.evidence.fire
    assert "Hacking Gap" in status.reason
    with pytest.raises(CollapseStopError, match="Hacking Gap"):
        guard.raise_if_fired(status)


def test_the_reasons_of_both_are_kept_the_first_one_first() -> None:
    guard = make()
    fold(guard)
    first = fold(guard, reward=1.0, score=0.1)
    later = fold(guard, HACKED * 2, reward=1.0, score=0.1)
    assert later.reason == f"latched: {first.reason}; {later.evidence.reason}"
    assert fold(guard).reason == later.reason  # the prefix never stacks
    guard = make()
    fold(guard)
    both = fold(guard, HACKED * 2, reward=1.0, score=0.1)
    assert guard.heldout.last_status is not None
    assert both.reason == f"{guard.heldout.last_status.reason}; {both.evidence.reason}"


def test_too_little_for_either_is_insufficient_data() -> None:
    for min_steps, enough in ((7, 7), (2, 5)):
        guard = make(min_steps=min_steps)
        verdicts = [fold(guard, HONEST * 4).verdict for _ in range(8)]
        assert verdicts == [INSUFFICIENT_DATA] * (enough - 1) + ["clean"] * (9 - enough)


def test_a_bare_score_is_refused_because_the_evidence_would_see_nothing() -> None:
    guard = make()
    with pytest.raises(ValueError, match=r"round 7 .* HeldoutReading"):
        guard.update(7, in_loop_reward=0.5, heldout_score=0.5)
    assert guard.state_dict() == make().state_dict()


@pytest.mark.parametrize(
    ("bad", "reward"),
    [
        (reading(3), 0.5),
        (reading(2, [(1.5, 0.0)]), 0.5),
        (reading(2, score=math.nan), 0.5),
        (reading(2), math.inf),
        (reading(2, failures=-1), 0.5),
    ],
)
def test_a_refused_reading_changes_neither_guard(bad: HeldoutReading, reward: float) -> None:
    guard = make()
    status = fold(guard)
    before, said = guard.state_dict(), guard.heldout.last_status
    with pytest.raises(ValueError, match=r"."):
        guard.update_from_reading(200, bad, in_loop_reward=reward)
    assert guard.state_dict() == before
    assert (guard.heldout.last_status, guard.last_status) == (said, status)


def happen(guard: CombinedGuard, event: Any) -> CombinedStatus:
    score, pairs, kl = event
    idx = guard.evidence.num_evaluations + 1
    return guard.update_from_reading(
        idx, reading(idx, pairs * 3, score=score), in_loop_reward=1 - score, kl_to_init=kl
    )


@pytest.mark.no_cover
@settings(max_examples=12, deadline=None)
@given(events=EVENTS)
def test_restored_at_every_cut_the_verdicts_are_those_of_the_uninterrupted_run(events: list[Any]) -> None:
    whole = make(alpha=0.5)
    states, statuses = [whole.state_dict()], []
    for event in events:
        statuses.append(happen(whole, event))
        states.append(whole.state_dict())
    for cut, state in enumerate(states):
        restored = make(alpha=0.5)
        restored.load_state_dict(json.loads(json.dumps(state, allow_nan=False)))
        assert restored.last_status == (statuses[cut - 1] if cut else None)
        assert [happen(restored, event) for event in events[cut:]] == statuses[cut:]
        assert restored.state_dict() == states[-1]


def without(name: str) -> Callable[[dict[str, Any]], Any]:
    return lambda state: {key: value for key, value in state.items() if key != name}


@pytest.mark.parametrize(
    "damage",
    [
        lambda _: None,
        lambda state: [state],
        lambda state: state["heldout"],
        lambda state: {**state, "version": 2},
        lambda state: {**state, "version": True},
        lambda state: {**state, "kind": "HeldOutGuard"},
        lambda state: {**state, "surplus": 1},
        without("evidence"),
        lambda state: {**state, "heldout": {}},
        lambda state: {**state, "evidence": {}},
        lambda state: {**state, "evidence": make(alpha=0.02).state_dict()["evidence"]},
        lambda state: {**state, "fired_at": 0},
        lambda state: {**state, "fired_at": "1"},
        lambda state: {**state, "first_reason": ""},
        lambda state: {**state, "first_reason": None},
    ],
)
def test_a_foreign_or_damaged_state_is_refused_and_changes_nothing(damage: Callable[[Any], Any]) -> None:
    source, guard = make(), make()
    fold(source, HACKED)
    fold(guard, reward=0.1)
    before, status = guard.state_dict(), guard.last_status
    with pytest.raises(ValueError, match=r"."):
        guard.load_state_dict(damage(copy.deepcopy(source.state_dict())))
    assert guard.state_dict() == before
    assert guard.last_status is status
    guard.load_state_dict(source.state_dict())
    assert guard.state_dict() == source.state_dict()
    assert guard.last_status == source.last_status
