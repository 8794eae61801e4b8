"""Rows in the shape of SWE-bench say what the records say, and hold no secret in public."""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from pathlib import Path

import pytest

from composer_replication.errors import MissingError
from composer_replication.tasks.patches import apply_patch
from composer_replication.tasks.store import TaskStore
from composer_replication.tasks.swebench import (
    OWN_COLUMNS,
    iter_rows,
    read_instances,
    tree_sha256,
    write_instances,
)

COLUMNS = [
    *"instance_id repo base_commit problem_statement hints_text test_patch FAIL_TO_PASS PASS_TO_PASS".split(),
    *"version created_at environment_setup_commit".split(),
    *OWN_COLUMNS,
]
SECRET = ["patch", "broken_patch", "hidden_tests", "paid_tests"]


def export(store: TaskStore, folder: Path, *, with_golden: bool) -> Path:
    assert write_instances(store, folder / "a.jsonl", with_golden=with_golden) == 4
    return folder / "a.jsonl"


@pytest.fixture(scope="module")
def public_file(tiny_store: TaskStore, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export(tiny_store, tmp_path_factory.mktemp("export"), with_golden=False)


@pytest.fixture(scope="module")
def secret_file(tiny_store: TaskStore, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export(tiny_store, tmp_path_factory.mktemp("export"), with_golden=True)


def rows(path: Path) -> dict[str, dict[str, object]]:
    return {row["instance_id"]: row for row in map(json.loads, path.read_text().splitlines())}


def test_the_files_have_every_task(tiny_store: TaskStore, public_file: Path, secret_file: Path) -> None:
    assert list(rows(public_file)) == list(rows(secret_file)) == tiny_store.task_ids()
    for file, columns in ((public_file, COLUMNS), (secret_file, COLUMNS + SECRET)):
        assert all(list(row) == columns for row in rows(file).values())


def test_the_golden_patch_restores_the_original_tree_by_git(
    tiny_store: TaskStore, tiny_project: Path, secret_file: Path
) -> None:
    secrets = rows(secret_file)
    for task in tiny_store.tasks():
        row = secrets[task.task_id]
        base = tiny_store.files(task, "rollout")
        golden = tiny_store.files(task, "golden")
        fixed = apply_patch(base, row["patch"])
        assert fixed[task.path] == (tiny_project / task.path).read_bytes()
        assert apply_patch(fixed, row["test_patch"]) == golden
        assert apply_patch(golden, row["broken_patch"])[task.path] == base[task.path]
        digests = {path: hashlib.sha256(data).hexdigest() for path, data in base.items()}
        assert row["base_commit"] == tree_sha256(digests)
        assert bool(row["test_patch"]) is task.has_hidden_tests


def test_the_columns_mean_what_swebench_means(
    tiny_store: TaskStore, public_file: Path, secret_file: Path
) -> None:
    public, secrets = rows(public_file), rows(secret_file)
    for task in tiny_store.tasks():
        row, secret = public[task.task_id], secrets[task.task_id]
        assert (row["repo"], row["version"]) == ("tinymath", "1.0")
        assert json.loads(row["FAIL_TO_PASS"]) == sorted(task.tests.visible)
        assert json.loads(secret["FAIL_TO_PASS"]) == sorted((*task.tests.visible, *task.tests.hidden))
        assert json.loads(secret["hidden_tests"]) == sorted(task.tests.hidden)
        assert set(json.loads(row["PASS_TO_PASS"])) <= set(json.loads(secret["PASS_TO_PASS"]))
        assert not set(json.loads(secret["FAIL_TO_PASS"])) & set(json.loads(secret["PASS_TO_PASS"]))
        assert task.symbol.rpartition(".")[2] in str(row["problem_statement"])
        assert (row["symbol"], row["granularity"], row["removal"]) == (task.symbol, "function", "body")
        assert row["num_body_lines"] == task.num_body_lines
        assert (row["created_at"], row["test_patch"]) == ("", "")


def test_the_public_file_holds_no_secret(tiny_store: TaskStore, public_file: Path) -> None:
    own = rows(public_file)
    public = json.dumps(list(own.values()))
    for task in tiny_store.tasks():
        row = json.dumps(own[task.task_id])
        for node_id in task.tests.hidden:
            assert json.dumps(node_id)[1:-1] not in row
        for line in tiny_store.golden_body(task).splitlines():
            assert len(line.strip()) < 12 or json.dumps(line)[1:-1] not in public


def test_datasets_loads_both_offline(
    tiny_store: TaskStore, public_file: Path, secret_file: Path, tmp_path: Path
) -> None:
    from datasets import load_dataset

    for file, columns in ((public_file, COLUMNS), (secret_file, COLUMNS + SECRET)):
        loaded = load_dataset("json", data_files=str(file), split="train", cache_dir=str(tmp_path / "cache"))
        assert loaded.column_names == columns
        assert loaded["instance_id"][:] == tiny_store.task_ids()
        assert all(isinstance(json.loads(row["FAIL_TO_PASS"]), list) for row in loaded)


def test_what_a_model_wrote_is_the_problem_statement(tiny_store: TaskStore, tmp_path: Path) -> None:
    shutil.copytree(tiny_store.root, tmp_path / "copy")
    copy = TaskStore.open(tmp_path / "copy")
    task_id = copy.task_ids()[0]
    record = {"task_id": task_id, "model": "m", "text": "Please mend it."}
    copy.put_record(f"instructions/{task_id}.json", record)
    statements = {public["instance_id"]: public["problem_statement"] for public, _ in iter_rows(copy)}
    assert [name for name, text in statements.items() if text == record["text"]] == [task_id]


def test_parquet_without_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.parquet").write_bytes(b"no")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingError, match="CR0101"):
        read_instances(tmp_path / "a.parquet")
