"""A SWE-bench set goes through our gates: what we export comes back as the same tasks; bad rows are named."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from small_trees import commit_all, write_tree

from composer_replication.errors import InputError, UsageError
from composer_replication.run_folder import read_jsonl
from composer_replication.tasks import swebench
from composer_replication.tasks.gates import GateFailed
from composer_replication.tasks.instructions import write_instruction
from composer_replication.tasks.intake.sources import open_source
from composer_replication.tasks.patches import make_patch
from composer_replication.tasks.store import TaskStore
from composer_replication.tasks.swebench import (
    KEYS,
    Instance,
    base_source,
    import_swebench,
    make_deletion,
    propose,
    read_instances,
    write_instances,
)
from composer_replication.tasks.validate import validate_store

Row = dict[str, Any]
SOURCE = "def double(x):\n    return 2 * x\n\n\ndef triple(x):\n    return 3 * x\n"
BROKEN = "def double(x):\n    return x\n\n\ndef triple(x):\n    return 3 * x\n"
TESTS = (
    "from planted import double, triple\n\n\ndef test_double():\n    assert double(4) == 8\n\n\n"
    "def test_triple():\n    assert triple(4) == 12\n"
)
OLD_TESTS = "from planted import triple\n\n\ndef test_triple():\n    assert triple(4) == 12\n"
BASE = {"planted/__init__.py": BROKEN, "tests/test_planted.py": OLD_TESTS}
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def patch_of(old: Mapping[str, str], new: Mapping[str, str]) -> str:
    return make_patch(
        {name: text.encode() for name, text in old.items()},
        {name: text.encode() for name, text in new.items()},
    )


def row(**changes: object) -> Row:
    """A row that is a task, against ``BASE``."""
    return {
        "instance_id": "people__planted-1",
        "repo": "people/planted",
        "base_commit": COMMIT,
        "patch": patch_of({"planted/__init__.py": BROKEN}, {"planted/__init__.py": SOURCE}),
        "test_patch": patch_of({"tests/test_planted.py": OLD_TESTS}, {"tests/test_planted.py": TESTS}),
        "FAIL_TO_PASS": json.dumps(["tests/test_planted.py::test_double"]),
        "PASS_TO_PASS": json.dumps(["tests/test_planted.py::test_triple"]),
        "problem_statement": "double(4) gives 4.",
        **changes,
    }


def write_rows(path: Path, *rows: Row) -> Path:
    path.write_text("".join(json.dumps(one) + "\n" for one in rows))
    return path


@pytest.fixture
def base(make_project: Callable[[Mapping[str, str]], Path]) -> Path:
    """A folder of repositories that has the base of ``row``."""
    root = make_project(BASE)
    folder = root.parent / "repositories"
    folder.mkdir()
    shutil.move(root, folder / "people__planted")
    return folder


# --- round trip -----------------------------------------------------------------------


@pytest.mark.long
def test_what_we_export_comes_back_as_the_same_tasks(tiny_store: TaskStore, tmp_path: Path) -> None:
    exported = tmp_path / "set.jsonl"
    assert write_instances(tiny_store, exported, with_golden=True) == 4
    for one in map(json.loads, exported.read_text().splitlines()):
        folder = tmp_path / "repositories" / f"tinymath-{one['base_commit']}"
        tiny_store.write_tree(tiny_store.get(one["instance_id"]), folder, view="rollout")
    summary = import_swebench(
        exported,
        tmp_path / "store",
        repositories=tmp_path / "repositories",
        with_truth=False,  # as the store that was exported
    )
    assert (summary.tasks, summary.candidates, dict(summary.rejected)) == (4, 4, {})
    store = TaskStore.open(tmp_path / "store")
    store.verify()
    assert len(store.repositories()) == 1
    assert store.repositories()[0].repository.startswith("tinymath==1.0+")
    found = {store.record(task.task_id).instance_id: task for task in store.tasks()}
    for task in tiny_store.tasks():
        other = found[task.task_id]
        assert (other.granularity, other.removal, other.symbol) == ("feature", "whole", task.symbol)
        assert other.fail_to_pass == task.fail_to_pass
        assert store.files(other, "golden") == tiny_store.files(task, "golden")
        broken, ours = store.files(other, "hidden"), tiny_store.files(task, "hidden")
        assert broken[task.path] == ours[task.path]
        assert broken == ours
        statement = store.record(other.task_id).statement
        assert statement == write_instruction(tiny_store, task)
        assert write_instruction(store, other).startswith(statement.strip())
    assert validate_store(tmp_path / "store", repeat=1).failed == ()


def test_rows_without_a_repository_leave_what_a_store_holds(tiny_store: TaskStore, tmp_path: Path) -> None:
    shutil.copytree(tiny_store.root, tmp_path / "store")
    (tmp_path / "repositories").mkdir()
    rows = write_rows(tmp_path / "set.jsonl", row(base_commit="1.0"))
    with pytest.raises(UsageError, match="CR0231"):
        import_swebench(rows, tmp_path / "store", repositories=tmp_path / "repositories")
    assert TaskStore.open(tmp_path / "store").task_ids() == tiny_store.task_ids()


@pytest.mark.long
def test_a_clone_gives_the_base_commit_and_a_pure_addition_is_a_task(tmp_path: Path) -> None:
    """The clone has moved on since; the patch adds a whole file, which is removed again."""
    clone = tmp_path / "repositories" / "planted"
    old = {
        "pyproject.toml": '[project]\nname = "planted"\nversion = "1.0"\n',
        "planted/__init__.py": "def triple(x):\n    return 3 * x\n",
        "tests/test_planted.py": OLD_TESTS,
    }
    write_tree(clone, old)
    commits = []
    for number in range(2):
        (clone / "planted" / "later.py").write_text(f"x = {number}\n" * number)
        commit_all(clone)
        head = ["git", "-C", str(clone), "rev-parse", "HEAD"]
        done = subprocess.run(head, check=True, capture_output=True, text=True)
        commits.append(done.stdout.strip())
    added = {"planted/twice.py": "def double(x):\n    return 2 * x\n"}
    tests = {
        "tests/test_twice.py": "def test_double():\n    from planted.twice import double\n    assert double(4) == 8\n"
    }
    one = row(
        base_commit=commits[0],
        patch=patch_of({}, {**added, "docs/more.rst": "outside of any task tree\n"}),
        test_patch=patch_of({}, tests),
        FAIL_TO_PASS=["tests/test_twice.py::test_double"],
        PASS_TO_PASS=["tests/test_planted.py::test_triple"],
    )
    path = write_rows(tmp_path / "set.jsonl", one)
    summary = import_swebench(path, tmp_path / "store", repositories=tmp_path / "repositories")
    assert (summary.tasks, dict(summary.rejected)) == (1, {}), summary.examples
    store = TaskStore.open(tmp_path / "store")
    (task,) = store.tasks()
    assert task.removed_files == ("planted/twice.py",)
    assert store.files(task, "golden")["planted/later.py"] == b""
    assert "planted/twice.py" not in store.files(task, "rollout")


# --- rows that are no tasks -------------------------------------------------------------


@pytest.mark.long
def test_bad_rows_are_counted_and_named_and_the_others_go_on(base: Path, tmp_path: Path) -> None:
    same = {"planted/__init__.py": BROKEN}
    rows = [
        row(),
        row(instance_id="unknown", repo="planet/mars", base_commit="v1"),
        row(
            instance_id="stale",
            patch=patch_of({"planted/__init__.py": "other\n"}, {"planted/__init__.py": "x\n"}),
        ),
        row(instance_id="climbs", patch=patch_of({}, {"evil.py": "x\n"}).replace("evil.py", "../../evil.py")),
        row(instance_id="wrong", FAIL_TO_PASS=json.dumps(["tests/test_planted.py::test_triple"])),
        row(instance_id="breaks", PASS_TO_PASS=json.dumps(["tests/test_planted.py::test_double"])),
        row(instance_id="empty", patch=""),
        row(instance_id="constant", patch=patch_of(same, {"planted/__init__.py": BROKEN + "X = 1\n"})),
        row(instance_id="tells", problem_statement="Write this:\n\n    return 2 * x\n"),
        row(instance_id="again", problem_statement="The same change in other words."),
    ]
    summary = import_swebench(
        write_rows(tmp_path / "set.jsonl", *rows), tmp_path / "store", repositories=base
    )
    assert dict(summary.rejected) == {
        "no-function": 1,
        "no-repository": 1,
        "nothing-to-undo": 2,
        "other-tests-fail": 2,
        "patch-fails": 1,
        "statement-shows-code": 1,
    }
    assert (summary.tasks, summary.valid, summary.candidates) == (2, 2, 10)
    store = TaskStore.open(tmp_path / "store")
    statements = {one.instance_id: one.statement for one in map(store.record, store.task_ids())}
    assert statements["again"] == rows[-1]["problem_statement"] != statements[rows[0]["instance_id"]]
    decisions = {one["pin"]: one for one in read_jsonl(tmp_path / "store/journal.jsonl")}
    assert set(decisions) == {one["instance_id"] for one in rows}
    assert "patch failed: planted/__init__.py" in decisions["stale"]["detail"]
    assert "tests/test_planted.py::test_triple" in decisions["wrong"]["detail"]
    assert "1 tests should pass" in decisions["breaks"]["detail"]
    assert "planet/mars" in decisions["unknown"]["detail"]
    assert not (tmp_path / "evil.py").exists()


@pytest.mark.long
def test_an_unusable_repository_counts_once_for_each_row(base: Path, tmp_path: Path) -> None:
    red = TESTS.replace("== 8", "== 9").replace("== 12", "== 13")
    tests = patch_of({"tests/test_planted.py": OLD_TESTS}, {"tests/test_planted.py": red})
    path = write_rows(tmp_path / "set.jsonl", row(test_patch=tests), row(instance_id="two", test_patch=tests))
    summary = import_swebench(path, tmp_path / "store", repositories=base)
    assert (summary.tasks, summary.candidates, dict(summary.rejected)) == (0, 2, {"red-baseline": 2})


# --- deletions from patches ---------------------------------------------------------------


def test_the_broken_tree_is_the_base_with_the_test_patch(base: Path, tmp_path: Path) -> None:
    ((instance,), _) = read_instances(write_rows(tmp_path / "set.jsonl", row()))
    source, deletion = propose(instance, open_source(str(base / "people__planted")), {})
    assert source.files["planted/__init__.py"].decode() == SOURCE
    assert source.files["tests/test_planted.py"].decode() == TESTS
    (edit,) = deletion.edits
    assert SOURCE[: edit.start] + edit.text + SOURCE[edit.end :] == BROKEN
    assert [cut.symbol for cut in deletion.bodies] == ["double"]
    assert deletion.pin == "planted/__init__.py::double@feature/whole"


@pytest.mark.parametrize(
    ("original", "broken", "reason"),
    [
        ({"a.py": b"x\n"}, {"a.py": b"x\n"}, "nothing-to-undo"),
        ({"tests/test_a.py": b"x\n"}, {"tests/test_a.py": b"y\n"}, "nothing-to-undo"),
        ({"a.py": b"x\n"}, {"a.py": b"x\n", "gone.py": b"x\n"}, "nothing-to-undo"),
        ({"a.py": b"\xff\n"}, {"a.py": b"x\n"}, "not-text"),
        ({"a.py": b"x\n"}, {"a.py": b"\xff\n"}, "not-text"),
        ({"new.py": b"\xff\n"}, {}, "not-text"),
        ({"a.py": b"X = 1\n"}, {"a.py": b"X = 2\n"}, "no-function"),
    ],
)
def test_what_is_no_deletion(original: dict[str, bytes], broken: dict[str, bytes], reason: str) -> None:
    with pytest.raises(GateFailed) as caught:
        make_deletion(original, broken)
    assert caught.value.reason == reason


# --- where a base is looked for -------------------------------------------------------------


def instance(**changes: str) -> Instance:
    return Instance(**{"instance_id": "i", "repo": "people/planted", "base_commit": COMMIT, "patch": "", "test_patch": "", "fail_to_pass": frozenset(), "pass_to_pass": frozenset(), "problem_statement": "", **changes})  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [
        "people__planted", "planted", f"planted-{COMMIT}", f"people__planted-{COMMIT[:12]}",
    ],
)  # fmt: skip
def test_names_of_folders_and_archives(name: str, tmp_path: Path) -> None:
    (tmp_path / f"{name}.tar.gz").touch()
    assert base_source(instance(), tmp_path) == str(tmp_path / f"{name}.tar.gz")
    (tmp_path / name).mkdir()
    assert base_source(instance(), tmp_path) == str(tmp_path / name)


def test_a_name_with_the_commit_wins_and_a_clone_is_asked_for_it(tmp_path: Path) -> None:
    (tmp_path / "planted" / ".git").mkdir(parents=True)
    assert base_source(instance(), tmp_path) == f"git+file://{tmp_path}/planted@{COMMIT}"
    (tmp_path / f"planted-{COMMIT}").mkdir()
    assert base_source(instance(), tmp_path) == str(tmp_path / f"planted-{COMMIT}")


# --- files ------------------------------------------------------------------------------------


def test_three_kinds_of_files_say_the_same(tmp_path: Path) -> None:
    rows = [row(), row(instance_id="b", FAIL_TO_PASS=[], PASS_TO_PASS=["t"])]
    lines, _ = read_instances(write_rows(tmp_path / "a.jsonl", *rows))
    for name in ("a.json", "list.jsonl"):
        (tmp_path / name).write_text(json.dumps(rows, indent=1))
    (tmp_path / "windows.jsonl").write_bytes((tmp_path / "a.jsonl").read_bytes().replace(b"\n", b"\r\n"))
    texts = [rows[0], {**rows[1], "FAIL_TO_PASS": "[]", "PASS_TO_PASS": json.dumps(["t"])}]
    pq.write_table(pa.Table.from_pylist(texts), tmp_path / "a.parquet")
    for name in ("a.json", "list.jsonl", "windows.jsonl", "a.parquet"):
        assert read_instances(tmp_path / name) == (lines, {})
    assert lines[0].fail_to_pass == {"tests/test_planted.py::test_double"}
    # Columns of bytes, as some writers make them.
    columns = {key: [value.encode() if isinstance(value, str) else value] for key, value in rows[0].items()}
    pq.write_table(pa.table(columns), tmp_path / "bytes.parquet")
    assert read_instances(tmp_path / "bytes.parquet") == (lines[:1], {})
    ((other,), _) = read_instances(write_rows(tmp_path / "b.jsonl", row(test_patch=None)))
    assert other.test_patch == ""


TWO = ['tests/test_a.py::test_x[it\'s, "so"]', "tests/test_a.py::test_y"]


@pytest.mark.parametrize(
    "told",
    [
        TWO, json.dumps(TWO), str(TWO), str(tuple(TWO)), f" {TWO}\n", f"{{{TWO[0]!r}, {TWO[1]!r},}}",
    ],
)  # fmt: skip
def test_lists_are_read_as_python_prints_them_and_names_in_any_case(told: object, tmp_path: Path) -> None:
    odd = row(FAIL_TO_PASS=told, PASS_TO_PASS=None)
    lower = {key.lower(): value for key, value in odd.items()}
    for one in (odd, lower):
        ((instance,), unreadable) = read_instances(write_rows(tmp_path / "set.jsonl", one))
        assert (instance.fail_to_pass, instance.pass_to_pass, unreadable) == (frozenset(TWO), frozenset(), {})


def test_a_list_as_python_prints_it_may_have_quotes_in_its_names(tmp_path: Path) -> None:
    names = ["tests/test_a.py::test_x[' ' \" \"]", "tests/test_a.py::test_y"]
    ((instance,), _) = read_instances(write_rows(tmp_path / "set.jsonl", row(FAIL_TO_PASS=str(names))))
    assert instance.fail_to_pass == frozenset(names)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{broken\n", "line 1: it is not JSON"),
        ("[1]\n", "row 1: it is not a JSON object"),
        ("\n", "it holds no rows"),
        (
            json.dumps(row(patch=3)),
            "line 1 (people__planted-1): patch cannot be used: Input should be a valid string",
        ),
        (json.dumps(row(patch="\ud800")), "surrogates not allowed"),
        *(
            (json.dumps(row(FAIL_TO_PASS=odd)), "fail_to_pass cannot be used")
            for odd in ("test_a", "['a', x]", "['a", "[1]", "{[]}", {"a": 1})
        ),
        (
            json.dumps(row(FAIL_TO_PASS=f"[{TWO[0]!r}\n {TWO[1]!r}]")),
            "fail_to_pass cannot be used",
        ),  # as numpy prints it
        (json.dumps(row(repo="../../etc")), "repo is no name"),
        (json.dumps(row(repo="a/b/c")), "repo is no name"),
        (json.dumps(row(base_commit="--upload-pack=x")), "base_commit is no name"),
        (json.dumps(row(instance_id="a/b")), "instance_id is no name"),
        (json.dumps(row(FAIL_TO_PASS=["\ud800"])), "surrogates not allowed"),
        ("[" * 100_000, "it is not JSON"),
        *((json.dumps({k: v for k, v in row().items() if k != key}), f"it has no {key}") for key in KEYS),
    ],
)
def test_a_file_that_is_no_set_is_refused(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "set.jsonl").write_text(text)
    with pytest.raises(InputError, match="CR0460") as caught:
        read_instances(tmp_path / "set.jsonl")
    assert said in caught.value.message
    assert caught.value.where == str(tmp_path / "set.jsonl")


def test_bytes_that_are_no_set_are_refused(tmp_path: Path) -> None:
    for name, data in (("a.jsonl", b"\xff\xfe"), ("a.parquet", b"no"), ("a.json", b"[{]")):
        (tmp_path / name).write_bytes(data)
        for path in (tmp_path / name, tmp_path / "gone" / name):
            with pytest.raises(InputError, match="CR0460"):
                read_instances(path)


def test_an_export_without_golden_cannot_be_imported(tiny_store: TaskStore, tmp_path: Path) -> None:
    write_instances(tiny_store, tmp_path / "public.jsonl", with_golden=False)
    rows = [json.loads(line) for line in (tmp_path / "public.jsonl").read_text().splitlines()]
    assert not any("patch" in one for one in rows)
    with pytest.raises(InputError, match=r"line 1 .*: it has no patch"):
        read_instances(tmp_path / "public.jsonl")


def test_a_section_of_another_form_is_not_passed_over() -> None:
    """``git diff --no-prefix``: that it does not apply is said, in place of a patch without it."""
    patch = "diff --git planted.py planted.py\n--- planted.py\n+++ planted.py\n@@ -1 +1 @@\n-a\n+b\n"
    assert swebench._inside(patch, {"planted.py": b"a\n"}) == patch
