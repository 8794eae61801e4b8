"""A tree or an instruction that tells the deleted code ends a candidate."""

from __future__ import annotations

import base64

import pytest

from composer_replication.errors import InputError
from composer_replication.records import Task
from composer_replication.tasks import gates
from composer_replication.tasks.gates import check_secrecy
from composer_replication.tasks.leaks import leak_scan
from composer_replication.tasks.leaks.leak_targets import targets_of
from composer_replication.tasks.store import TaskStore
from composer_replication.tasks.subject import GateFailed


@pytest.fixture
def clamp(tiny_store: TaskStore) -> Task:
    (task,) = [task for task in tiny_store.tasks() if task.symbol == "clamp"]
    return task


def test_a_clean_task_passes(tiny_store: TaskStore) -> None:
    tasks = tiny_store.tasks()
    assert [gates.leaks_in_tree(tiny_store, task) for task in tasks] == [[]] * len(tasks)
    for task in tasks:
        check_secrecy(tiny_store, task)  # raises nothing


@pytest.mark.parametrize("is_encoded", [False, True])
def test_a_copy_in_the_tree_is_found(
    tiny_store: TaskStore, clamp: Task, monkeypatch: pytest.MonkeyPatch, is_encoded: bool
) -> None:
    real = TaskStore.files
    code = tiny_store.golden_body(clamp).encode()
    planted = {"notes.txt": base64.b64encode(code) if is_encoded else code}

    def files(self: TaskStore, task: Task, view: str) -> dict[str, bytes]:
        return {**real(self, task, view), **planted}  # type: ignore[arg-type]

    # The lines were told apart before the copy came: a mistake of the build would do it so.
    known = targets_of(tiny_store, clamp)
    monkeypatch.setattr(leak_scan, "targets_of", lambda *_: known)
    monkeypatch.setattr(TaskStore, "files", files)
    with pytest.raises(GateFailed, match=r"leak: notes\.txt tells the code"):
        check_secrecy(tiny_store, clamp)


def test_an_instruction_that_tells_is_refused(
    tiny_store: TaskStore, clamp: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(code: str) -> None:
        raise InputError(code, "it would.", where="x", fix="y")

    monkeypatch.setattr(gates, "write_instruction", lambda *_: write("CR0429"))
    with pytest.raises(GateFailed, match="instruction-leaks"):
        check_secrecy(tiny_store, clamp)
    monkeypatch.setattr(gates, "write_instruction", lambda *_: write("CR0411"))
    with pytest.raises(InputError, match="CR0411"):
        check_secrecy(tiny_store, clamp)
