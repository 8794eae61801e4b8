"""A guard that is stored and restored says, to the last bit, what one that never stopped says."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from typing import Any

import pytest

from composer_replication.interfaces import Stateful
from composer_replication.safety import CollapseStopError, EvidenceGuard, HeldOutGuard


def make(**changes: Any) -> EvidenceGuard:
    arguments: dict[str, Any] = {"planned_evaluations": 3, "tolerated_gap": 0.1, "alpha": 0.05, **changes}
    return EvidenceGuard(**arguments)


def make_heldout() -> HeldOutGuard:
    return HeldOutGuard(
        min_steps=3, decline_patience=2, ema_alpha=0.5, kl_hard_stop=0.5, max_proxy_real_gap=0.2
    )


def through_json(state: dict[str, Any]) -> Any:
    return json.loads(json.dumps(state, allow_nan=False))


def test_the_state_is_json_with_exact_floats_and_small() -> None:
    guard = make()
    assert isinstance(guard, Stateful)
    for step in range(1, 9):
        guard.update(step, [(0.1 * n, 0.07 * n) for n in range(10)], [0.0])
    state = guard.state_dict()

    def floats(value: object) -> list[float]:
        if isinstance(value, dict | list):
            parts = value.values() if isinstance(value, dict) else value
            return [number for part in parts for number in floats(part)]
        return [value] if isinstance(value, float) else []

    assert floats(state) == []
    assert state["memory"]["log_streams"][0][0].startswith(("0x", "-0x"))
    assert len(json.dumps(state)) < 6000
    assert through_json(state) == state
    guard.update(9, [(1.0, 0.0)])
    assert state["memory"]["step"] == 8  # a copy


def test_the_chain_covers_every_score_and_the_settings() -> None:
    def chain(pairs: list[tuple[float, float]], passes: list[float], neutral: int = 0, **changes: Any) -> Any:
        guard = make(**changes)
        guard.update(1, pairs, passes, neutral=neutral)
        return guard.state_dict()["memory"]["chain"]

    same = chain([(1.0, 0.0), (0.5, 0.5)], [0.0, 1.0])
    assert chain([(0.5, 0.5), (1.0, 0.0)], [1.0, 0.0]) == same
    others = [
        chain([(1.0, 0.0), (0.5, math.nextafter(0.5, 1))], [0.0, 1.0]),
        chain([(0.5, 0.0), (1.0, 0.5)], [0.0, 1.0]),
        chain([(1.0, 0.0), (0.5, 0.5)], [0.0, 0.0]),
        chain([(1.0, 0.0), (0.5, 0.5)], [0.0, 1.0], 1),
        chain([(1.0, 0.0), (0.5, 0.5)], [0.0, 1.0], delta=0.1),
    ]
    assert len({same, *others}) == 6


def test_a_restored_latch_of_evidence_still_raises() -> None:
    guard = make()
    guard.update(1, [(1.0, 0.0)] * 32)
    restored = make()
    restored.load_state_dict(guard.state_dict())
    with pytest.raises(CollapseStopError, match="visible scores exceed"):
        restored.raise_if_fired()
    assert restored.update(2, [(1.0, 1.0)]).reason.startswith("latched: visible scores")


@pytest.mark.parametrize(
    ("field", "value"),
    [("planned_evaluations", 4), ("tolerated_gap", 0.2), ("alpha", 0.01), ("delta", 0.1), ("eps0", 0.01)],
)
def test_a_state_made_under_other_settings_is_refused_by_name(field: str, value: Any) -> None:
    guard = make()
    with pytest.raises(ValueError, match=rf"\({field}\)"):
        guard.load_state_dict(make(**{field: value}).state_dict())


def test_the_held_out_guard_is_stateful_and_its_state_is_a_copy() -> None:
    guard = make_heldout()
    assert isinstance(guard, Stateful)
    state = guard.state_dict()
    guard.update(0, in_loop_reward=0.5, heldout_score=0.5)
    assert state["memory"]["num_updates"] == 0
    assert state["version"] == 1


def test_a_restored_latch_of_the_held_out_guard_still_raises() -> None:
    guard = make_heldout()
    for label in range(3):
        guard.update(label, in_loop_reward=0.5, heldout_score=0.5, kl_to_init=5.0)
    restored = HeldOutGuard()
    restored.load_state_dict(guard.state_dict())
    with pytest.raises(CollapseStopError, match="hard stop"):
        restored.raise_if_fired()
    verdict = restored.update(3, in_loop_reward=0.5, heldout_score=0.5, kl_to_init=0.0)
    assert verdict.reason.startswith("latched: the kl_to_init")


def test_a_calibrated_limit_is_restored() -> None:
    guard = make_heldout()
    guard.calibrate_kl_threshold([0.01])
    restored = make_heldout()
    restored.load_state_dict(guard.state_dict())
    assert restored.kl_hard_stop == guard.kl_hard_stop == pytest.approx(0.03)


def changed(path: str, value: Any) -> Callable[[dict[str, Any]], Any]:
    def apply(state: dict[str, Any]) -> dict[str, Any]:
        *folders, key = path.split(".")
        place: Any = state
        for folder in folders:
            place = place[int(folder) if folder.isdigit() else folder]
        place[int(key) if key.isdigit() else key] = value
        return state

    return apply


BOTH = [
    lambda _: None,
    lambda state: [state],
    lambda _: {},
    lambda state: {key: value for key, value in state.items() if key != "memory"},
    changed("version", 2),
    changed("version", True),
    changed("version", "1"),
    changed("kind", "AnotherGuard"),
    changed("surplus", 1),
    changed("config", None),
    changed("config.other", 1.0),
    changed("memory", []),
    changed("memory.first_reason", None),
]
HELD_OUT = [
    changed("kind", "EvidenceGuard"),
    changed("config.min_steps", 0),
    changed("config.ema_alpha", 1.0),
    changed("memory.num_updates", 1.5),
    changed("memory.num_updates", True),
    changed("memory.round_idx", None),
    changed("memory.in_loop_ema", float("nan")),
    changed("memory.heldout_ema", "0.5"),
    changed("memory.kl_ema", float("inf")),
    changed("memory.in_loop_baseline", None),
    changed("memory.heldout_baseline", False),
]
EVIDENCE = [
    changed("kind", "HeldOutGuard"),
    changed("config.alpha", "0x1p-1"),
    changed("config_sha256", "0" * 64),
    changed("memory.surplus", 1),
    changed("memory.step", 1.0),
    changed("memory.log_streams", []),
    changed("memory.log_streams.0.0", "much"),
    changed("memory.log_streams.0.0", 1.0),
    changed("memory.log_streams.0.0", "0x1p+9999"),
    changed("memory.log_bound.38.3", None),
    changed("memory.window.0", [1]),
    changed("memory.window", 1),
]


def assert_refused(source: Any, guard: Any, damage: Callable[[Any], Any]) -> None:
    before, status = guard.state_dict(), guard.last_status
    with pytest.raises(ValueError, match=r"."):
        guard.load_state_dict(damage(copy.deepcopy(source.state_dict())))
    assert guard.state_dict() == before
    assert guard.last_status is status
    guard.load_state_dict(source.state_dict())
    assert guard.state_dict() == source.state_dict()


@pytest.mark.parametrize("damage", [*BOTH, *HELD_OUT])
def test_the_held_out_guard_refuses_a_foreign_or_damaged_state(damage: Callable[[Any], Any]) -> None:
    source, guard = make_heldout(), HeldOutGuard(min_steps=7)
    source.update(0, in_loop_reward=0.5, heldout_score=0.5, kl_to_init=0.1)
    guard.update(0, in_loop_reward=0.1, heldout_score=0.2)
    assert_refused(source, guard, damage)


@pytest.mark.parametrize("damage", [*BOTH, *EVIDENCE])
def test_evidence_refuses_a_foreign_or_damaged_state(damage: Callable[[Any], Any]) -> None:
    source, guard = make(), make()
    source.update(1, [(0.5, 0.5)], [0.0])
    guard.update(1, [(0.25, 0.5)])
    assert_refused(source, guard, damage)
