"""Parquet files say what the records say, hold no secret in public, and are noticed when changed."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from dataclasses import replace
from io import BytesIO
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from composer_replication.errors import InputError, MissingError
from composer_replication.tasks import parquet
from composer_replication.tasks.intake.licences import Licence
from composer_replication.tasks.parquet import (
    TASKS_FILE,
    parquet_bytes,
    read_parquet,
    write_parquet,
)
from composer_replication.tasks.patches import apply_patch
from composer_replication.tasks.store import TaskStore
from composer_replication.tasks.swebench.swebench_files import write_instances
from composer_replication.tasks.swebench_rows import PUBLIC_COLUMNS, SECRET_COLUMNS, tree_sha256
from composer_replication.tasks.validate import validate_store

SECRETS_FILE = "secrets.parquet"
"""In stores of version 3 and earlier."""
ROW: dict[str, str | int | None] = dict.fromkeys(PUBLIC_COLUMNS, "x") | {"num_body_lines": 1}


@pytest.fixture
def copy(tiny_store: TaskStore, tmp_path: Path) -> TaskStore:
    shutil.copytree(tiny_store.root, tmp_path / "copy")
    return TaskStore.open(tmp_path / "copy")


@pytest.fixture(scope="module")
def secret_file(tiny_store: TaskStore, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("export") / SECRETS_FILE
    assert write_instances(tiny_store, path, with_golden=True, as_parquet=True) == 4
    return path


def rows(path: Path) -> dict[str, dict[str, object]]:
    return {row["instance_id"]: row for row in pq.read_table(path).to_pylist()}


def test_a_build_leaves_the_public_file_alone_and_names_it(tiny_store: TaskStore, secret_file: Path) -> None:
    manifest = json.loads((tiny_store.root / "manifest.json").read_text())
    file = tiny_store.root / TASKS_FILE
    assert manifest["derived"] == {TASKS_FILE: hashlib.sha256(file.read_bytes()).hexdigest()}
    assert list(tiny_store.root.rglob("*.parquet")) == [file]
    assert list(rows(file)) == list(rows(secret_file)) == tiny_store.task_ids()
    assert pq.read_schema(file).names == list(PUBLIC_COLUMNS)
    assert pq.read_schema(secret_file).names == list(SECRET_COLUMNS)
    metadata = pq.read_metadata(tiny_store.root / TASKS_FILE)
    columns = [metadata.row_group(0).column(i) for i in range(metadata.num_columns)]
    assert {column.compression for column in columns} == {"ZSTD"}
    assert not any(column.is_stats_set for column in columns)  # each would hold two patches or lists whole


def test_written_twice_and_by_another_process_the_bytes_are_the_same(copy: TaskStore) -> None:
    before = (copy.root / TASKS_FILE).read_bytes()
    manifest = (copy.root / "manifest.json").read_text()
    program = (
        "import sys; from pathlib import Path; from composer_replication.tasks.store import TaskStore;"
        "from composer_replication.tasks.parquet import write_parquet;"
        "write_parquet(TaskStore.open(Path(sys.argv[1])))"
    )
    subprocess.run([sys.executable, "-c", program, str(copy.root)], check=True)
    assert (copy.root / TASKS_FILE).read_bytes() == before
    write_parquet(TaskStore.open(copy.root))
    assert (copy.root / TASKS_FILE).read_bytes() == before
    assert (copy.root / "manifest.json").read_text() == manifest


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


def test_the_columns_mean_what_swebench_means(tiny_store: TaskStore, secret_file: Path) -> None:
    public, secrets = rows(tiny_store.root / TASKS_FILE), rows(secret_file)
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


def test_the_public_file_holds_no_secret(tiny_store: TaskStore) -> None:
    public = json.dumps(list(rows(tiny_store.root / TASKS_FILE).values()))
    assert "patch" not in PUBLIC_COLUMNS
    own = rows(tiny_store.root / TASKS_FILE)
    for task in tiny_store.tasks():
        row = json.dumps(own[task.task_id])
        for node_id in task.tests.hidden:
            assert json.dumps(node_id)[1:-1] not in row
        for line in tiny_store.golden_body(task).splitlines():
            assert len(line.strip()) < 12 or json.dumps(line)[1:-1] not in public


def test_datasets_loads_both_offline(tiny_store: TaskStore, secret_file: Path, tmp_path: Path) -> None:
    from datasets import load_dataset

    for file, columns in ((tiny_store.root / TASKS_FILE, PUBLIC_COLUMNS), (secret_file, SECRET_COLUMNS)):
        loaded = load_dataset(
            "parquet", data_files=str(file), split="train", cache_dir=str(tmp_path / "cache")
        )
        assert loaded.column_names == list(columns)
        assert loaded["instance_id"][:] == tiny_store.task_ids()
        assert all(isinstance(json.loads(row["FAIL_TO_PASS"]), list) for row in loaded)


@pytest.mark.parametrize("name", [TASKS_FILE, SECRETS_FILE])
@pytest.mark.parametrize("damage", ["changed", "gone"])
def test_a_changed_or_missing_file_is_noticed(
    copy: TaskStore, secret_file: Path, name: str, damage: str
) -> None:
    if name == SECRETS_FILE:
        copy.put_derived(name, secret_file.read_bytes())  # as stores of version 3 and earlier have it
        copy.verify()
    path = copy.root / name
    if damage == "gone":
        path.unlink()
    else:
        data = path.read_bytes()
        path.write_bytes(data[:100] + bytes([data[100] ^ 1]) + data[101:])
    for notice in (copy.verify, lambda: validate_store(copy.root, repeat=1)):
        with pytest.raises(InputError, match="CR0411") as caught:
            notice()
        assert caught.value.where == str(path)


def test_what_a_model_wrote_is_the_problem_statement(copy: TaskStore) -> None:
    task_id = copy.task_ids()[0]
    copy.put_record(
        f"instructions/{task_id}.json", {"task_id": task_id, "model": "m", "text": "Please mend it."}
    )
    assert not copy.derived
    write_parquet(copy)
    statements = {name: row["problem_statement"] for name, row in rows(copy.root / TASKS_FILE).items()}
    assert statements[task_id] == "Please mend it."
    assert list(statements.values()).count("Please mend it.") == 1


def test_the_licence_is_that_of_the_record(copy: TaskStore) -> None:
    (repository,) = copy.repositories()
    assert {row["licence"] for row in rows(copy.root / TASKS_FILE).values()} == {""}
    known = replace(repository, licence=Licence("MIT", "LICENSE", "file", is_copyleft=False))
    copy.put_repository(copy.record(copy.task_ids()[0]).repository_record, known)
    write_parquet(copy)
    assert {row["licence"] for row in rows(copy.root / TASKS_FILE).values()} == {"MIT"}


def test_a_change_of_a_record_drops_the_file(copy: TaskStore) -> None:
    copy.drop_task(copy.task_ids()[0])
    assert not copy.derived
    assert not (copy.root / TASKS_FILE).exists()
    TaskStore.open(copy.root).verify()


def test_the_secret_file_of_an_earlier_version_makes_room(copy: TaskStore, secret_file: Path) -> None:
    copy.put_derived(SECRETS_FILE, secret_file.read_bytes())
    write_parquet(copy)
    assert list(copy.derived) == [TASKS_FILE]
    assert not (copy.root / SECRETS_FILE).exists()
    TaskStore.open(copy.root).verify()


def test_without_pyarrow_a_store_is_whole(copy: TaskStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet, "has_pyarrow", lambda: False)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingError, match="CR0101"):
        write_parquet(copy)
    assert copy.tasks()


def test_reading_a_store_loads_no_pyarrow(tiny_store: TaskStore) -> None:
    program = (
        "import sys; from pathlib import Path; from composer_replication.tasks.store import TaskStore;"
        "from composer_replication.tasks import build, parquet;"
        "TaskStore.open(Path(sys.argv[1])).tasks(); sys.exit('pyarrow' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program, str(tiny_store.root)], check=False).returncode == 0


def test_text_that_parquet_has_to_carry() -> None:
    row: dict[str, str | int | None] = {**ROW, "problem_statement": None, "symbol": "ünïcode\n\0\r\n"}
    assert read_parquet(parquet_bytes([row], PUBLIC_COLUMNS)) == [row]
    assert read_parquet(parquet_bytes([], PUBLIC_COLUMNS)) == []
    with pytest.raises(ValueError, match="arquet"):
        read_parquet(b"no")
    with pytest.raises(KeyError):
        parquet_bytes([{"instance_id": "x"}], PUBLIC_COLUMNS)
    assert pq.read_table(BytesIO(parquet_bytes([ROW], PUBLIC_COLUMNS))).num_rows == 1
