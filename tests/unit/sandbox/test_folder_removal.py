"""Whatever a jail left goes, in one pass and by ourselves."""

from __future__ import annotations

import errno
import os
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest

from composer_replication.sandbox import folders
from composer_replication.sandbox.folders import FreshFolders, empty, give_back, remove_folder


@pytest.fixture
def no_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object, **__: object) -> None:
        pytest.fail("a program was started")

    monkeypatch.setattr("subprocess.run", refused)


def chain(root: Path, name: str, num_levels: int) -> int:
    """Folders in folders; a descriptor of the last one."""
    root.mkdir(exist_ok=True)
    here = os.open(root, os.O_RDONLY)
    for _ in range(num_levels):
        os.mkdir(name, dir_fd=here)
        below = os.open(name, os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    return here


def test_a_path_longer_than_a_path_may_be(tmp_path: Path, no_programs: None) -> None:
    last = chain(tmp_path / "deep", "a" * 40, 230)
    os.mkdir("beside", dir_fd=last)
    os.close(os.open("file", os.O_CREAT | os.O_WRONLY, 0, dir_fd=last))
    os.symlink("/", "link", dir_fd=last)
    os.fchmod(last, 0)
    os.close(last)
    remove_folder(tmp_path / "deep")
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_moved_goes_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EXDEV, "another device")

    monkeypatch.setattr(folders.os, "rename", refuse)
    os.close(chain(tmp_path / "deep", "a", 300))
    remove_folder(tmp_path / "deep")
    assert list(tmp_path.iterdir()) == []


def test_what_is_not_there_or_a_link_is_no_matter(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir(mode=0o500)
    (tmp_path / "link").symlink_to("kept")
    remove_folder(tmp_path / "absent")
    remove_folder(tmp_path / "link")
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
    assert (tmp_path / "kept").stat().st_mode & 0o777 == 0o500


def test_giving_back_starts_no_program_for_folders_that_are_too_deep(
    tmp_path: Path, no_programs: None
) -> None:
    last = chain(tmp_path / "tree", "a", 200)
    for number in range(20):
        os.mkdir(str(number), dir_fd=last)
    give_back(tmp_path / "tree", None)
    assert list((tmp_path / "tree").joinpath(*"a" * 200).iterdir()) == []
    os.close(last)


def test_what_stays_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "fresh").mkdir()
    fresh = FreshFolders((tmp_path / "fresh",))
    (tmp_path / "fresh" / "left").mkdir()
    monkeypatch.setattr(folders, "remove_folder", lambda _: None)
    for ask in (fresh.clear, lambda: empty(tmp_path / "fresh")):
        with pytest.raises(OSError, match="cannot be removed"):
            ask()


def test_a_folder_that_grew_is_what_it_was(tmp_path: Path) -> None:
    """On ext4 a second block brings a flag that nobody can take off."""
    folder = tmp_path / "home"
    folder.mkdir(mode=0o700)
    fresh = FreshFolders((folder,))
    for number in range(40):
        (folder / ("n" * 240 + str(number))).touch()
    assert fresh.clear()
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("change", ["chmod 711 .", "chmod 0 .", "mv inner other", "ln -sfn /usr link"])
def test_a_folder_that_was_changed_is_not_brought_back(tmp_path: Path, change: str) -> None:
    """A new jail has new ones."""
    (tmp_path / "inner").mkdir()
    (tmp_path / "link").symlink_to("/")
    fresh = FreshFolders((tmp_path,))
    assert fresh.clear()
    subprocess.run(["sh", "-c", change], cwd=tmp_path, check=True)
    found = []
    with suppress(OSError):  # gone, or closed to us
        found.append(fresh.clear())
    tmp_path.chmod(0o700)
    assert found in ([], [False])
