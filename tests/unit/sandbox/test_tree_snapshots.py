"""Copies of a tree in which a command closed things, or went deeper than a copy can."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from composer_replication.errors import SandboxFileError
from composer_replication.sandbox import folders
from composer_replication.sandbox.tree_files import TreeSnapshots


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
    with pytest.raises(SandboxFileError, match="too long") as caught:
        snapshots.take()
    assert caught.value.code == "CR0309"
    assert list((tmp_path / "copies").iterdir()) == []
    assert "snapshot-0" not in snapshots


def test_too_many_paths_are_data_and_no_failure(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(4):
        (tree / str(number)).touch()
    monkeypatch.setattr(folders, "MOST_ENTRIES", 3)
    with pytest.raises(SandboxFileError, match="more than 3 entries"):
        TreeSnapshots(tree, tmp_path / "copies").take()
