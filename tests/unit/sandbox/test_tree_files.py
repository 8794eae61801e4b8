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
from composer_replication.sandbox.folders import walk
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


def test_many_folders_beside_each_other_take_few_descriptors(tmp_path: Path) -> None:
    for number in range(120):
        (tmp_path / str(number) / "inner").mkdir(parents=True)
    with few_descriptors(20):
        assert len(TreeFiles(tmp_path, None).list(".")) == 240


def test_folders_in_folders_take_few_descriptors(deep: Path) -> None:
    (deep / "a" / "z").mkdir()  # one more to come back to
    with few_descriptors(50):
        found = TreeFiles(deep, None).list("a")
    assert [entry.path for entry in found][-2:] == ["a/" * NUM_LEVELS + "f", "a/z"]
    assert len(found) == NUM_LEVELS + 1


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


def test_a_folder_that_becomes_a_link_or_goes_away_is_left_out(tmp_path: Path) -> None:
    for name in ("link", "gone", "file"):
        (tmp_path / name / "inner").mkdir(parents=True)
    found = []
    for path, _ in walk(os.open(tmp_path, os.O_RDONLY)):
        found.append(path)
        if len(found) == 3:  # all are seen, and none is looked into
            for name in ("link", "gone", "file"):
                (tmp_path / name).rename(tmp_path.parent / f"{tmp_path.name}-{name}")
            (tmp_path / "link").symlink_to("/")
            (tmp_path / "file").touch()
    assert sorted(found) == ["file", "gone", "link"]


def test_a_folder_that_is_moved_out_leads_nowhere(deep: Path) -> None:
    found = []
    with pytest.raises(OSError, match="moved"):  # noqa: PT012  it is raised on the way back
        for path, _ in walk(os.open(deep, os.O_RDONLY)):
            found.append(path)
            if path.endswith("f"):
                (deep / "/".join("a" * 50)).rename(deep.parent / f"{deep.name}-elsewhere")
    assert len(found) == NUM_LEVELS + 1


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


def test_closed_folders_are_opened_to_their_owner(tmp_path: Path) -> None:
    (tmp_path / "d" / "inner").mkdir(parents=True)
    (tmp_path / "d").chmod(0o400)
    found = TreeFiles(tmp_path, None).list(".")
    assert (found[0].path, found[0].mode) == ("d", 0o400)  # as it was
    assert (tmp_path / "d").stat().st_mode & 0o777 == 0o700


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    folder = tmp_path / "tree"
    folder.mkdir()
    return folder


def modes(root: Path) -> dict[str, int]:
    """Looked at as root, or after they were opened: closed folders are told by the one above."""
    paths = [
        root,
        *(Path(where) / name for where, folders, files in os.walk(root) for name in folders + files),
    ]
    return {str(path.relative_to(root)): path.lstat().st_mode & 0o7777 for path in paths}


@pytest.mark.skipif(os.geteuid() != 0, reason="the modes of closed folders are looked at from outside")
def test_modes_come_back_whatever_they_close(tree: Path, tmp_path: Path) -> None:
    (tree / "d" / "inner").mkdir(parents=True)
    (tree / "d" / "f").write_text("kept")
    os.link(tree / "d" / "f", tree / "again")
    (tree / "link").symlink_to("/etc/passwd")
    for path, mode in {"d/f": 0, "d/inner": 0o300, "d": 0o100, ".": 0o555}.items():
        (tree / path).chmod(mode)
    before = modes(tree)
    snapshots = TreeSnapshots(tree, tmp_path / "copies")
    name = snapshots.take()
    assert modes(tree) == modes(tmp_path / "copies" / name) == before
    (tree / "d" / "f").write_text("changed")
    for _ in range(2):
        snapshots.restore(name)
        assert modes(tree) == before
    assert (tree / "again").read_text() == "kept"
    assert (tree / "again").samefile(tree / "d" / "f")


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


def test_too_many_paths_are_data_and_no_failure(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(4):
        (tree / str(number)).touch()
    monkeypatch.setattr(folders, "MOST_ENTRIES", 3)
    with pytest.raises(SandboxFileError, match="more than 3 entries"):
        TreeSnapshots(tree, tmp_path / "copies").take()
