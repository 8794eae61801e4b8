"""What the guard remembers between checkpoints, and how a stored memory is read back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from composer_replication.safety.checked_numbers import clamped, finite, integer
from composer_replication.safety.saved_state import opened_state

STATE_VERSION = 1
STATE_KIND = "HeldOutGuard"
CONFIG_FIELDS = ("min_steps", "decline_patience", "ema_alpha", "kl_hard_stop", "max_proxy_real_gap")


@dataclass(frozen=True, slots=True)
class GuardMemory:
    """Everything that an update changes; replaced as a whole, so that it is never half new.

    The averages and baselines mean something only once ``num_updates`` is above 0.
    """

    num_updates: int = 0
    round_idx: int = 0
    in_loop_ema: float = 0.0
    heldout_ema: float = 0.0
    kl_ema: float | None = None
    in_loop_baseline: float = 0.0
    heldout_baseline: float = 0.0
    decline_streak: int = 0
    fired_at: int = 0
    first_reason: str = ""

    @property
    def proxy_real_gap(self) -> float:
        """Rise of the in-loop average minus rise of the held-out one."""
        in_loop_rise = clamped(self.in_loop_ema - self.in_loop_baseline)
        heldout_rise = clamped(self.heldout_ema - self.heldout_baseline)
        return clamped(in_loop_rise - heldout_rise)


def parse_state(state: object) -> tuple[dict[str, Any], GuardMemory]:
    """Settings and memory of a stored state; a ValueError says what is wrong with it."""
    state = opened_state(state, kind=STATE_KIND, version=STATE_VERSION, keys={"config", "memory"})
    config = _section(state, "config", CONFIG_FIELDS)
    memory = _section(state, "memory", tuple(field.name for field in fields(GuardMemory)))
    parsed = _parse_memory(memory)
    if (parsed.fired_at > 0) != bool(parsed.first_reason) or parsed.fired_at > parsed.num_updates:
        raise ValueError("the state contradicts itself: fired_at, first_reason and num_updates do not fit")
    if parsed.num_updates == 0 and parsed != GuardMemory():
        raise ValueError("the state contradicts itself: averages without an update")
    return config, parsed


def _section(state: Mapping[str, Any], name: str, keys: tuple[str, ...]) -> dict[str, Any]:
    section = state[name]
    if not isinstance(section, Mapping) or set(section) != set(keys):
        raise ValueError(f"the state's {name} must be a mapping with the keys {', '.join(keys)}")
    return dict(section)


def _parse_memory(memory: Mapping[str, Any]) -> GuardMemory:
    counts = {name: integer(name, memory[name]) for name in ("num_updates", "decline_streak", "fired_at")}
    if min(counts.values()) < 0:
        raise ValueError(f"the state's counts must be >= 0, got {counts}")
    if not isinstance(memory["first_reason"], str):
        raise ValueError(f"first_reason must be text, got {memory['first_reason']!r}")
    return GuardMemory(
        round_idx=integer("round_idx", memory["round_idx"]),
        in_loop_ema=finite("in_loop_ema", memory["in_loop_ema"]),
        heldout_ema=finite("heldout_ema", memory["heldout_ema"]),
        kl_ema=None if memory["kl_ema"] is None else finite("kl_ema", memory["kl_ema"]),
        in_loop_baseline=finite("in_loop_baseline", memory["in_loop_baseline"]),
        heldout_baseline=finite("heldout_baseline", memory["heldout_baseline"]),
        first_reason=memory["first_reason"],
        **counts,
    )
