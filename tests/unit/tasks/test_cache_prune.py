"""What prune removes, and above all what it leaves."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from composer_replication.sandbox import process_folder
from composer_replication.tasks.intake import cache as cache_module
from composer_replication.tasks.intake.cache import CACHE_VARIABLE, prune

ENVIRONMENT = "0123456789abcdef01234567-89abcdef"
STORE = "fedcba9876543210"
LIVE = """
import sys, time
from composer_replication.tasks.intake.cache import cache_folder, cache_lock
if sys.argv[1] == "use":
    cache_folder()
    print("ready", flush=True)
    time.sleep(600)
with cache_lock(sys.argv[2]):
    print("ready", flush=True)
    time.sleep(600)
"""
Start = Callable[[str, str], "subprocess.Popen[str]"]


def put(path: Path, size: int) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"x" * size)
    return path


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Seven entries of ours, 1 + 2 + 4 + ... bytes, so that every sum tells which went."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(process_folder.tempfile, "tempdir", str(tmp_path / "tmp"))
    root = tmp_path / "cache"
    monkeypatch.setenv(CACHE_VARIABLE, str(root))
    put(root / "task-stores" / STORE / "objects" / "ab" / "file", 1)
    put(root / "environments" / ENVIRONMENT / "bin" / "python", 2)
    put(root / "models" / "llm-1.0-0123456789abcdef" / "config.json", 4)
    put(root / "resolutions" / f"{'a' * 64}.json", 8)
    put(root / "sdists" / "toolz-1.2.0" / "SHA256", 16)
    put(root / "wheels" / "pytest-9.0.1" / "SHA256", 32)
    put(root / "crash" / "composer-rl-crash-20260101T000000-abc.txt", 64)
    (root / "locks").mkdir()
    return root


@pytest.fixture
def start() -> Iterator[Start]:
    running: list[subprocess.Popen[str]] = []

    def begin(how: str, what: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", LIVE, how, what], stdout=subprocess.PIPE, text=True, env=dict(os.environ)
        )
        running.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return process

    yield begin
    for process in running:
        process.kill()
        process.communicate()


def files(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*") if not path.is_dir()}


def freed(pruned: tuple[Mapping[Path, int], bool]) -> int:
    return sum(pruned[0].values())


def test_everything_that_can_be_made_again_goes_and_crash_reports_stay(cache: Path) -> None:
    pruned = prune(cache)
    assert freed(pruned) == 63
    assert files(cache) == {"crash/composer-rl-crash-20260101T000000-abc.txt"}
    assert prune(cache)[0] == {}


def test_a_dry_run_says_the_same_and_removes_nothing(cache: Path) -> None:
    before = files(cache)
    planned = prune(cache, is_dry_run=True)
    assert freed(planned) == 63
    assert files(cache) == before
    assert prune(cache)[0] == planned[0]


@pytest.mark.parametrize("how", ["use", "lock"])
def test_all_that_a_living_process_may_use_stays_until_it_is_killed(
    cache: Path, start: Start, how: str
) -> None:
    process = start(how, "models")
    pruned = prune(cache)
    assert freed(pruned) == 0
    assert pruned[1]
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert freed(prune(cache)) == 63


def test_a_forked_child_does_not_take_the_lock_of_its_parent(cache: Path) -> None:
    code = """
import os
from composer_replication.tasks.intake.cache import cache_folder, prune
folder = cache_folder()
if os.fork() == 0:
    print(prune(folder)[1], flush=True)
    os._exit(0)
os.wait()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"


def test_a_folder_that_is_no_cache_loses_nothing_but_our_entries(cache: Path) -> None:
    foreign = [
        put(cache / name, 1)
        for name in (
            "notes.txt Documents/letter.txt models/llama/config.json wheels/mine/thing.whl "
            "wheels/car-1.0/photo.jpg environments/whole/bin/python task-stores/readme "
            "resolutions/new-year.json"
        ).split()
    ]
    pruned = prune(cache)
    assert freed(pruned) == 63
    left = {str(path.relative_to(cache)) for path in foreign}
    assert files(cache) == {*left, "crash/composer-rl-crash-20260101T000000-abc.txt"}


def test_no_symbolic_link_is_followed(cache: Path, tmp_path: Path) -> None:
    outside = put(tmp_path / "outside" / STORE / "precious", 1).parents[1]
    (cache / "task-stores" / "00112233445566aa").symlink_to(outside / STORE)
    (cache / "environments" / ENVIRONMENT / "lib64").symlink_to(outside)
    (cache / "models").rename(tmp_path / "elsewhere")
    (cache / "models").symlink_to(tmp_path / "elsewhere")
    pruned = prune(cache)
    assert freed(pruned) == 63 - 4
    assert files(outside) == {f"{STORE}/precious"}
    assert (tmp_path / "elsewhere" / "llm-1.0-0123456789abcdef" / "config.json").is_file()
    assert (cache / "task-stores" / "00112233445566aa").is_symlink()


def test_an_interrupted_removal_is_finished_by_the_next_call(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(path: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(cache_module.shutil, "rmtree", stop)
        with pytest.raises(KeyboardInterrupt):
            prune(cache)
    assert not (cache / "task-stores" / STORE).exists()
    assert freed(prune(cache)) == 63


def test_scratch_folders_of_killed_processes_go(cache: Path, tmp_path: Path) -> None:
    names = (f"{process_folder.PREFIX}left", f"{process_folder.NEW_PREFIX}young")
    left, young = (put(tmp_path / "tmp" / name / "tree" / "file", 128).parents[1] for name in names)
    planned = prune(cache, is_dry_run=True)
    assert [path for path in planned[0] if cache not in path.parents] == [left]
    assert left.is_dir()
    assert freed(prune(cache)) == 63 + 128
    assert (left.exists(), young.is_dir()) == (False, True)
