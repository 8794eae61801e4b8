"""What every saved state of this folder has around its content: a version, a kind and exact keys."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import Any


def opened_state(state: object, *, kind: str, version: int, keys: AbstractSet[str]) -> Mapping[str, Any]:
    """The state, once it is known to be a mapping of this kind, version and these very keys.

    Args:
        state: what ``load_state_dict`` was given.
        kind: the class that wrote it.
        version: of the layout.
        keys: beside ``version`` and ``kind``.

    Raises:
        ValueError: it is something else; the sentence says what.
    """
    if not isinstance(state, Mapping):
        raise ValueError(f"the state must be a mapping, got {type(state).__name__}")
    found_version, found_kind = state.get("version"), state.get("kind")
    if type(found_version) is not int or found_version != version or found_kind != kind:
        raise ValueError(
            f"the state is version {found_version!r} of {found_kind!r}; "
            f"only version {version} of {kind!r} can be loaded"
        )
    if set(state) != {"version", "kind", *keys}:
        raise ValueError(f"the state has other keys than a {kind} state: {sorted(map(str, state))}")
    return state
