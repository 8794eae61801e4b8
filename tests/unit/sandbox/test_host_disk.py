"""A full disk of the machine is a failure of the sandbox, never a test result."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from composer_replication.errors import SandboxFailure
from composer_replication.interfaces import SandboxBackend
from composer_replication.records import Limits, SandboxSpec
from composer_replication.sandbox import choose_backend
from composer_replication.sandbox.private_folders import ENOUGH_BYTES, LEAST_BYTES, require_room

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
        with pytest.raises(SandboxFailure, match=r"8\.4 MB left, and a command may write 8\.4 MB") as caught:
            sandbox.exec("touch began", timeout_seconds=20)
        assert caught.value.code == "CR0104"
        assert not (tmp_path / "began").exists()
        free(8 << 20, 9)
        assert sandbox.exec("head -c 5000000 /dev/zero > kept", timeout_seconds=20).exit_code == 0
        # What it has written it may not write again.
        free((8 << 20) - 5_000_000 + 4096 * 4, 9)
        assert sandbox.exec("true", timeout_seconds=20).exit_code == 0
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
