"""A tree or an instruction that tells the deleted code ends a candidate."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from composer_replication.records import Task
from composer_replication.sandbox.host_paths import HostPaths
from composer_replication.tasks.gates import GateFailed, check_secrecy
from composer_replication.tasks.leaks import leak_scan
from composer_replication.tasks.leaks.leak_scan import leaks_of, targets_of
from composer_replication.tasks.leaks.leak_search import Leak, Search
from composer_replication.tasks.store import TaskStore


@pytest.fixture
def clamp(tiny_store: TaskStore) -> Task:
    (task,) = [task for task in tiny_store.tasks() if task.symbol == "clamp"]
    return task


def test_a_clean_task_passes(tiny_store: TaskStore) -> None:
    for task in tiny_store.tasks():
        assert leaks_of(tiny_store, task) == []
        check_secrecy(tiny_store, task)  # raises nothing


# --- copies in installed packages and in the standard library ---


Plant = Callable[[str], Path]


@pytest.fixture
def plant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Plant:
    """Puts text into the only installed module that there is."""

    def write(text: str) -> Path:
        path = tmp_path / "lib" / "package" / "module.py"
        path.parent.mkdir(parents=True)
        path.write_text(text)
        shown = HostPaths((tmp_path / "lib",), (tmp_path / "lib" / "masked",))
        monkeypatch.setattr(leak_scan, "base_interpreter", lambda: shown)
        return path

    return write


def golden_file(store: TaskStore, task: Task) -> str:
    return store.files(task, "golden")[task.path].decode()


def test_a_copy_in_a_package_is_found(tiny_store: TaskStore, clamp: Task, plant: Plant) -> None:
    path = plant(golden_file(tiny_store, clamp))
    assert {leak.path for leak in leaks_of(tiny_store, clamp)} == {str(path)}
    with pytest.raises(GateFailed, match=r"leak: package/module\.py tells the code"):
        check_secrecy(tiny_store, clamp)


@pytest.mark.parametrize("how", ["broken", "in another order", "masked or no source"])
def test_what_is_no_copy(tiny_store: TaskStore, clamp: Task, plant: Plant, how: str) -> None:
    """The quick look for a line knows no order; the search itself decides."""
    between = "\n\nunrelated = 'a line between, so that no two neighbours stay together'\n"
    texts = {
        "broken": tiny_store.files(clamp, "rollout")[clamp.path].decode(),
        "in another order": between.join(reversed(golden_file(tiny_store, clamp).splitlines())),
    }
    path = plant(texts.get(how, "x = 1\n"))
    masked = path.parents[1] / "masked" / "copy.py"
    masked.parent.mkdir()
    for place in (masked, path.with_suffix(".txt")):
        place.write_text(golden_file(tiny_store, clamp))
    assert leaks_of(tiny_store, clamp) == []
    check_secrecy(tiny_store, clamp)  # raises nothing


# --- many tasks are searched for at once ---


def test_all_tasks_at_once_find_what_each_finds_alone(tiny_store: TaskStore) -> None:
    known = {task: targets_of(tiny_store, task) for task in tiny_store.tasks()}
    original = tiny_store.files(tiny_store.tasks()[0], "golden")
    together = Search([one for own in known.values() for one in own])
    num_found = 0
    for path, data in original.items():
        for in_tree in (True, False):
            alone: set[Leak] = set()
            for own in known.values():
                search = Search(own)
                alone |= search.search_bytes(path, data, in_tree=in_tree)
            assert together.search_bytes(path, data, in_tree=in_tree) == alone
            num_found += len(alone)
    assert num_found > 4


def test_shared_places_are_walked_once(tiny_store: TaskStore, monkeypatch: pytest.MonkeyPatch) -> None:
    walks: list[tuple[bool, int, int]] = []

    def search_inside(files: Any, targets: Any, *_: Any, roots: Any = (), **__: Any) -> dict[str, Any]:
        walks.append((bool(roots), len(files), len(targets)))
        return {"leaks": [], "num_files": 0, "not_searched": [], "failed_checks": []}

    monkeypatch.setattr(leak_scan, "search_inside", search_inside)
    num_targets = sum(len(targets_of(tiny_store, task)) for task in tiny_store.tasks())
    leak_scan.scan_store(tiny_store.root)
    shared = [(num_files, num_sought) for is_shared, num_files, num_sought in walks if is_shared]
    assert shared == [(0, num_targets)] * 2  # the system, and the one environment
    assert len(walks) == 2 + 4
