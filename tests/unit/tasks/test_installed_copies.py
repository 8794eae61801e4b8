"""A task whose deleted code stands in an installed package, or in the standard library, is no task."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from composer_replication.records import Task
from composer_replication.sandbox.host_paths import HostPaths
from composer_replication.tasks.gates import check_secrecy
from composer_replication.tasks.leaks import installed_copies as module
from composer_replication.tasks.leaks.installed_copies import installed_copies
from composer_replication.tasks.store import TaskStore
from composer_replication.tasks.subject import GateFailed

Plant = Callable[[str], Path]


@pytest.fixture
def clamp(tiny_store: TaskStore) -> Task:
    (task,) = [task for task in tiny_store.tasks() if task.symbol == "clamp"]
    return task


@pytest.fixture
def plant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Plant:
    """Puts text into the only installed module that there is."""

    def write(text: str) -> Path:
        path = tmp_path / "lib" / "package" / "module.py"
        path.parent.mkdir(parents=True)
        path.write_text(text)
        shown = HostPaths((tmp_path / "lib",), (tmp_path / "lib" / "masked",))
        monkeypatch.setattr(module, "base_interpreter", lambda: shown)
        return path

    return write


def golden_file(store: TaskStore, task: Task) -> str:
    return store.files(task, "golden")[task.path].decode()


def test_a_copy_in_a_package_is_found(tiny_store: TaskStore, clamp: Task, plant: Plant) -> None:
    path = plant(golden_file(tiny_store, clamp))
    assert {leak.path for leak in installed_copies(tiny_store, clamp)} == {str(path)}
    with pytest.raises(GateFailed, match=r"leak: package/module\.py tells the code"):
        check_secrecy(tiny_store, clamp)


def test_other_code_is_no_copy(tiny_store: TaskStore, clamp: Task, plant: Plant) -> None:
    plant(tiny_store.files(clamp, "rollout")[clamp.path].decode())
    assert installed_copies(tiny_store, clamp) == []
    check_secrecy(tiny_store, clamp)  # raises nothing


def test_the_same_lines_in_another_order_are_no_copy(
    tiny_store: TaskStore, clamp: Task, plant: Plant
) -> None:
    """They pass the check sums, which know no order; the search itself decides."""
    lines = golden_file(tiny_store, clamp).splitlines()
    apart = "\n\nunrelated = 'a line between, so that no two neighbours stay together'\n".join(
        reversed(lines)
    )
    plant(apart)
    assert installed_copies(tiny_store, clamp) == []


def test_what_is_masked_or_no_source_is_not_read(tiny_store: TaskStore, clamp: Task, plant: Plant) -> None:
    path = plant("x = 1\n")
    masked = path.parents[1] / "masked" / "copy.py"
    masked.parent.mkdir()
    for place in (masked, path.with_suffix(".txt")):
        place.write_text(golden_file(tiny_store, clamp))
    assert installed_copies(tiny_store, clamp) == []
