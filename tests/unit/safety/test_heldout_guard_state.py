"""A guard that is stored and restored gives the verdicts of one that never stopped."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from composer_replication.interfaces import Stateful
from composer_replication.safety import CollapseStopError, HeldOutGuard


def make() -> HeldOutGuard:
    return HeldOutGuard(
        min_steps=3, decline_patience=2, ema_alpha=0.5, kl_hard_stop=0.5, max_proxy_real_gap=0.2
    )


def step(guard: HeldOutGuard, label: int, row: tuple[float, float, float | None]) -> Any:
    return guard.update(label, in_loop_reward=row[0], heldout_score=row[1], kl_to_init=row[2])


def test_the_guard_is_stateful_and_its_state_is_a_copy() -> None:
    guard = make()
    assert isinstance(guard, Stateful)
    state = guard.state_dict()
    step(guard, 0, (0.5, 0.5, None))
    assert state["memory"]["num_updates"] == 0
    assert state["version"] == 1


def test_a_restored_latch_still_raises() -> None:
    guard = make()
    for label in range(3):
        step(guard, label, (0.5, 0.5, 5.0))
    restored = HeldOutGuard()
    restored.load_state_dict(guard.state_dict())
    with pytest.raises(CollapseStopError, match="hard stop"):
        restored.raise_if_fired()
    assert step(restored, 3, (0.5, 0.5, 0.0)).reason.startswith("latched: the kl_to_init")


def test_a_calibrated_limit_is_restored() -> None:
    guard = make()
    guard.calibrate_kl_threshold([0.01])
    restored = make()
    restored.load_state_dict(guard.state_dict())
    assert restored.kl_hard_stop == guard.kl_hard_stop == pytest.approx(0.03)


def changed(path: str, value: Any) -> Callable[[dict[str, Any]], Any]:
    def apply(state: dict[str, Any]) -> dict[str, Any]:
        *folders, key = path.split(".")
        place = state
        for folder in folders:
            place = place[folder]
        place[key] = value
        return state

    return apply


@pytest.mark.parametrize(
    "damage",
    [
        lambda _: None,
        lambda state: [state],
        lambda _: {},
        lambda state: {key: value for key, value in state.items() if key != "memory"},
        changed("version", 2),
        changed("version", True),
        changed("version", "1"),
        changed("kind", "EvidenceGuard"),
        changed("surplus", 1),
        changed("config", None),
        changed("config.min_steps", 0),
        changed("config.ema_alpha", 1.0),
        changed("config.other", 1.0),
        changed("memory", []),
        changed("memory.num_updates", 1.5),
        changed("memory.num_updates", True),
        changed("memory.round_idx", None),
        changed("memory.in_loop_ema", float("nan")),
        changed("memory.heldout_ema", "0.5"),
        changed("memory.kl_ema", float("inf")),
        changed("memory.in_loop_baseline", None),
        changed("memory.heldout_baseline", False),
        changed("memory.first_reason", None),
    ],
)
def test_a_foreign_or_damaged_state_is_refused_and_changes_nothing(damage: Callable[[Any], Any]) -> None:
    source = make()
    step(source, 0, (0.5, 0.5, 0.1))
    guard = HeldOutGuard(min_steps=7)
    step(guard, 0, (0.1, 0.2, None))
    before, status = guard.state_dict(), guard.last_status
    with pytest.raises(ValueError, match=r"."):
        guard.load_state_dict(damage(copy.deepcopy(source.state_dict())))
    assert guard.state_dict() == before
    assert guard.last_status is status
    guard.load_state_dict(source.state_dict())
    assert guard.state_dict() == source.state_dict()
