"""Folders of a jail: handed over, measured and given back; a full disk of the machine is a failure of the sandbox, never a result."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from composer_replication.errors import SandboxFailure
from composer_replication.records import Limits, SandboxSpec
from composer_replication.sandbox import SandboxBackend, choose_backend
from composer_replication.sandbox.folders import (
    ENOUGH_BYTES,
    LEAST_BYTES,
    folder_bytes,
    give_back,
    hand_over,
    require_room,
    way_out,
)


def test_a_folder_is_not_measured_beyond_what_is_asked(tmp_path: Path) -> None:
    for number in range(1200):
        (tmp_path / str(number)).touch()
    assert folder_bytes((tmp_path,)) == 1200 * 4096
    assert folder_bytes((tmp_path,), enough_bytes=10 * 4096) == 11 * 4096
    assert folder_bytes((tmp_path,), deadline=0.0) == 499 * 4096  # the clock is read now and then


def test_content_counts_in_full_and_links_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "file").write_bytes(b"x" * 1_000_000)
    (tmp_path / "a" / "link").symlink_to("/usr")
    assert 1_000_000 <= folder_bytes((tmp_path,)) <= 1_000_000 + 5 * 4096


def test_handing_over_replaces_hard_links_by_copies(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_text("text")
    outside.chmod(0o755)
    tree = tmp_path / "tree"
    tree.mkdir()
    os.link(outside, tree / "linked")
    (tree / "alone").write_text("alone")
    alone = (tree / "alone").stat().st_ino
    hand_over(tree, None)
    assert (tree / "linked").stat().st_ino != outside.stat().st_ino
    assert (tree / "linked").read_text() == "text"
    assert (tree / "linked").stat().st_mode & 0o777 == 0o755
    assert (tree / "alone").stat().st_ino == alone
    assert sorted(path.name for path in tree.iterdir()) == ["alone", "linked"]


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


def test_what_is_given_back_has_no_setuid_or_setgid_files(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir(mode=0o2755)
    for name, mode in {"deep/user": 0o4755, "group": 0o2755, "both": 0o6711, "plain": 0o640}.items():
        (tmp_path / name).touch()
        (tmp_path / name).chmod(mode)
    outside = tmp_path.parent / f"{tmp_path.name}-outside"
    outside.touch()
    outside.chmod(0o4755)
    (tmp_path / "link").symlink_to(outside)
    give_back(tmp_path, None)
    assert outside.stat().st_mode & 0o7777 == 0o4755  # no link is followed
    modes = {
        name: (tmp_path / name).stat().st_mode & 0o7777 for name in ("deep/user", "group", "both", "plain")
    }
    assert modes == {"deep/user": 0o755, "group": 0o755, "both": 0o711, "plain": 0o640}


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


BACKENDS = ["bubblewrap", "bubblewrap-warm", "sandlock"]
Free = Callable[[int, int], None]


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> Free:
    """The disk seems to have so many bytes and files left."""

    def set_free(num_bytes: int, num_files: int = 9) -> None:
        disk = SimpleNamespace(
            f_bavail=num_bytes, f_frsize=1, f_blocks=1 << 40, f_files=10, f_favail=num_files
        )
        monkeypatch.setattr(os, "statvfs", lambda _: disk)

    return set_free  # type: ignore[return-value]


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> SandboxBackend:
    found = choose_backend(request.param)
    check = found.is_available()
    if not check.ok:
        pytest.skip(check.detail)
    return found


def test_nothing_runs_without_room_for_what_it_may_write(
    backend: SandboxBackend, tmp_path: Path, free: Free
) -> None:
    limits = Limits(disk_bytes=8 << 20)
    with backend.open(SandboxSpec(tmp_path, limits=limits)) as sandbox:
        free((8 << 20) - 1, 9)
        with pytest.raises(SandboxFailure, match=r"CR0104.*8\.4 MB left, and a command may write 8\.4 MB"):
            sandbox.exec("touch began", timeout_seconds=20)
        assert not (tmp_path / "began").exists()
        free(8 << 20, 9)
        assert sandbox.exec("head -c 5000000 /dev/zero > kept", timeout_seconds=20).exit_code == 0
        free(1 << 40, 0)
        with pytest.raises(SandboxFailure, match="takes no further file"):
            sandbox.exec("true", timeout_seconds=20)


def test_room_that_others_use_up_meanwhile_ends_the_run(
    backend: SandboxBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began = tmp_path / "began"
    real = os.statvfs

    def shrinking(path: Any) -> Any:
        if not began.exists():
            return real(path)
        return SimpleNamespace(f_bavail=LEAST_BYTES - 1, f_frsize=1, f_blocks=1 << 40, f_files=10, f_favail=9)

    with backend.open(SandboxSpec(tmp_path)) as sandbox:
        monkeypatch.setattr(os, "statvfs", shrinking)
        for command in ("touch began; sleep 60", "touch began; exit 1"):
            with pytest.raises(SandboxFailure, match="CR0104"):
                sandbox.exec(command, timeout_seconds=30)
            began.unlink()
        assert sandbox.exec("exit 3", timeout_seconds=20).exit_code == 3


def test_a_limit_larger_than_a_disk_asks_for_some_room_only(tmp_path: Path, free: Free) -> None:
    free(ENOUGH_BYTES, 9)
    require_room([tmp_path], ENOUGH_BYTES)
    with pytest.raises(SandboxFailure):
        require_room([tmp_path], ENOUGH_BYTES + 1)


def test_a_file_system_without_a_size_has_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    endless = SimpleNamespace(f_bavail=0, f_frsize=4096, f_blocks=0, f_files=0, f_favail=0)
    monkeypatch.setattr(os, "statvfs", lambda _: endless)
    require_room([tmp_path], 1 << 40)
    require_room([tmp_path / "gone"], 1 << 40)
    endless.f_blocks = 1  # with a size, nothing available is no room
    with pytest.raises(SandboxFailure, match="CR0104"):
        require_room([tmp_path], 1 << 40)
