"""A disk that is full for pip, for venv or for git is a full disk (CR0104), in one sentence; a real small one."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from finished import finished

from composer_replication.tasks.intake.cache import cache_folder, refuse_full_disk
from composer_replication.tasks.intake.environment import INSTALLER, resolve

TINY = Path(__file__).parents[2] / "recipes" / "tiny-cpu" / "project"
SIZE_KIB = 400 * 1024
pytestmark = pytest.mark.timeout(600)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system with room for what one sandbox may write, and a little more."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={SIZE_KIB}k", "tmpfs", str(place)],
        capture_output=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip("nothing can be mounted here")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


@pytest.fixture
def shared_wheels(tmp_path: Path) -> Path:
    resolve([], "the tests")  # the shared cache has them now
    return cache_folder() / "wheels"


def fill(disk: Path, left_kib: int) -> None:
    """Leave so much, to the page."""
    with (disk / "filler").open("wb") as handle:
        free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
        os.posix_fallocate(handle.fileno(), 0, free - left_kib * 1024)
    assert os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize == left_kib * 1024


def build(source: object, out: Path, **environment: str) -> tuple[int, dict[str, Any], str]:
    words = ["tasks", "build", str(source), "--out", str(out), "--visible-only", "--quiet", "--json"]
    done = finished(
        [sys.executable, "-m", "composer_replication.cli.main", *words],
        timeout=500,
        env={**os.environ, **environment},
    )
    assert done.stdout, done.stderr
    printed = json.loads(done.stdout)
    return done.returncode, printed.get("error", printed), done.stderr


@pytest.fixture
def full_cache(small_disk: Path, shared_wheels: Path) -> Callable[[int], Path]:
    """A cache on the small disk in which only what is fetched is shared."""

    def make(left_kib: int) -> Path:
        cache = small_disk / "cache"
        for name in ("locks", "environments", "git"):
            (cache / name).mkdir(parents=True)
        (cache / "wheels").symlink_to(shared_wheels)
        fill(small_disk, left_kib)
        return cache

    return make


@pytest.mark.parametrize(
    "left_kib", [pytest.param(8, id="venv"), pytest.param(4000, id="pip", marks=pytest.mark.long)]
)
def test_an_environment_that_has_no_room(
    full_cache: Callable[[int], Path], tmp_path: Path, left_kib: int
) -> None:
    cache = full_cache(left_kib)
    code, error, err = build(TINY, tmp_path / "out", COMPOSER_RL_CACHE=str(cache))
    assert (code, error["code"], err.count("\n")) == (3, "CR0104", 1), err
    assert error["where"].startswith(str(cache / "environments"))
    assert error["fix"].startswith("free some space")


@pytest.mark.parametrize("left_kib", [1000, pytest.param(0, marks=pytest.mark.long)])
def test_a_commit_that_has_no_room(full_cache: Callable[[int], Path], tmp_path: Path, left_kib: int) -> None:
    root = tmp_path / "repository"
    root.mkdir()
    (root / "large.bin").write_bytes(os.urandom(2_000_000))
    for words in (
        ["init", "--quiet"],
        ["add", "."],
        ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "one"],
    ):
        subprocess.run(["git", "-C", str(root), *words], check=True, capture_output=True)
    cache = full_cache(left_kib)
    code, error, err = build(f"git+file://{root}", tmp_path / "out", COMPOSER_RL_CACHE=str(cache))
    assert (code, error["code"], err.count("\n")) == (3, "CR0104", 1), err
    assert list((cache / "git").iterdir()) == []


def test_packages_that_have_no_room(small_disk: Path, shared_wheels: Path) -> None:
    """pip copies wheels into the temporary folder."""
    (small_disk / "tmp").mkdir()
    (small_disk / "cache").mkdir()
    (small_disk / "cache" / "wheels").symlink_to(shared_wheels)
    fill(small_disk, 300)
    code = (
        "from packaging.requirements import Requirement\n"
        "from composer_replication.tasks.intake.environment import resolve\n"
        f"try:\n    resolve([Requirement({'{}=={}'.format(*INSTALLER)!r})], 'x')\n"
        "except OSError as error:\n    print(error.errno, error.filename)\n"
    )
    done = finished(
        [sys.executable, "-c", code],
        timeout=300,
        env={
            **os.environ,
            "TMPDIR": str(small_disk / "tmp"),
            "COMPOSER_RL_CACHE": str(small_disk / "cache"),
            "PIP_NO_INDEX": "1",
        },
    )
    number, _, place = done.stdout.partition(" ")
    assert (number, place.startswith(str(small_disk))) == (str(errno.ENOSPC), True), done.stderr


@pytest.mark.long
def test_tests_that_have_no_room_are_not_judged(small_disk: Path, tmp_path: Path) -> None:
    """They fail for want of a disk, and neither the repository nor a candidate is to blame."""
    root = tmp_path / "project"
    (root / "tests").mkdir(parents=True)
    (root / "pyproject.toml").write_text('[project]\nname = "planted"\nversion = "1"\n')
    (root / "planted.py").write_text("def double(x):\n    y = x + x\n    return y\n")
    # What was written is gone when the test ends: nothing but the room before tells why it failed.
    writes = "    from tempfile import TemporaryFile\n    TemporaryFile().write(b'x' * 40_000_000)\n"
    (root / "tests" / "test_it.py").write_text(
        f"import planted\n\n\ndef test_it():\n{writes}    assert planted.double(1) == 2\n"
    )
    fill(small_disk, 30 * 1024)
    code, error, err = build(root, tmp_path / "out", TMPDIR=str(small_disk))
    assert (code, error["code"], err.count("\n")) == (3, "CR0104", 1), err
    assert error["where"].startswith(str(small_disk))
    assert list(small_disk.glob("composer-rl-*")) == []
    (small_disk / "filler").unlink()
    code, result, err = build(root, tmp_path / "out", TMPDIR=str(small_disk))
    assert (code, result["tasks"]) == (0, 1), err


def test_the_disk_of_a_server_is_not_ours(tmp_path: Path) -> None:
    refuse_full_disk("remote: fatal: write error: No space left on device\nfatal: early EOF\n", tmp_path)
    refuse_full_disk("fatal: no such reference", tmp_path)
    for said, number in (
        ("fatal: write error: No space left on device", errno.ENOSPC),
        ("OSError: [Errno 122] Disk quota exceeded: 'x'", errno.EDQUOT),
    ):
        with pytest.raises(OSError, match=str(tmp_path)) as caught:
            refuse_full_disk(said, tmp_path)
        assert caught.value.errno == number
