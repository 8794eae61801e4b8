"""Searching for many tasks at once finds what searching for each alone does, and walks what they share once."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from composer_replication.tasks.leaks import leak_scan
from composer_replication.tasks.leaks.leak_search import Leak, Search
from composer_replication.tasks.leaks.leak_targets import targets_of
from composer_replication.tasks.store import TaskStore

if TYPE_CHECKING:
    import pytest


def test_all_tasks_at_once_find_what_each_finds_alone(tiny_store: TaskStore) -> None:
    known = {task: targets_of(tiny_store, task) for task in tiny_store.tasks()}
    original = tiny_store.files(tiny_store.tasks()[0], "golden")
    together = Search([one for own in known.values() for one in own], unmarshal=True)
    num_found = 0
    for path, data in original.items():
        for in_tree in (True, False):
            alone: set[Leak] = set()
            for own in known.values():
                search = Search(own, unmarshal=True)
                alone |= search.search_bytes(path, data, in_tree=in_tree)
            assert together.search_bytes(path, data, in_tree=in_tree) == alone
            num_found += len(alone)
    assert num_found > 4


def test_shared_places_are_walked_once(tiny_store: TaskStore, monkeypatch: pytest.MonkeyPatch) -> None:
    walks: list[tuple[str, int, int]] = []

    def search_inside(
        _files: Any, tasks: Any, targets: Any, *_: Any, walk: str = "all", **__: Any
    ) -> dict[str, Any]:
        walks.append((walk, len(tasks), len(targets)))
        return {"leaks": [], "num_files": 0, "not_searched": [], "failed_checks": []}

    monkeypatch.setattr(leak_scan, "search_inside", search_inside)
    num_targets = sum(len(targets_of(tiny_store, task)) for task in tiny_store.tasks())
    leak_scan.scan_store(tiny_store.root)
    assert Counter(walk for walk, _, _ in walks) == {"system": 1, "environment": 1, "all": 4}
    assert {targets for walk, _, targets in walks if walk != "all"} == {num_targets}
