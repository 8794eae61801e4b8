"""Listing, reading and copying among files that hostile code made: few descriptors, all closed, one kind of error."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from composer_replication.errors import SandboxFailure, SandboxFileError
from composer_replication.sandbox import folders
from composer_replication.sandbox.local_sandbox import TreeFiles, TreeSnapshots

NUM_LEVELS = 100


def descriptors() -> list[str]:
    return sorted(os.listdir("/proc/self/fd"))  # noqa: PTH208  a folder that changes while it is read


@pytest.fixture(autouse=True)
def _nothing_is_left_open() -> Iterator[None]:
    before = len(descriptors())
    yield
    assert len(descriptors()) == before


@contextmanager
def few_descriptors(more: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = max(int(name) for name in descriptors()) + more if more else 0
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.fixture
def deep(tmp_path: Path) -> Path:
    (tmp_path / "/".join("a" * NUM_LEVELS)).mkdir(parents=True)
    (tmp_path / "/".join("a" * NUM_LEVELS) / "f").write_text("found")
    return tmp_path


def test_a_long_path_takes_few_descriptors(deep: Path) -> None:
    files = TreeFiles(deep, None)
    (deep / "a" / "link").symlink_to("a/../" * 50 + "a/a")
    with few_descriptors(20):
        assert files.read("a/" * NUM_LEVELS + "f", 9) == b"found"
        assert (
            files.read("a/" * NUM_LEVELS + "../" * (NUM_LEVELS - 1) + "link" + "/a" * 97 + "/f", 9)
            == b"found"
        )
        files.write("b/" * NUM_LEVELS + "f", b"new", is_executable=False)
    with pytest.raises(SandboxFileError, match="out of the tree"):
        files.read("a/" * NUM_LEVELS + "../" * (NUM_LEVELS + 1) + "f", 9)


def test_a_machine_without_descriptors_is_no_fault_of_the_files(deep: Path) -> None:
    files = TreeFiles(deep, None)
    with few_descriptors(0):
        for ask in (lambda: files.list("."), lambda: files.read("a/f", 9)):
            with pytest.raises(SandboxFailure, match="CR0302"):
                ask()


@pytest.mark.parametrize(("name", "most"), [("MOST_ENTRIES", 3), ("MOST_PATH_BYTES", 9)])
def test_there_is_a_most_to_look_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, most: int
) -> None:
    for path in ("a", "b", "c"):
        (tmp_path / path).mkdir()
    assert len(TreeFiles(tmp_path, None).list(".")) == 3
    (tmp_path / "a" / "inner").mkdir()
    monkeypatch.setattr(folders, name, most)
    with pytest.raises(SandboxFileError, match=rf"CR0309.*more than {most} "):
        TreeFiles(tmp_path, None).list(".")


def test_a_tree_too_deep_for_a_copy_is_data_and_no_failure(tree: Path, tmp_path: Path) -> None:
    here = os.open(tree, os.O_RDONLY)
    for _ in range(25):
        os.mkdir("a" * 200, dir_fd=here)
        below = os.open("a" * 200, os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(here)
    snapshots = TreeSnapshots(tree, tmp_path / "copies")
    with pytest.raises(SandboxFileError, match=r"CR0309.*too long"):
        snapshots.take()
    assert list((tmp_path / "copies").iterdir()) == []
    assert "snapshot-0" not in snapshots.names
