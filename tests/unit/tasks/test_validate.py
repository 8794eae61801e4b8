"""Validation needs nothing but the store, and finds what changed."""

from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from composer_replication.errors import InputError
from composer_replication.records import Task
from composer_replication.tasks import gates
from composer_replication.tasks.gates import bench_of
from composer_replication.tasks.instructions import WrittenInstruction
from composer_replication.tasks.intake.cache import sha256_of
from composer_replication.tasks.planning.body_cuts import find_body_cuts
from composer_replication.tasks.store import TaskStore
from composer_replication.tasks.store_manifest import find_blob, read_content, write_file
from composer_replication.tasks.twin.twin_run import Job, Twin, build_twins, play, twin_bytes
from composer_replication.tasks.validate import ValidationFailure, validate_store


@pytest.fixture
def copy(tiny_store: TaskStore, tmp_path: Path) -> Path:
    """A store of one task."""
    shutil.copytree(tiny_store.root, tmp_path / "copy")
    store = TaskStore.open(tmp_path / "copy")
    for task_id in store.task_ids():
        if "--clamp--" not in task_id:
            store.drop_task(task_id)
    return tmp_path / "copy"


def rewrite(store: Path, kind: str, change: Callable[[dict[str, Any]], object]) -> None:
    """Change a record and make the manifest agree, as a faulty build would."""
    TaskStore.open(store).settle()
    manifest = json.loads((store / "manifest.json").read_text())
    (name,) = [name for name in manifest["records"] if name.startswith(f"{kind}/")]
    value = json.loads(read_content(store / f"{name}.zst"))
    change(value)
    data = json.dumps(value).encode()
    write_file(store / name, data)
    manifest["records"][name] = sha256_of(data)
    manifest["fingerprint"] = sha256_of(json.dumps(sorted(manifest["records"].items())).encode())
    (store / "manifest.json").write_text(json.dumps(manifest))


def write(folder: Path, text: str) -> None:
    """What a model wrote about the only task; it may hold the code, or the name of a hidden test."""
    store, task = only(folder)
    told = text.format(body=store.golden_body(task), hidden=task.tests.hidden[0].rpartition("::")[2])
    written = WrittenInstruction(task.task_id, "a model", f"{told}\n" + "Write clamp. " * 20)
    store.put_record(f"instructions/{task.task_id}.json", written.to_json())


def only(folder: Path) -> tuple[TaskStore, Task]:
    store = TaskStore.open(folder)
    (task,) = store.tasks()
    return store, task


def failure_of(folder: Path, **options: int) -> ValidationFailure:
    summary = validate_store(folder, **{"repeat": 1, **options})
    (failed,) = summary.failed
    assert (summary.tasks, summary.passed) == (1, 0)
    return failed


# --- what a faulty or hostile build could have kept ---


def statement(folder: Path) -> None:
    store, task = only(folder)
    body = store.golden_body(task)
    rewrite(folder, "tasks", lambda value: value.update(statement=f"Please write this again:\n{body}\n"))


def code_in_the_tree(folder: Path) -> None:
    """What is told apart is the code itself: a second copy of it makes its lines no longer distinctive, so the copy is one
    that only unpacking shows.
    """
    store, task = only(folder)
    digest = store.put_blob(gzip.compress(store.files(task, "golden")[task.path]))
    rewrite(folder, "repositories", lambda value: value["files"].update({"tests/old.gz": digest}))


def damaged_file(folder: Path) -> None:
    store, task = only(folder)
    digest = store.repository(store.record(task.task_id).repository_record).files[task.path]
    blob = find_blob(folder / "objects", digest)
    assert blob is not None
    blob.write_bytes(b"changed")


def without_hidden(folder: Path) -> None:
    """The hidden tests of a task become visible ones, as if no test could be hidden."""
    store, task = only(folder)
    record, secret = store.record(task.task_id), store.secret(task.task_id)
    changes = {"visible": task.fail_to_pass, "visible_edits": record.test_edits}
    store.put_task(replace(record, **changes), replace(secret, hidden=(), withheld=(), twins=None))


def lost_truth(folder: Path) -> None:
    """Strength is measured only by builds that refuse what has no truth."""
    without_hidden(folder)
    store, task = only(folder)
    strength = {"mutants": 2, "killed_visible": 1, "killed_all": 2}
    store.put_task(replace(store.record(task.task_id), strength=strength), store.secret(task.task_id))


FAULTS: dict[str, tuple[Callable[[Path], None], str, str]] = {
    "edits that leave their file": (
        lambda copy: rewrite(copy, "tasks", lambda value: value["edits"][0].__setitem__(2, 10**9)), "not-restored", "",
    ),
    "hidden tests gone": (
        lambda copy: rewrite(copy, "secrets", lambda value: value.update(hidden=[])), "other-tests-fail", "tests differ",
    ),
    "hidden tests shown": (
        lambda copy: rewrite(copy, "tasks", lambda value: value.update(visible_edits=[])), "hidden-shown", "",
    ),
    "code in the statement": (statement, "instruction-leaks", "the instruction would contain the deleted code"),
    "a model wrote the code": (lambda copy: write(copy, "{body}"), "instruction-leaks", ": shows-code"),
    "a model named a test": (lambda copy: write(copy, "See {hidden}."), "instruction-leaks", ": names-hidden-test"),
    "code in the tree": (code_in_the_tree, "leak", "tests/old.gz"),
    "a file changed": (damaged_file, "damaged", "objects"),
    "truth lost": (lost_truth, "no-truth", "its build kept one of them"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_fails_its_gate_and_no_hidden_test_is_named(copy: Path, fault: str) -> None:
    plant, gate, words = FAULTS[fault]
    _, task = only(copy)
    plant(copy)
    failed = failure_of(copy)
    assert (failed.task_id, failed.gate) == (task.task_id, gate)
    assert words in failed.detail
    tests = (test.rpartition("::")[2] for test in (*task.tests.hidden, *task.tests.visible))
    assert not any(test in failed.detail for test in tests)


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("repositories", lambda value: value["files"].update({"../../escaped.py": min(value["files"].values())})),
        ("tasks", lambda value: value["edits"][0].__setitem__(0, "/etc/escaped.py")),
        ("locks", lambda value: value["wheels"][0].__setitem__(2, "a-1-1/../../../escaped-py3-none-any.whl")),
        ("secrets", lambda value: value.pop("hidden")),
    ],
)  # fmt: skip
def test_a_hostile_store_writes_nowhere(
    copy: Path, tmp_path: Path, kind: str, change: Callable[[dict[str, Any]], object]
) -> None:
    rewrite(copy, kind, change)
    with pytest.raises(InputError, match="CR0411"):
        TaskStore.open(copy).verify()
    assert failure_of(copy).gate == "damaged"
    assert not list(tmp_path.rglob("escaped*"))


@pytest.mark.long
def test_a_suite_that_changes_its_mind_fails(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole suite without the code is run every time: what happens in the second run alone is seen."""
    _, task = only(copy)
    real, runs = gates.failing_of, 0

    def failing_of(*args: Any) -> frozenset[str]:
        nonlocal runs
        runs += 1
        return real(*args) | ({task.tests.pass_to_pass[0]} if runs == 2 else set())

    monkeypatch.setattr(gates, "failing_of", failing_of)
    failed = failure_of(copy, repeat=3)
    assert (failed.gate, runs) == ("other-tests-fail", 2)
    assert failed.detail == "1 tests differ from the stored ones"


@pytest.mark.long
def test_a_task_without_a_truth_passes_where_nobody_looked_for_one(copy: Path) -> None:
    without_hidden(copy)
    summary = validate_store(copy, repeat=1)
    assert summary.failed == ()


# --- recorded behaviour ---


@pytest.fixture(scope="module")
def twinned(build_tiny: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A task that has recorded behaviour."""
    folder = build_tiny(tmp_path_factory.mktemp("twinned") / "tasks", ["tinymath/numbers.py::clamp"])
    store, task = only(folder)
    files = store.files(task, "golden")
    (cut,) = [cut for cut in find_body_cuts(task.path, files[task.path].decode()) if cut.symbol == "clamp"]
    twins = build_twins(replace(bench_of(store, task), original=files), [cut], eager={cut.pin}).twins
    put_twin(store, twins[cut.pin])
    return folder


def put_twin(store: TaskStore, twin: Twin) -> None:
    (task,) = store.tasks()
    digest = store.put_blob(twin_bytes(twin), is_packed=True)
    secret = replace(store.secret(task.task_id), twins={f"{task.path}::{task.symbol}": digest})
    store.put_task(store.record(task.task_id), secret)


def test_a_good_store_passes_offline_with_an_empty_cache(
    twinned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = Path(shutil.copytree(twinned, tmp_path / "copy"))
    rewrite(copy, "tasks", lambda value: value.update(statement="Please write clamp again."))
    write(copy, "")
    monkeypatch.setenv("COMPOSER_RL_CACHE", str(tmp_path / "empty"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    told: list[tuple[int, int, str]] = []
    summary = validate_store(copy, repeat=1, progress=lambda *step: told.append(step))
    assert (summary.tasks, summary.passed, summary.failed) == (1, 1, ())
    assert told[-1][:2] == (1, 1)  # before it the steps of the self-test, where this process has not made it


def one_call_changed(_store: TaskStore, twin: Twin) -> Twin:
    """One of many mutated calls: an answer is forgiven it, the golden code is not."""
    return replace(twin, mutated=(replace(twin.mutated[0], digest="0" * 12), *twin.mutated[1:]))


def calls_that_give_zero(store: TaskStore, twin: Twin) -> Twin:
    """Of all calls of clamp those that give 0 are left, so ``return 0`` does what was recorded."""
    (task,) = store.tasks()
    job = Job(twin, {"constants": ["0"]})
    (report,) = play(replace(bench_of(store, task), original=store.files(task, "golden")), [job])
    both = zip(twin.vectors, report.digests, strict=True)
    zero = [vector for vector, digest in both if digest == vector.digest]
    assert 2 <= len(zero) < len(twin.vectors)
    return replace(twin, recorded=tuple(zero[:1]), mutated=tuple(zero[1:]))


def no_changed_calls(_store: TaskStore, twin: Twin) -> Twin:
    """Then a table of the recorded ones is all that there is to know."""
    return replace(twin, mutated=())


@pytest.mark.parametrize(
    ("change", "gate", "words"),
    [
        (one_call_changed, "golden-fails", "{} of {} calls"),
        pytest.param(
            calls_that_give_zero, "stub-passes", "the recorded behaviour is there with return 0", marks=pytest.mark.long
        ),
        pytest.param(no_changed_calls, "lookup-passes", "a table of the recorded calls", marks=pytest.mark.long),
    ],
)  # fmt: skip
def test_recorded_behaviour_is_judged_again(
    twinned: Path, tmp_path: Path, change: Callable[[TaskStore, Twin], Twin], gate: str, words: str
) -> None:
    copy = Path(shutil.copytree(twinned, tmp_path / "copy"))
    store, task = only(copy)
    (twin,) = store.twins(task).values()
    put_twin(store, change(store, twin))
    failed = failure_of(copy)
    calls = len(twin.vectors)
    assert (failed.gate, words.format(calls - 1, calls) in failed.detail) == (gate, True)
    assert "clamp" not in failed.detail
