"""How every guard's state is written and read back: version, kind, exact keys, values of known shape."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Any, TypeVar

VERSION = 1
Memory = TypeVar("Memory")


def saved(kind: str, **parts: Any) -> dict[str, Any]:
    """A state of this kind."""
    return {"version": VERSION, "kind": kind, **parts}


def opened(state: object, kind: str, *keys: str) -> Mapping[str, Any]:
    """What ``saved`` made, once it is known to be of this kind and version, with these very keys."""
    if not isinstance(state, Mapping):
        raise ValueError(f"the state must be a mapping, got {type(state).__name__}")
    version, found = state.get("version"), state.get("kind")
    if type(version) is not int or version != VERSION or found != kind:
        raise ValueError(
            f"the state is version {version!r} of {found!r}; only version {VERSION} of {kind!r} can be loaded"
        )
    return section("state", state, ("version", "kind", *keys))


def section(name: str, value: object, keys: tuple[str, ...]) -> Mapping[str, Any]:
    """The value, once it is known to be a mapping with these very keys."""
    if not isinstance(value, Mapping) or set(value) != set(keys):
        raise ValueError(f"the {name} must be a mapping with the keys {', '.join(keys)}")
    return value


def restored(blank: Memory, stored: object, number: Callable[[str, Any], float]) -> Memory:
    """A dataclass like ``blank`` with the stored values, each of the type and shape that it has there.

    An empty tuple in ``blank`` stands for any number of pairs of integers, None for a float or None.
    ``number`` reads one float, given its field's name and what was stored.
    """
    names = tuple(field.name for field in fields(blank))  # type: ignore[arg-type]  # a dataclass
    values = section("state's memory", stored, names)
    try:
        read = {name: _like(name, values[name], getattr(blank, name), number) for name in names}
    except (TypeError, OverflowError) as error:
        raise ValueError(f"the state's memory is damaged: {error}") from error
    return replace(blank, **read)  # type: ignore[type-var]  # a dataclass


def _like(name: str, value: Any, blank: object, number: Callable[[str, Any], float]) -> Any:
    if isinstance(blank, tuple):
        rows = blank or ((0, 0),) * len(value)
        return tuple(_like(name, item, row, number) for item, row in zip(value, rows, strict=True))
    if isinstance(blank, int | str):
        if type(value) is not type(blank):
            raise ValueError(f"{name} must be of type {type(blank).__name__}, got {value!r}")
        return value
    return None if blank is None and value is None else number(name, value)


def exact(value: Any) -> Any:
    """The value for JSON with every float as ``float.hex``, so that not one bit is lost."""
    if isinstance(value, float):
        return value.hex()
    if isinstance(value, Mapping):
        return {key: exact(item) for key, item in value.items()}
    return [exact(item) for item in value] if isinstance(value, list | tuple) else value


def exact_sha256(value: object) -> str:
    """Hash of the value, floats taken exactly."""
    text = json.dumps(exact(value), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
