"""Where do problems come from? Delete a function of a real repository, keep its tests, prove it is solvable.

    summary = build_tasks(["sdist:toolz==1.2.0"], Path("tasks"), max_tasks=8)
    store = TaskStore.open(Path("tasks"))
    store.write_tree(store.tasks()[0], Path("tree"))

A source is read (never run), its environment is locked to wheels and installed inside a
sandbox, its suite must be green in any order; then each candidate goes through the gates of
``gates``. Outside the sandbox nothing of a repository or a dependency is ever executed.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from composer_replication.tasks.build import BuildSummary, build_tasks
    from composer_replication.tasks.store import TaskStore

__all__ = ["BuildSummary", "TaskStore", "build_tasks"]

_HOMES = {"BuildSummary": "build", "build_tasks": "build", "TaskStore": "store"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
