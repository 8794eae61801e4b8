"""Golden code planted through every channel is found, and clean stores are clean."""

from __future__ import annotations

import base64
import gzip
import io
import tarfile
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from composer_replication.errors import SandboxFailure
from composer_replication.records import ExecResult, Task
from composer_replication.tasks.intake.environment import Environment
from composer_replication.tasks.leaks import leak_scan
from composer_replication.tasks.leaks.leak_scan import targets_of
from composer_replication.tasks.leaks.leak_search import Leak, Search, Target
from composer_replication.tasks.store import TaskStore
from composer_replication.tasks.twin import twin_run

BODY = "\n    if x < low:\n        return low\n    return min(x, high)"


@pytest.fixture(scope="module")
def task(tiny_store: TaskStore) -> Task:
    (found,) = (task for task in tiny_store.tasks() if task.symbol == "clamp")
    return found


@pytest.fixture(scope="module")
def known(tiny_store: TaskStore, task: Task) -> Target:
    (known,) = targets_of(tiny_store, task)
    return known


@pytest.fixture(scope="module")
def original(tiny_store: TaskStore, task: Task) -> bytes:
    return tiny_store.files(task, "golden")["tinymath/numbers.py"]


def zip_of(name: str, data: bytes) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(name, data)
    return out.getvalue()


def tar_of(name: str, data: bytes) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        info = tarfile.TarInfo(name)
        info.size = len(data)
        archive.addfile(info, io.BytesIO(data))
    return out.getvalue()


PLANTS: dict[str, tuple[str, Callable[[str], bytes], str]] = {
    "copy": ("tests/old_numbers.txt", str.encode, "copy"),
    "one line": ("tests/note.txt", lambda text: b"so:\n  + return min(x, high)\n", "copy"),
    "commented out": ("tests/note.py", lambda text: b"# return min(x, high)\n", "copy"),
    "zip": ("tests/data/a.zip", lambda text: zip_of("n.py", text.encode()), "archive"),
    "tar.gz": ("tests/data/a.tar.gz", lambda text: gzip.compress(tar_of("n.py", text.encode())), "archive"),
    "zip in zip": ("tests/z", lambda text: zip_of("i", zip_of("n.py", text.encode())), "archive"),
    "markdown": ("tests/a.md", lambda text: f"```\n{text}\n```".encode(), "copy"),
    "base64": ("tests/b.json", lambda text: b'["%s"]' % base64.b64encode(text.encode()), "base64"),
    "wrapped base64": ("tests/b.txt", lambda text: base64.encodebytes(text.encode()), "base64"),
}


@pytest.mark.parametrize("name", PLANTS)
def test_a_planted_file_is_found_and_the_broken_text_in_its_form_is_not(
    name: str, known: Target, original: bytes, tiny_store: TaskStore, task: Task
) -> None:
    path, make, channel = PLANTS[name]
    search = Search([known])
    found = search.search_bytes(path, make(original.decode()), in_tree=True)
    assert {(leak.task_id, leak.channel) for leak in found} == {(task.task_id, channel)}
    assert all(leak.path.startswith(path) for leak in found)
    if make(BODY) != make(""):  # else the plant is a line of its own
        assert search.search_bytes(path, make(tiny_store.broken_text(task)), in_tree=True) == set()


def test_a_compiled_module_that_lost_code_is_a_copy_of_it(known: Target, task: Task) -> None:
    search = Search([known])
    for path, data, channel in (
        ("tinymath/__pycache__/numbers.cpython-311.pyc", b"any", "pyc"),
        ("tests/a.zip", zip_of("numbers.pyc", b"any"), "archive"),
    ):
        found = search.search_bytes(path, data, in_tree=True)
        assert {(leak.task_id, leak.channel) for leak in found} == {(task.task_id, channel)}
        assert search.search_bytes(f"/usr/lib/{path}", data, in_tree=False) == set()
    assert search.search_bytes("tinymath/__pycache__/text.cpython-311.pyc", b"any", in_tree=True) == set()


def test_broken_archives_are_counted_not_passed_over(known: Target) -> None:
    search = Search([known])
    assert search.search_bytes("a.gz", gzip.compress(b"x" * 9000)[:-12], in_tree=True) == set()
    (told,) = search.not_searched
    assert told.startswith("a.gz (")


def test_short_lines_outside_the_tree_need_a_run(known: Target, original: bytes) -> None:
    search = Search([known])
    line = b"def other(x):\n    return min(x, high)\n"
    assert search.search_bytes("a.py", line, in_tree=True)
    for folder, channel in (("/usr/lib", "visible-copy"), ("/lib/site-packages", "installed")):
        (leak,) = search.search_bytes(f"{folder}/a.py", original, in_tree=False)
        assert (leak.channel, leak.path) == (channel, f"{folder}/a.py")
    for other in (line, b"x = 1\n" + b"\n".join(reversed(original.splitlines()))):
        assert search.search_bytes("/usr/lib/a.py", other, in_tree=False) == set()


def test_a_loose_object_of_git_is_read_as_what_it_holds(known: Target, tmp_path: Path) -> None:
    stored = zlib.compress(b"blob 33\0answer = 42 the ultimate answer?\n", 0)
    assert stored.endswith(b"\rx")  # its check sum
    (path := tmp_path / ".git/objects/42/de").parent.mkdir(parents=True)
    for data, num_found in ((stored, 0), (zlib.compress(b"blob 2\0x\nx\n"), 1)):
        path.write_bytes(data)
        found = Search([replace(known, lines=("x",))]).search_folder(str(tmp_path), tree=str(tmp_path))
        assert len(found) == num_found


def search_inside(
    store: TaskStore, task: Task, environment: Environment, extra: dict[str, bytes] | None = None
) -> set[Leak]:
    target = targets_of(store, task)[0]
    files = {**store.files(task, "rollout"), **(extra or {})}
    answer = leak_scan.search_inside(files, [target], environment)
    return {Leak(*leak) for leak in answer["leaks"]}


def test_what_lies_in_the_tree_is_found_inside(
    tiny_store: TaskStore, task: Task, environment: Environment, original: bytes
) -> None:
    path = "tinymath/__pycache__/numbers.cpython-311.pyc"
    extra = {path: b"compiled", "tests/a.zip": zip_of("n.py", original)}
    found = search_inside(tiny_store, task, environment, extra)
    assert {(leak.channel, leak.path) for leak in found} == {("pyc", path), ("archive", "tests/a.zip!/n.py")}


@pytest.mark.parametrize(
    ("stdout", "timed_out"), [("", False), ("", True), ('{"nonce": "other", "leaks": []}', False)]
)
def test_no_answer_is_no_clean_result(
    stdout: str, timed_out: bool, known: Target, environment: Environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = ExecResult(0, stdout, "", False, timed_out, False, 1.0)
    monkeypatch.setattr(twin_run, "run_inside", lambda *_, **__: done)
    with pytest.raises(SandboxFailure, match="CR0302"):
        leak_scan.search_inside({}, [known], environment)


def test_distinctive_lines_are_counted_by_hand(tiny_store: TaskStore) -> None:
    """Of ``sign``, ``return -1`` has no name in it: it could stand anywhere."""
    counts = {task.symbol: len(targets_of(tiny_store, task)[0].lines) for task in tiny_store.tasks()}
    assert counts == {"clamp": 3, "sign": 2, "initials": 1, "Vector.length": 1}


class TestScanOfAStore:
    """The whole scan; the walk of the system's folders, which takes long, is left to the command."""

    @pytest.fixture(autouse=True)
    def _short_walk(self, monkeypatch: pytest.MonkeyPatch) -> None:
        real = leak_scan.search_inside

        nothing = {"leaks": [], "num_files": 0, "not_searched": [], "failed_checks": []}

        def search_here(files: Any, *words: Any, **named: Any) -> object:
            return real(files, *words, **named) if files else nothing

        monkeypatch.setattr(leak_scan, "search_inside", search_here)

    @pytest.mark.long
    def test_a_clean_store_is_clean(self, tiny_store: TaskStore) -> None:
        summary = leak_scan.scan_store(tiny_store.root)
        assert (summary.tasks, summary.leaks, summary.without_distinctive_lines) == (4, (), ())
        assert summary.files_searched > 50  # the trees alone: the walk of the environment is left out

    @pytest.mark.long
    def test_a_store_whose_tree_holds_a_copy_leaks(
        self, tiny_store: TaskStore, monkeypatch: pytest.MonkeyPatch, original: bytes
    ) -> None:
        real = TaskStore.files

        def files(self: TaskStore, task: Task, view: str) -> dict[str, bytes]:
            return {**real(self, task, view), "tests/data.txt": original}

        # The copy enters the tree after the lines were told apart: as a build's mistake would do it.
        prints = {task.task_id: targets_of(tiny_store, task) for task in tiny_store.tasks()}
        monkeypatch.setattr(leak_scan, "targets_of", lambda _, task: prints[task.task_id])
        monkeypatch.setattr(TaskStore, "files", files)
        summary = leak_scan.scan_store(tiny_store.root)
        symbols = {leak.task_id.split("--")[2] for leak in summary.leaks}
        assert symbols == {"clamp", "sign"}
        in_files = {(leak.channel, leak.path) for leak in summary.leaks if not leak.path.startswith(".git/")}
        assert in_files == {("copy", "tests/data.txt")}
        assert {leak.channel for leak in summary.leaks} == {"copy", "git"}, (
            "the tree's one commit holds it, too"
        )
