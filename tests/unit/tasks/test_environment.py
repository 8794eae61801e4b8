"""Locks are exact, environments are made once, offline, without anything of this program."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from composer_replication.errors import InputError
from composer_replication.records import SandboxSpec
from composer_replication.sandbox import open_sandbox
from composer_replication.tasks.intake import environment as environment_module
from composer_replication.tasks.intake.cache import cache_folder, cache_lock, put_file
from composer_replication.tasks.intake.environment import (
    TOOLCHAIN,
    Environment,
    EnvironmentLock,
    LockedWheel,
    UnusableRepository,
    open_environment,
    prefetch_toolchain,
    resolve,
    wheel_path,
)


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache with the wheels of the test runner, and no index at all."""
    shutil.copytree(cache_folder() / "wheels", tmp_path / "cache" / "wheels")
    monkeypatch.setenv("COMPOSER_RL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    return tmp_path / "cache"


def test_the_toolchain_needs_no_network(own_cache: Path) -> None:
    names = {path.name.partition("-")[0] for path in prefetch_toolchain()}
    assert names == {*TOOLCHAIN, "pip"}
    lock = resolve([Requirement("pytest"), Requirement("packaging>=20")], "x")
    assert {wheel.name: wheel.version for wheel in lock.wheels} == TOOLCHAIN
    assert EnvironmentLock.from_json(json.loads(json.dumps(lock.to_json()))) == lock


def tiny_wheel(folder: Path, name: str, requires: str = "") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as archive:
        info = f"{name}-1.0.dist-info"
        archive.writestr(f"{name}.py", "X = 1\n")
        needs = f"Requires-Dist: {requires}\n" if requires else ""
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n{needs}")
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")


@pytest.mark.long
def test_dependencies_are_resolved_locked_and_remembered(
    own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    links = tmp_path / "links"
    tiny_wheel(links, "tinydep", requires="tinydeeper")
    tiny_wheel(links, "tinydeeper")
    monkeypatch.setenv("PIP_FIND_LINKS", str(links))
    lock = resolve([Requirement("tinydep")], "x")
    assert {wheel.name for wheel in lock.wheels} == {*TOOLCHAIN, "tinydep", "tinydeeper"}
    shutil.rmtree(links)
    monkeypatch.setattr(environment_module.index, "pip_command", lambda: ["/no/such/program"])
    assert resolve([Requirement("tinydep")], "x") == lock
    environment = open_environment(lock)
    assert (environment.root / "lib").is_dir()
    assert list(environment.root.glob("lib/python*/site-packages/tinydeeper.py"))


def test_what_is_no_wheel_is_not_built(
    own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    links = tmp_path / "links"
    (links / "evil-1.0").mkdir(parents=True)
    (links / "evil-1.0" / "setup.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n")
    shutil.make_archive(str(links / "evil-1.0"), "gztar", links, "evil-1.0")
    monkeypatch.setenv("PIP_FIND_LINKS", str(links))
    with pytest.raises(UnusableRepository) as caught:
        resolve([Requirement("evil")], "x")
    assert caught.value.reason == "dependency-without-wheel"
    assert "evil" in caught.value.detail
    assert not (tmp_path / "ran").exists()


@pytest.mark.long
def test_a_torn_environment_is_made_again(own_cache: Path) -> None:
    lock = resolve([], "x")
    root = open_environment(lock).root
    (root / "READY.json").unlink()
    shutil.rmtree(root / "bin")
    assert (open_environment(lock).root / "bin" / "python").exists()


def test_inside_are_the_locked_packages_and_nothing_of_ours(environment: Environment, tmp_path: Path) -> None:
    script = (
        "import importlib.metadata as m, importlib.util as u, json\n"
        "print(json.dumps([sorted(d.name.lower() for d in m.distributions()),"
        " [n for n in ('torch', 'composer_replication', 'pip', 'setuptools', 'numpy') if u.find_spec(n)]]))"
    )
    (tmp_path / "tree").mkdir()
    spec = SandboxSpec(tmp_path / "tree", read_only=environment.read_only, masked=environment.masked)
    with open_sandbox(spec) as sandbox:
        done = sandbox.exec([str(environment.python), "-c", script], timeout_seconds=20)
        write = sandbox.exec(["/bin/sh", "-c", f"echo x > {environment.root}/x"], timeout_seconds=20)
    assert json.loads(done.stdout) == [sorted(TOOLCHAIN), []]
    assert write.exit_code != 0
    assert not (environment.root / "x").exists()


def test_another_python_is_refused(environment: Environment) -> None:
    lock = replace(resolve([], "x"), python="3.7")
    with pytest.raises(InputError, match=r"CR0413.*Python 3\.7"):
        open_environment(lock)


def test_another_machine_is_refused() -> None:
    lock = resolve([], "x")
    foreign = LockedWheel("a", "1", "a-1-cp27-cp27m-win32.whl", "0")
    with pytest.raises(InputError, match=r"CR0413.*win32"):
        open_environment(replace(lock, wheels=(*lock.wheels, foreign)))


def test_a_changed_wheel_is_not_installed(own_cache: Path) -> None:
    lock = resolve([], "x")
    with pytest.raises(InputError, match="CR0408"):
        open_environment(lock, read_wheel=lambda wheel: wheel_path(wheel).read_bytes() + b"x")
    assert not list((own_cache / "environments").glob("*/READY.json"))


@pytest.mark.long
def test_a_wheel_that_cannot_be_installed(own_cache: Path, tmp_path: Path) -> None:
    lock = resolve([], "x")
    data = b"this is no wheel"
    broken = LockedWheel("bad", "1", "bad-1-py3-none-any.whl", hashlib.sha256(data).hexdigest())
    put_file(wheel_path(broken), data)
    with pytest.raises(InputError, match="CR0413"):
        open_environment(replace(lock, wheels=(broken,)))


def test_two_locks_of_one_name_wait_for_each_other() -> None:
    order: list[str] = []

    def hold(name: str) -> None:
        with cache_lock("test-of-the-lock"):
            order.append(f"in {name}")
            order.append(f"out {name}")

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(hold, "abcd"))
    assert all(order[i][3:] == order[i + 1][4:] for i in range(0, 8, 2))


@pytest.mark.long
def test_what_is_only_wanted_is_dropped_where_it_is_not_to_be_had(
    own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    links = tmp_path / "links"
    for name in ("needed", "newer", "fine"):
        tiny_wheel(links, name)
    tiny_wheel(links, "asking", requires="absent")
    monkeypatch.setenv("PIP_FIND_LINKS", str(links))
    wanted = [Requirement(text) for text in ("fine==1.0", "newer>=2", "nowhere", "asking")]
    lock = resolve([Requirement("needed")], "x", wanted)
    assert {wheel.name for wheel in lock.wheels} == {
        *TOOLCHAIN,
        "needed",
        "newer",
        "fine",
    }  # a range goes first
    with pytest.raises(UnusableRepository) as caught:
        resolve([Requirement("missing")], "x", wanted)
    assert (caught.value.reason, "missing" in caught.value.detail) == ("dependency-without-wheel", True)


def test_pip_is_told_of_one_folder_however_many_wheels_the_cache_holds(
    own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(20):
        tiny_wheel(own_cache / "wheels" / f"tiny{number}-1.0", f"tiny{number}")
    commands: list[list[str]] = []
    run = subprocess.run

    def noted(command: list[str], **options: Any) -> Any:
        commands.append(command)
        return run(command, **options)

    monkeypatch.setattr(environment_module.subprocess, "run", noted)
    assert "tiny7" in {wheel.name for wheel in resolve([Requirement("tiny7")], "x").wheels}
    assert sum(word.startswith("--find-links") for word in commands[-1]) == 1
