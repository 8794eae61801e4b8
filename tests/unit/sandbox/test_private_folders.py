from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from composer_replication.sandbox.private_folders import (
    Scratch,
    UnmeasurableError,
    folder_bytes,
    give_back,
    hand_over,
    way_out,
)


def test_a_folder_is_not_measured_beyond_what_is_asked(tmp_path: Path) -> None:
    for number in range(1200):
        (tmp_path / str(number)).touch()
    assert folder_bytes((tmp_path,)) == 1200 * 4096
    assert folder_bytes((tmp_path,), enough_bytes=10 * 4096) == 11 * 4096
    assert folder_bytes((tmp_path,), deadline=0.0) == 499 * 4096  # the clock is read now and then


def test_every_entry_counts_for_a_block(tmp_path: Path) -> None:
    for number in range(10):
        (tmp_path / f"empty{number}").touch()
    assert folder_bytes((tmp_path,)) == 10 * 4096


def test_content_counts_in_full_and_links_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "file").write_bytes(b"x" * 1_000_000)
    (tmp_path / "a" / "link").symlink_to("/usr")
    assert 1_000_000 <= folder_bytes((tmp_path,)) <= 1_000_000 + 5 * 4096


def test_several_folders_add_up(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x").touch()
    assert folder_bytes((tmp_path / "a", tmp_path / "b")) == 2 * 4096


def test_a_folder_that_went_away_counts_nothing(tmp_path: Path) -> None:
    assert folder_bytes((tmp_path / "absent",)) == 0


def test_a_path_too_long_cannot_be_measured(tmp_path: Path) -> None:
    with pytest.raises(UnmeasurableError):
        folder_bytes((tmp_path / ("d/" * 3000),))


def test_handing_over_replaces_hard_links_by_copies(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_text("text")
    tree = tmp_path / "tree"
    tree.mkdir()
    os.link(outside, tree / "linked")
    (tree / "alone").write_text("alone")
    alone = (tree / "alone").stat().st_ino
    hand_over(tree, None)
    assert (tree / "linked").stat().st_ino != outside.stat().st_ino
    assert (tree / "linked").read_text() == "text"
    assert (tree / "alone").stat().st_ino == alone
    assert sorted(path.name for path in tree.iterdir()) == ["alone", "linked"]


def test_a_mode_survives_the_copy(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_text("#!/bin/sh\n")
    outside.chmod(0o755)
    (tmp_path / "tree").mkdir()
    os.link(outside, tmp_path / "tree" / "run")
    hand_over(tmp_path / "tree", None)
    assert (tmp_path / "tree" / "run").stat().st_mode & 0o777 == 0o755


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can change owners")
def test_handing_over_and_back_changes_owners_and_never_follows_links(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_text("")
    tree = tmp_path / "tree"
    (tree / "sub").mkdir(parents=True)
    (tree / "sub" / "link").symlink_to(outside)
    hand_over(tree, 12345)
    assert {path.lstat().st_uid for path in (tree, *tree.rglob("*"))} == {12345}
    assert outside.stat().st_uid == 0
    give_back(tree, (0, 0))
    assert {path.lstat().st_uid for path in (tree, *tree.rglob("*"))} == {0}


def test_giving_back_opens_closed_folders(tmp_path: Path) -> None:
    closed = tmp_path / "tree" / "closed"
    closed.mkdir(parents=True)
    closed.chmod(0)
    give_back(tmp_path / "tree", None)
    assert closed.stat().st_mode & 0o700 == 0o700


def test_the_scratch_folder_goes_whatever_is_in_it() -> None:
    scratch = Scratch()
    assert (scratch.root.stat().st_mode & 0o777) == 0o700
    (scratch.home / "closed" / "deep").mkdir(parents=True)
    (scratch.home / "closed").chmod(0)
    scratch.remove()
    scratch.remove()
    assert not scratch.root.exists()


def test_what_is_given_back_has_no_setuid_or_setgid_files(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir(mode=0o2755)
    for name, mode in {"deep/user": 0o4755, "group": 0o2755, "both": 0o6711, "plain": 0o640}.items():
        (tmp_path / name).touch()
        (tmp_path / name).chmod(mode)
    give_back(tmp_path, None)
    modes = {
        name: (tmp_path / name).stat().st_mode & 0o7777 for name in ("deep/user", "group", "both", "plain")
    }
    assert modes == {"deep/user": 0o755, "group": 0o755, "both": 0o711, "plain": 0o640}


def test_a_link_to_a_setuid_file_elsewhere_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "outside").touch()
    (tmp_path / "outside").chmod(0o4755)
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "link").symlink_to(tmp_path / "outside")
    give_back(tmp_path / "tree", None)
    assert (tmp_path / "outside").stat().st_mode & 0o7777 == 0o4755


def test_a_way_out_of_a_read_only_folder_is_a_socket_or_a_pipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "shown" / "deep").mkdir(parents=True)
    (tmp_path / "shown" / "deep" / "file").touch()
    (tmp_path / "shown" / "link").symlink_to("nowhere")
    assert way_out(tmp_path / "shown") == ""
    os.mkfifo(tmp_path / "pipe")
    assert way_out(tmp_path / "pipe") == str(tmp_path / "pipe")
    os.mkfifo(tmp_path / "shown" / "pipe")  # the folder itself has changed: it is looked through again
    assert way_out(tmp_path / "shown") == str(tmp_path / "shown" / "pipe")
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path)  # the path of a socket is short
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("other/s")
    assert way_out(tmp_path / "other") == str((tmp_path / "other" / "s").resolve())
