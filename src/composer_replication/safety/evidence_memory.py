"""What the evidence detector remembers between evaluations, on its way to JSON and back."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from composer_replication.safety.betting import BETS, BOUND_BETS, BOUND_GRID
from composer_replication.safety.checked_numbers import integer
from composer_replication.safety.saved_state import opened_state

STATE_VERSION = 1
STATE_KIND = "EvidenceGuard"
STREAMS = ("gap", "collapse", "canary")
CAUSES = ("evidence", "infrastructure", "missed")

_ZERO = -math.inf  # log of nothing
_COUNTS = ("step", "num_events", "num_samples", "num_canaries", "missed_in_a_row", "fired_at")
_FLOATS = ("lower_bound", "max_log_evidence", "cusum", "tolerated_gap")
_TEXTS = ("cause", "first_reason", "chain")
_TABLES = {"log_streams": (len(STREAMS), len(BETS)), "log_bound": (len(BOUND_GRID), len(BOUND_BETS))}


def _empty(rows: int, columns: int) -> tuple[tuple[float, ...], ...]:
    return tuple((_ZERO,) * columns for _ in range(rows))


@dataclass(frozen=True, slots=True)
class EvidenceMemory:
    """Everything that an evaluation changes; replaced as a whole, so that it is never half new.

    ``log_streams`` is logM by stream and bet, ``log_bound`` logN by grid point and bet (no
    longer changed once the bound has reached the point). ``window`` holds (tasks, neutral
    ones) of the last evaluations, ``fired_at`` the event, counted in ``num_events``, that
    fired. ``chain`` is a sha256 over the settings and all scores.
    """

    tolerated_gap: float
    chain: str
    step: int = 0
    num_events: int = 0
    log_streams: tuple[tuple[float, ...], ...] = _empty(*_TABLES["log_streams"])
    log_bound: tuple[tuple[float, ...], ...] = _empty(*_TABLES["log_bound"])
    lower_bound: float = 0.0
    max_log_evidence: float = _ZERO
    cusum: float = 0.0
    num_samples: int = 0
    num_canaries: int = 0
    window: tuple[tuple[int, int], ...] = ()
    missed_in_a_row: int = 0
    fired_at: int = 0
    cause: str = ""
    first_reason: str = ""

    @property
    def is_latched(self) -> bool:
        return 0 < self.fired_at < self.num_events


def exact(value: Any) -> Any:
    """The value with every float as ``float.hex``, so that not one bit is lost in JSON."""
    if isinstance(value, float):
        return value.hex()
    if isinstance(value, list | tuple):
        return [exact(item) for item in value]
    return value


def config_sha256(config: Mapping[str, Any]) -> str:
    """Hash of the settings, floats taken exactly."""
    return _sha256({name: exact(value) for name, value in config.items()})


def next_link(
    chain: str, step: int, pairs: Sequence[tuple[float, float]], canaries: Sequence[float], neutral: int
) -> str:
    """The chain after one more evaluation; the order of the samples does not enter."""
    return _sha256([chain, step, exact(sorted(pairs)), exact(sorted(canaries)), neutral])


def dump_state(memory: EvidenceMemory, config: Mapping[str, Any]) -> dict[str, Any]:
    """Settings, their hash and the memory, JSON-safe and versioned."""
    return {
        "version": STATE_VERSION,
        "kind": STATE_KIND,
        "config": {name: exact(value) for name, value in config.items()},
        "config_sha256": config_sha256(config),
        "memory": {field.name: exact(getattr(memory, field.name)) for field in fields(memory)},
    }


def parse_state(state: object, config: Mapping[str, Any]) -> EvidenceMemory:
    """The memory of a stored state that was made under the very same settings.

    Raises:
        ValueError: another version, kind or setting (named), or not a whole state.
    """
    state = opened_state(
        state, kind=STATE_KIND, version=STATE_VERSION, keys={"config", "config_sha256", "memory"}
    )
    stored, own = state["config"], {name: exact(value) for name, value in config.items()}
    if not isinstance(stored, Mapping):
        raise ValueError("the state's config must be a mapping")
    other = sorted(str(name) for name in {*stored, *own} if stored.get(name) != own.get(name))
    if other or state["config_sha256"] != config_sha256(config):
        raise ValueError(
            "the state was made under other settings than this guard's "
            f"({', '.join(other) or 'their hash differs'}): its guarantee belongs to those"
        )
    memory = _parse_memory(state["memory"])
    _refuse_contradictions(memory, config)
    return memory


def _parse_memory(stored: object) -> EvidenceMemory:
    names = {field.name for field in fields(EvidenceMemory)}
    if not isinstance(stored, Mapping) or set(stored) != names:
        raise ValueError(f"the state's memory must be a mapping with the keys {', '.join(sorted(names))}")
    values: dict[str, Any] = {name: _count(name, stored[name]) for name in _COUNTS}
    values |= {name: _number(name, stored[name]) for name in _FLOATS}
    for name in _TEXTS:
        if not isinstance(stored[name], str):
            raise ValueError(f"{name} must be text, got {stored[name]!r}")
        values[name] = stored[name]
    for name, (rows, columns) in _TABLES.items():
        values[name] = _table(name, stored[name], columns, _number)
        if len(values[name]) != rows:
            raise ValueError(f"{name} must have {rows} rows")
    values["window"] = _table("window", stored["window"], 2, _count)
    return EvidenceMemory(**values)


def _refuse_contradictions(memory: EvidenceMemory, config: Mapping[str, Any]) -> None:
    logs = [value for table in (memory.log_streams, memory.log_bound) for row in table for value in row]
    logs.append(memory.max_log_evidence)
    is_whole = (
        all(math.isfinite(value) == (memory.step > 0) for value in logs)
        and memory.lower_bound in (0.0, *BOUND_GRID)
        and 0.0 <= memory.tolerated_gap <= config["tolerated_gap"]
        and 0.0 <= memory.cusum < math.inf
        and memory.step <= memory.num_events
        and len(memory.window) == min(memory.step, config["neutral_window"])
        and all(neutral <= tasks for tasks, neutral in memory.window)
    )
    has_fired = memory.cause in CAUSES and bool(memory.first_reason) and memory.fired_at > 0
    has_not = not memory.cause and not memory.first_reason and memory.fired_at == 0
    if not is_whole or not (has_fired or has_not) or memory.fired_at > memory.num_events:
        raise ValueError("the state contradicts itself: it is damaged or was changed by hand")
    if not re.fullmatch(r"[0-9a-f]{64}", memory.chain):
        raise ValueError(f"chain must be a sha256, got {memory.chain!r}")


def _count(name: str, value: object) -> int:
    count = integer(name, value)
    if count < 0:
        raise ValueError(f"{name} must be >= 0, got {value!r}")
    return count


def _number(name: str, value: object) -> float:
    try:
        number = float.fromhex(value)  # type: ignore[arg-type]  # what is no text is refused below
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{name} must be a number as float.hex writes it, got {value!r}") from error
    if math.isnan(number) or number == math.inf:
        raise ValueError(f"{name} must not be {number}")
    return number


def _table(
    name: str, value: object, columns: int, parse: Callable[[str, object], Any]
) -> tuple[tuple[Any, ...], ...]:
    if not isinstance(value, list) or not all(isinstance(row, list) and len(row) == columns for row in value):
        raise ValueError(f"{name} must be a list of lists of {columns}")
    return tuple(tuple(parse(name, item) for item in row) for row in value)


def _sha256(value: object) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
