"""Which files of a batch's trees are worth compiling once for all runs: a guess that costs only time where it errs."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import PurePosixPath

MAX_SHARED_BYTES = 2 * 1024**2
"""Some seconds of compiling, which the first run waits for."""
_PASS_HOOK = b"enable_assertion_pass_hook"
_IMPORT = re.compile(rb"^[ \t]*(?:from|import)\b([^(\n]*(?:\([^)]*\))?)", re.MULTILINE)


def shared_sources(
    runs: Sequence[tuple[Mapping[str, bytes], Sequence[str] | None]],
) -> list[tuple[str, int, bool]]:
    """Python files that at least two trees hold with the same bytes and that the runs seem to import.

    Args:
        runs: the files of each tree, and the tests that are asked for (None: all).

    Returns:
        Of each file its path, the number of a run that has it, and whether pytest rewrites its asserts.
        At most ``MAX_SHARED_BYTES`` together; no rewritten ones where a tree may ask for a hook on
        each assert that passes, which needs other code.
    """
    holders: dict[tuple[str, bytes], list[int]] = {}
    for number, (files, _) in enumerate(runs):
        for path, data in files.items():
            holders.setdefault((path, data), []).append(number)
    has_hook = any(_PASS_HOOK in data for _, data in holders)
    asked = {node_id.partition("::")[0] for _, node_ids in runs for node_id in node_ids or ()}
    if any(node_ids is None for _, node_ids in runs):
        asked |= {path for path, _ in holders if _is_test_file(path)}
    waiting = {
        key: min(numbers) for key, numbers in holders.items() if key[0].endswith(".py") and numbers[1:]
    }
    found: list[tuple[str, int, bool]] = []
    words, num_bytes = {b"conftest"}, 0
    while taken := [key for key in waiting if key[0] in asked or _module(key[0]) in words]:
        for path, data in taken:
            words |= _imported_words(data)
            number = waiting.pop((path, data))
            is_rewritten = path in asked or _is_test_file(path)
            num_bytes += len(data)
            if num_bytes <= MAX_SHARED_BYTES and not (is_rewritten and has_hook):
                found.append((path, number, is_rewritten))
    return found


def _is_test_file(path: str) -> bool:
    """Whether pytest rewrites it even where it was not asked for; by its own defaults."""
    name = PurePosixPath(path).name
    return name == "conftest.py" or (
        name.endswith(".py") and (name.startswith("test_") or name.endswith("_test.py"))
    )


def _module(path: str) -> bytes:
    """The last part of a module's name."""
    pure = PurePosixPath(path)
    return (pure.parent.name if pure.name == "__init__.py" else pure.stem).encode()


@lru_cache(maxsize=4096)
def _imported_words(source: bytes) -> frozenset[bytes]:
    """Each word of each import statement: modules are among them."""
    return frozenset(word for line in _IMPORT.findall(source) for word in re.findall(rb"\w+", line))
