"""Paths that are no good for the tasks verbs: one sentence on one line, never a bug of ours, never a wait without end."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from composer_replication.errors import InputError
from composer_replication.tasks.store import TaskStore

Command = Callable[..., Any]
TINY = Path(__file__).parents[2] / "recipes" / "tiny-cpu" / "project"
LONG = "n" * 300
DEEP = "[" * 200_000
pytestmark = pytest.mark.timeout(600)


@pytest.fixture
def odd(tmp_path: Path) -> Iterator[Path]:
    """A folder with one of each kind of what is no folder."""
    (tmp_path / "file").write_text("x")
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "broken").symlink_to("nowhere")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare").chmod(0)
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(os.path.relpath(tmp_path / "socket"))
        yield tmp_path
    (tmp_path / "bare").chmod(0o700)


ODD = (
    "file", "file/below", "fifo", "broken", "loop", "bare", "socket", "/dev/null", "nul\0name", "new\nline", LONG,
    "deep/" * 1500, os.fsdecode(b"\xff\xfe"), "~nobody-of-that-name",
)  # fmt: skip


def place(odd: Path, name: str) -> str:
    return name if name.startswith(("/", "~")) else f"{odd}/{name}"


@pytest.mark.parametrize("name", ODD, ids=lambda name: ascii(name[:20]))
def test_a_store_that_is_no_store(command: Command, odd: Path, name: str) -> None:
    store = place(odd, name)
    for words in (
        ("show", store),
        ("stats", store),
        ("validate", store),
        ("leakscan", store),
        ("split", store, "--heldout-fraction", "0.5", "--seed", "0"),
        ("export", store, "ID", "--out", odd / "new"),
        ("export", store, "--format", "swebench", "--out", odd / "set"),
    ):
        answer = command("tasks", *words)
        assert answer.error["code"] in ("CR0411", "CR0206", "CR0209"), (words, answer.err)
        assert answer.exit_code == {"CR0411": 4, "CR0206": 2, "CR0209": 3}[answer.error["code"]]


@pytest.mark.parametrize("name", [*ODD, "/dev/zero"], ids=lambda name: ascii(name[:20]))
def test_a_set_that_cannot_be_read(command: Command, odd: Path, name: str) -> None:
    """A pipe into which nobody writes, and a device that never ends, are refused unread."""
    out = ("--format", "swebench", "--out", odd / "out")
    answer = command("tasks", "import", place(odd, name), *out)
    assert (answer.exit_code, answer.error["code"]) == (4, "CR0460"), answer.err
    answer = command("tasks", "import", odd / "file", *out, "--repositories", place(odd, name))
    assert answer.error["code"] in ("CR0460", "CR0460", "CR0206"), answer.err
    assert not (odd / "out").exists()


def test_brackets_without_end(command: Command, store: Path, tmp_path: Path) -> None:
    """A manifest, a record and a project's table, nested deeper than any parser goes."""
    deep = tmp_path / "store"
    shutil.copytree(store, deep)
    (deep / "manifest.json").write_text(DEEP)
    for words in (("show", deep), ("validate", deep), ("build", TINY, "--out", deep)):
        answer = command("tasks", *words)
        assert (answer.exit_code, answer.error["code"]) == (4, "CR0411"), answer.err
    project = tmp_path / "project"
    shutil.copytree(TINY, project)
    (project / "pyproject.toml").write_text(f"x = {DEEP}")
    (project / "tests").rename(tmp_path / "taken away")
    answer = command("tasks", "build", project, "--out", tmp_path / "out")
    assert answer.error["code"] in ("CR0402", "CR0419"), answer.err


def test_a_store_whose_files_are_pipes(store: Path, tmp_path: Path) -> None:
    """Nobody writes into them: they are missing, and nobody waits."""
    copy = tmp_path / "store"
    shutil.copytree(store, copy)
    for path in [*(copy / "tasks").iterdir(), copy / "manifest.json"]:
        whole = path.read_bytes()
        path.unlink()
        os.mkfifo(path)
        with pytest.raises(InputError, match=r"CR041[01]"):
            TaskStore.open(copy).verify()
        path.unlink()
        path.write_bytes(whole)
    TaskStore.open(copy).verify()
