"""A store keeps what it was given, says what it holds, and notices every change."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard

from composer_replication.errors import InputError
from composer_replication.records import Task
from composer_replication.tasks.planning.body_cuts import fill
from composer_replication.tasks.store import TaskStore
from composer_replication.tasks.store_manifest import STORE_VERSION, compress, decompress, read_content


def find(store: TaskStore, symbol: str) -> Task:
    return next(task for task in store.tasks() if task.symbol == symbol)


@pytest.fixture
def copy(tiny_store: TaskStore, tmp_path: Path) -> Path:
    shutil.copytree(tiny_store.root, tmp_path / "copy")
    return tmp_path / "copy"


def test_tasks_are_whole(tiny_store: TaskStore, tiny_project: Path) -> None:
    tasks = tiny_store.tasks()
    assert [task.task_id for task in tasks] == sorted(tiny_store.task_ids())
    assert {task.symbol for task in tasks} == {"clamp", "sign", "initials", "Vector.length"}
    for task in tasks:
        assert (task.repository, task.granularity, task.removal) == ("tinymath==1.0", "function", "body")
        assert task.task_id.startswith("tinymath-1.0--tinymath.")
        assert task.task_id == task.task_id.translate({ord(c): None for c in '/\\: *?"<>|'})
        tests = task.tests
        assert tests.visible
        assert tests.pass_to_pass
        assert not set(tests.visible) & set(tests.hidden)
        assert not set(tests.pass_to_pass) & set(task.fail_to_pass)
        assert task == tiny_store.get(task.task_id)
        restored = fill(tiny_store.broken_text(task), task.hole, tiny_store.golden_body(task))
        assert restored.encode() == (tiny_project / task.hole.path).read_bytes()


def test_parametrisations_stay_together_and_a_single_function_is_visible(tiny_store: TaskStore) -> None:
    sign = find(tiny_store, "sign")
    assert len(sign.tests.visible) == 3
    assert not sign.has_hidden_tests
    clamp = find(tiny_store, "clamp")
    assert [tiny_store.content(task).has_hidden_tests for task in (sign, clamp)] == [False, True]
    assert (len(clamp.tests.visible), len(clamp.tests.hidden)) in ((1, 2), (2, 1))


def test_views(tiny_store: TaskStore, tmp_path: Path) -> None:
    task = find(tiny_store, "clamp")
    for view in ("rollout", "visible", "hidden", "golden"):
        tiny_store.write_tree(task, tmp_path / view, view=view)
    read = {
        view: (tmp_path / view / "tests/test_numbers.py").read_text()
        for view in ("rollout", "visible", "hidden", "golden")
    }
    assert read["rollout"] == read["visible"]
    assert read["hidden"] == read["golden"]
    hidden = [node_id.rpartition("::")[2] for node_id in task.tests.hidden]
    visible = [node_id.rpartition("::")[2] for node_id in task.tests.visible]
    assert all(f"def {name}(" in read["hidden"] and f"def {name}(" not in read["rollout"] for name in hidden)
    assert all(f"def {name}(" in read["rollout"] for name in visible)
    broken = tiny_store.broken_text(task)
    for view in ("rollout", "visible", "hidden"):
        assert (tmp_path / view / task.hole.path).read_text() == broken
    assert "return min(x, high)" in (tmp_path / "golden" / task.hole.path).read_text()
    assert "return min(x, high)" not in broken


def test_content_has_everything_and_of_tests_those_that_fail_without_the_golden(
    tiny_store: TaskStore,
) -> None:
    task = find(tiny_store, "initials")
    content = tiny_store.content(task)
    assert (content.task_id, content.repository, content.symbol) == (
        task.task_id,
        task.repository,
        "initials",
    )
    assert "raise NotImplementedError" in content.broken_tree["tinymath/text.py"]
    assert "test_one_word" in content.tests["tests/test_text.py"]
    assert not set(content.broken_tree) & set(content.tests)
    assert "upper()" in content.golden
    assert {test.rpartition("::")[2] for test in task.fail_to_pass} == {"test_two_words", "test_one_word"}
    assert 'assert initials("plato") == "P"' in content.own_tests
    assert 'assert initials("ada lovelace") == "AL"' in content.own_tests
    assert "palindrome" not in content.own_tests
    assert "# One word is a name as well." not in content.own_tests


def test_public_records_hold_no_secret(tiny_store: TaskStore) -> None:
    for task in tiny_store.tasks():
        public = read_content(tiny_store.root / "tasks" / f"{task.task_id}.json.zst").decode()
        assert tiny_store.golden_body(task).strip().splitlines()[0] not in public
        for node_id in task.tests.hidden:
            assert node_id.rpartition("::")[2] not in public


def test_an_unknown_id_names_the_nearest(tiny_store: TaskStore) -> None:
    wanted = find(tiny_store, "sign").task_id
    with pytest.raises(InputError) as caught:
        tiny_store.get(wanted[:-2])
    assert caught.value.code == "CR0412"
    assert wanted in caught.value.fix


def test_a_store_that_is_moved_is_the_same_store_and_a_record_that_its_manifest_does_not_name_no_task(
    tiny_store: TaskStore, copy: Path
) -> None:
    known = tiny_store.task_ids()
    shutil.copy(copy / "tasks" / f"{known[0]}.json.zst", copy / "tasks" / "stray.json.zst")
    moved = TaskStore.open(copy)
    moved.verify()
    assert moved.fingerprint == tiny_store.fingerprint
    assert (moved.task_ids(), moved.tasks()) == (known, tiny_store.tasks())


def changed(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[:-2] + bytes([data[-2] ^ 1]) + data[-1:])


@pytest.mark.parametrize("kind", ["tasks", "secrets", "repositories", "locks", "objects"])
@pytest.mark.parametrize("damage", [changed, Path.unlink])
def test_every_damage_is_found_and_named(copy: Path, kind: str, damage: Callable[[Path], None]) -> None:
    victim = min(path for path in (copy / kind).rglob("*") if path.is_file())
    damage(victim)
    with pytest.raises(InputError) as caught:
        TaskStore.open(copy).verify()
    assert caught.value.code == "CR0411"
    assert caught.value.where == str(victim)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda data: data[:-5], "it is not zstd data"),
        (lambda _: b"{}", "it is not zstd data"),
        (lambda data: compress(decompress(data) + b" "), "the manifest says"),
    ],
)
def test_what_is_wrong_with_a_record_is_said(copy: Path, damage: Callable[[bytes], bytes], said: str) -> None:
    victim = min((copy / "secrets").iterdir())
    victim.write_bytes(damage(victim.read_bytes()))
    with pytest.raises(InputError, match="CR0411") as caught:
        TaskStore.open(copy).verify()
    assert said in caught.value.message
    assert caught.value.where == str(victim)


def test_records_are_compressed_and_hashed_as_they_are(copy: Path) -> None:
    manifest = json.loads((copy / "manifest.json").read_text())
    kinds = ("tasks", "secrets", "repositories", "locks")
    on_disk = {path.relative_to(copy).as_posix() for kind in kinds for path in (copy / kind).iterdir()}
    assert on_disk == {f"{name}.zst" for name in manifest["records"]}
    texts = {name: zstandard.decompress((copy / name).read_bytes()) for name in on_disk}
    for name, text in texts.items():
        assert hashlib.sha256(text).hexdigest() == manifest["records"][name.removesuffix(".zst")]
        assert json.loads(text)["schema_version"] == 1
    assert sum((copy / name).stat().st_size for name in on_disk) < 0.7 * sum(map(len, texts.values()))


@pytest.mark.parametrize("version", [5, 6])
def test_a_store_of_a_version_before_is_read_and_built_on(
    copy: Path, tiny_store: TaskStore, version: int
) -> None:
    manifest = copy / "manifest.json"
    sandbox = {"backend": "b", "python": "3.1", "platform": "p"}
    before = {"store_version": version, "build": {"is_complete": True}, "proved_by": [sandbox]}
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), **before}))
    old = TaskStore.open(copy)
    assert old.proved_by == ("b (Python 3.1, p)",)
    old.verify()
    assert old.tasks() == tiny_store.tasks()
    old.drop_task(old.task_ids()[0])
    old.settle()
    assert TaskStore.open(copy).tasks() == tiny_store.tasks()[1:]
    assert json.loads(manifest.read_text())["store_version"] == STORE_VERSION


@pytest.mark.parametrize(
    "text",
    [
        None,
        "",
        "{",
        "[]",
        "{}",
        '{"schema_version": 1, "records": {"tasks/x.json": "0"}, "fingerprint": "0"}',
    ],
)
def test_a_damaged_manifest_or_none_is_found(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(InputError, match="CR0411"):
        TaskStore.open(tmp_path)


@pytest.mark.parametrize(("version", "said"), [(8, "8"), (4, "4"), ("7", "7"), (None, "1")])
def test_a_store_of_another_version_is_not_called_damaged(copy: Path, version: object, said: str) -> None:
    manifest = copy / "manifest.json"
    value = {**json.loads(manifest.read_text()), "store_version": version}
    del value["records"]  # another version may lay it out otherwise
    manifest.write_text(json.dumps({name: each for name, each in value.items() if each is not None}))
    with pytest.raises(InputError, match="CR0411") as caught:
        TaskStore.open(copy)
    wanted = f"the version of the task store is {said}, this program reads 5, 6, 7."
    assert (
        wanted == caught.value.message
        and "upgrade" in caught.value.fix
        and "build it again" in caught.value.fix
    )
