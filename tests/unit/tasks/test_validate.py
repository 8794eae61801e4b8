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
from composer_replication.tasks import gates
from composer_replication.tasks.instructions.written_instructions import WrittenInstruction
from composer_replication.tasks.intake.cache import sha256_of
from composer_replication.tasks.planning.body_cuts import find_body_cuts
from composer_replication.tasks.store import TaskStore
from composer_replication.tasks.store_manifest import find_blob, read_content, write_file
from composer_replication.tasks.subject import bench_of
from composer_replication.tasks.twin.build_twins import build_twins
from composer_replication.tasks.twin.twin_run import Job, Twin, play, twin_bytes
from composer_replication.tasks.validate import validate_store


@pytest.fixture
def copy(tiny_store: TaskStore, tmp_path: Path) -> Path:
    """A store of one task."""
    shutil.copytree(tiny_store.root, tmp_path / "copy")
    store = TaskStore.open(tmp_path / "copy")
    for task_id in store.task_ids():
        if "--clamp--" not in task_id:
            store.drop_task(task_id)
    return tmp_path / "copy"


def rewrite(store: Path, kind: str, change: Callable[[dict[str, Any]], None]) -> None:
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


def test_a_good_store_passes_offline_with_an_empty_cache(
    copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COMPOSER_RL_CACHE", str(tmp_path / "empty"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    told: list[tuple[int, int, str]] = []
    summary = validate_store(copy, repeat=1, progress=lambda *step: told.append(step))
    assert (summary.tasks, summary.passed, summary.failed, summary.without_truth) == (1, 1, (), ())
    assert told[-1][:2] == (1, 1)  # before it the steps of the self-test, where this process has not made it


def other_edits(value: dict[str, Any]) -> None:
    value["edits"][0][2] = 10**9


def other_hidden(value: dict[str, Any]) -> None:
    value["hidden"] = []


def climbing_path(value: dict[str, Any]) -> None:
    value["files"]["../../escaped.py"] = next(iter(value["files"].values()))


def climbing_edit(value: dict[str, Any]) -> None:
    value["edits"][0][0] = "/etc/escaped.py"


def climbing_wheel(value: dict[str, Any]) -> None:
    value["wheels"][0][2] = "a-1-1/../../../escaped-py3-none-any.whl"


def no_record(value: dict[str, Any]) -> None:
    value.pop("hidden")


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("repositories", climbing_path),
        ("tasks", climbing_edit),
        ("locks", climbing_wheel),
        ("secrets", no_record),
    ],
)
def test_a_hostile_store_writes_nowhere(
    copy: Path, tmp_path: Path, kind: str, change: Callable[[dict[str, Any]], None]
) -> None:
    rewrite(copy, kind, change)
    store = TaskStore.open(copy)
    with pytest.raises(InputError, match="CR0411"):
        store.verify()
    summary = validate_store(copy, repeat=1)
    assert [row.gate for row in summary.failed] == ["damaged"]
    assert not list(tmp_path.rglob("escaped*"))


@pytest.mark.parametrize(
    ("kind", "change", "gate"),
    [("tasks", other_edits, "not-restored"), ("secrets", other_hidden, "other-tests-fail")],
)
def test_each_change_fails_a_gate(
    copy: Path, kind: str, change: Callable[[dict[str, Any]], None], gate: str
) -> None:
    rewrite(copy, kind, change)
    summary = validate_store(copy, repeat=1)
    assert summary.passed == 0
    assert [row.gate for row in summary.failed] == [gate]
    (task,) = TaskStore.open(copy).tasks()
    tests = {test.rpartition("::")[2] for test in (*task.tests.hidden, *task.tests.visible)}
    assert not any(test in summary.failed[0].detail for test in tests), "a hidden test would be named"


@pytest.mark.long
def test_a_statement_that_holds_the_code_fails(copy: Path) -> None:
    store = TaskStore.open(copy)
    body = store.golden_body(store.tasks()[0])
    rewrite(copy, "tasks", lambda value: value.update(statement="Please write clamp again."))
    assert validate_store(copy, repeat=1).failed == ()
    rewrite(copy, "tasks", lambda value: value.update(statement=f"Please write this again:\n{body}\n"))
    (failed,) = validate_store(copy, repeat=1).failed
    assert (failed.gate, failed.detail) == (
        "instruction-leaks",
        "the instruction would contain the deleted code",
    )


@pytest.mark.long
@pytest.mark.parametrize(
    ("text", "reason"),
    [("{body}", "shows-code"), ("It is checked by {hidden}.", "names-hidden-test"), ("", "")],
)
def test_what_a_model_wrote_is_read_again(copy: Path, text: str, reason: str) -> None:
    store = TaskStore.open(copy)
    (task,) = store.tasks()
    hidden = task.tests.hidden[0].rpartition("::")[2]
    told = text.format(body=store.golden_body(task), hidden=hidden)
    written = WrittenInstruction(task.task_id, "a model", f"{told}\n" + "Write clamp. " * 20)
    store.put_record(f"instructions/{task.task_id}.json", written.to_json())
    failed = validate_store(copy, repeat=1).failed
    assert [(row.gate, row.detail.rpartition(": ")[2]) for row in failed] == [
        ("instruction-leaks", one) for one in [reason] if one
    ]
    assert not any(hidden in row.detail for row in failed)


def test_code_in_the_tree_fails(copy: Path) -> None:
    """Stored bytes whose file says the body once more, in another notation, as a faulty build would keep them."""
    store = TaskStore.open(copy)
    (task,) = store.tasks()
    # What is told apart is the code itself: a second copy of it makes its lines no longer distinctive,
    # so the copy is one that only unpacking shows.
    data = gzip.compress(store.files(task, "golden")[task.path])
    digest = store.put_blob(data)
    rewrite(copy, "repositories", lambda value: value["files"].update({"tests/old.gz": digest}))
    (failed,) = validate_store(copy, repeat=1).failed
    assert (failed.gate, "tests/old.gz" in failed.detail) == ("leak", True)


def test_a_damaged_file_fails_the_task_that_needs_it(copy: Path) -> None:
    (task,) = TaskStore.open(copy).tasks()
    slug = TaskStore.open(copy).record(task.task_id).repository_record
    digest = TaskStore.open(copy).repository(slug).files[task.path]
    blob = find_blob(copy / "objects", digest)
    assert blob is not None
    blob.write_bytes(b"changed")
    summary = validate_store(copy, repeat=1)
    assert [(row.task_id, row.gate) for row in summary.failed] == [(task.task_id, "damaged")]
    assert digest in summary.failed[0].detail


@pytest.fixture(scope="module")
def twinned(build_tiny: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A task that has recorded behaviour."""
    folder = build_tiny(tmp_path_factory.mktemp("twinned") / "tasks", ["tinymath/numbers.py::clamp"])
    store = TaskStore.open(folder)
    (task,) = store.tasks()
    secret = store.secret(task.task_id)
    files = store.files(task, "golden")
    (cut,) = [cut for cut in find_body_cuts(task.path, files[task.path].decode()) if cut.symbol == "clamp"]
    bench = replace(bench_of(store, task), original=files)
    twins = build_twins(bench, [cut], eager={cut.pin}).twins
    digests = {pin: store.put_blob(twin_bytes(twin), is_packed=True) for pin, twin in twins.items()}
    assert digests
    store.put_task(store.record(task.task_id), replace(secret, twins=digests))
    return folder


def put_twin(store: TaskStore, change: Callable[[Twin], Twin]) -> None:
    (task,) = store.tasks()
    ((pin, twin),) = store.twins(task).items()
    digests = {pin: store.put_blob(twin_bytes(change(twin)), is_packed=True)}
    store.put_task(store.record(task.task_id), replace(store.secret(task.task_id), twins=digests))


def test_recorded_behaviour_is_judged_again(twinned: Path, tmp_path: Path) -> None:
    assert validate_store(twinned, repeat=1).failed == ()
    shutil.copytree(twinned, tmp_path / "copy")
    store = TaskStore.open(tmp_path / "copy")
    (task,) = store.tasks()
    (twin,) = store.twins(task).values()
    # One of many mutated calls: an answer is forgiven it, the golden code is not.
    other = (replace(twin.mutated[0], digest="0" * 12), *twin.mutated[1:])
    put_twin(store, lambda twin: replace(twin, mutated=other))
    (failed,) = validate_store(tmp_path / "copy", repeat=1).failed
    calls = len(twin.vectors)
    assert (failed.gate, f"{calls - 1} of {calls} calls" in failed.detail) == ("golden-fails", True)
    assert "clamp" not in failed.detail


def test_a_hidden_test_in_the_visible_tree_fails(copy: Path) -> None:
    """The tests themselves would all do as they did."""
    assert TaskStore.open(copy).tasks()[0].tests.hidden
    rewrite(copy, "tasks", lambda value: value.update(visible_edits=[]))
    assert [row.gate for row in validate_store(copy, repeat=1).failed] == ["hidden-shown"]


@pytest.mark.long
def test_a_suite_that_changes_its_mind_fails(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole suite without the code is run every time: what happens in the second run alone is seen."""
    (task,) = TaskStore.open(copy).tasks()
    real, runs = gates.failing_of, 0

    def failing_of(*args: Any) -> frozenset[str]:
        nonlocal runs
        runs += 1
        return real(*args) | ({task.tests.pass_to_pass[0]} if runs == 2 else set())

    monkeypatch.setattr(gates, "failing_of", failing_of)
    assert validate_store(copy, repeat=1).failed == ()
    runs = 0
    (failed,) = validate_store(copy, repeat=3).failed
    assert (failed.gate, runs) == ("other-tests-fail", 2)
    assert failed.detail == "1 tests differ from the stored ones"


def without_hidden(store: TaskStore) -> str:
    """The hidden tests of a task become visible ones, as if no test could be hidden; the id of the task."""
    (task,) = store.tasks()
    record, secret = store.record(task.task_id), store.secret(task.task_id)
    changes = {"visible": task.fail_to_pass, "visible_edits": record.test_edits}
    store.put_task(replace(record, **changes), replace(secret, hidden=(), withheld=(), twins=None))
    return task.task_id


@pytest.mark.long
def test_a_task_without_a_truth_is_named(copy: Path) -> None:
    task_id = without_hidden(TaskStore.open(copy))
    summary = validate_store(copy, repeat=1)
    assert (summary.failed, summary.without_truth) == ((), (task_id,))


def test_a_task_that_lost_its_truth_fails(copy: Path) -> None:
    """Strength is measured only by builds that refuse what has no truth."""
    store = TaskStore.open(copy)
    task_id = without_hidden(store)
    strength = {"mutants": 2, "killed_visible": 1, "killed_all": 2}
    store.put_task(replace(store.record(task_id), strength=strength), store.secret(task_id))
    (failed,) = validate_store(copy, repeat=1).failed
    assert (failed.task_id, failed.gate) == (task_id, "no-truth")


@pytest.mark.long
def test_recorded_behaviour_that_a_constant_passes_fails(twinned: Path, tmp_path: Path) -> None:
    """Of all calls of clamp those that give 0 are left, so ``return 0`` does what was recorded."""
    shutil.copytree(twinned, tmp_path / "copy")
    store = TaskStore.open(tmp_path / "copy")
    (task,) = store.tasks()
    (twin,) = store.twins(task).values()
    ((report,), _) = play(
        store.files(task, "golden"),
        store.environment(task),
        [Job(twin, "constants", {"constants": ["0"]})],
        timeout_seconds=60,
    )
    zero = [vector for index, vector in enumerate(twin.vectors) if report.digests.get(index) == vector.digest]
    assert 2 <= len(zero) < len(twin.vectors)
    put_twin(store, lambda twin: replace(twin, recorded=tuple(zero[:1]), mutated=tuple(zero[1:])))
    (failed,) = validate_store(tmp_path / "copy", repeat=1).failed
    assert (failed.gate, failed.detail) == ("stub-passes", "the recorded behaviour is there with return 0")


@pytest.mark.long
def test_recorded_behaviour_that_a_table_passes_fails(twinned: Path, tmp_path: Path) -> None:
    """Without changed calls a table of the recorded ones is all that there is to know."""
    shutil.copytree(twinned, tmp_path / "copy")
    put_twin(TaskStore.open(tmp_path / "copy"), lambda twin: replace(twin, mutated=()))
    (failed,) = validate_store(tmp_path / "copy", repeat=1).failed
    assert failed.gate == "lookup-passes"
    assert "clamp" not in failed.detail
