"""The environment in which a repository's tests run: which wheels it holds, and how it is made from them, once per lock.

The test runner is pinned here, the same for every repository, so that most locks are equal and share one environment.
Everything else is resolved by ``pip download`` with wheels only: no build script of anybody is ever started. The
package under test is never installed: it is imported from the task tree. Wheels are installed by pip inside a sandbox
without network, into a virtual environment of the base interpreter: nothing of this program's own is visible to a test.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name, parse_wheel_filename

from composer_replication.errors import InputError
from composer_replication.records import Limits, SandboxSpec
from composer_replication.sandbox import base_interpreter, open_sandbox
from composer_replication.sandbox.process_folder import process_folder
from composer_replication.tasks.intake import cache, index
from composer_replication.tasks.intake.cache import cache_folder, sha256_of, sha256_of_file

if TYPE_CHECKING:
    from packaging.requirements import Requirement


TOOLCHAIN = {
    "iniconfig": "2.3.1", "packaging": "26.3", "pluggy": "1.7.0", "pygments": "2.21.0", "pytest": "9.2.0",
}  # fmt: skip
"""The test runner: what every environment holds."""
PYTESTS = (TOOLCHAIN["pytest"], "8.4.2", "7.4.4")
"""The newest is taken unless a repository says that its tests need an earlier one, or they show it."""
PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
"""The minor version that wheels and environments are made for."""
INSTALLER = ("pip", "26.2")
"""Installs the wheels inside the sandbox; not part of the environment."""


class Refused(Exception):
    """What gives no task; ``reason`` is the short name that is counted."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(reason, detail)  # as they came, so that it can be pickled
        self.reason = reason
        self.detail = detail

    def __str__(self) -> str:
        return f"{self.reason}: {self.detail}"


class UnusableRepository(Refused):
    """A repository that cannot be used."""


@dataclass(frozen=True, slots=True)
class LockedWheel:
    """One wheel of an environment."""

    name: str
    version: str
    filename: str
    sha256: str

    def __post_init__(self) -> None:
        """Refuse names that would lead out of a folder: a lock may come with somebody's store."""
        if not all(re.fullmatch(r"[\w.!+-]+", text) for text in (self.name, self.version, self.filename)):
            raise ValueError(f"{self.filename[:80]!r} is no file name of a wheel")


@dataclass(frozen=True, slots=True)
class EnvironmentLock:
    """All wheels of an environment, for one Python version; ``installer`` puts them there."""

    python: str
    wheels: tuple[LockedWheel, ...]
    installer: LockedWheel

    @property
    def fingerprint(self) -> str:
        return sha256_of(json.dumps(self.to_json(), sort_keys=True).encode())

    def to_json(self) -> dict[str, Any]:
        wheels = [list(astuple(wheel)) for wheel in self.wheels]
        return {"python": self.python, "wheels": wheels, "installer": list(astuple(self.installer))}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> EnvironmentLock:
        wheels = tuple(LockedWheel(*map(str, row)) for row in value["wheels"])
        return cls(str(value["python"]), wheels, LockedWheel(*map(str, value["installer"])))


def wheel_path(wheel: LockedWheel) -> Path:
    """Where the cache keeps a wheel."""
    return cache_folder() / "wheels" / f"{wheel.name}-{wheel.version}" / wheel.filename


def prefetch_toolchain() -> list[Path]:
    """Put the wheels of the test runner and, last, of the installer into the cache; then folders build offline."""
    return [index.fetch_wheel(name, version) for name, version in (*sorted(TOOLCHAIN.items()), INSTALLER)]


def _locked(path: Path) -> LockedWheel:
    name, version, _, _ = parse_wheel_filename(path.name)
    return LockedWheel(str(name), str(version), path.name, sha256_of_file(path))


def resolve(
    requirements: Sequence[Requirement],
    repository: str,
    wanted: Sequence[Requirement] = (),
    pytest: str = TOOLCHAIN["pytest"],
) -> EnvironmentLock:
    """The lock for the test runner (``pytest``: one of ``PYTESTS``) plus ``requirements``; cached by request.

    ``wanted`` would be good to have: where all of it together is not to be had, its ranges are left out, then one
    after the other what stands in the way. ``repository`` is who asks, for a sentence. Raises UnusableRepository
    (``dependency-without-wheel``), and InputError where the index cannot be reached (CR0407).
    """
    rest = list(map(copy, wanted))
    while rest:
        try:
            return _resolve([*requirements, *rest], repository, pytest)
        except UnusableRepository as error:
            said = re.split(r"[^a-z0-9-]+", re.sub(r"[_.]", "-", error.detail.lower()))
            left = [one for one in rest if canonicalize_name(one.name) not in said]
            if not any(one.specifier for one in rest):
                rest = left if len(left) < len(rest) else []
            for one in rest:
                one.specifier = SpecifierSet()
    return _resolve(requirements, repository, pytest)


def _resolve(requirements: Sequence[Requirement], repository: str, pytest: str) -> EnvironmentLock:
    *toolchain, installer = map(_locked, prefetch_toolchain())
    pins = {**TOOLCHAIN, "pytest": pytest}

    def is_pinned(requirement: Requirement) -> bool:
        pinned = TOOLCHAIN.get(canonicalize_name(requirement.name))
        return pinned is not None and requirement.specifier.contains(pinned, prereleases=True)

    wanted = sorted(str(requirement) for requirement in requirements if not is_pinned(requirement))
    if not wanted and pins == TOOLCHAIN:
        return EnvironmentLock(PYTHON, tuple(toolchain), installer)
    request = json.dumps([wanted, sorted(pins.items()), PYTHON, sysconfig.get_platform()])
    key = sha256_of(request.encode())
    with cache.cache_lock(f"resolve-{key[:16]}"):
        answer = cache_folder() / "resolutions" / f"{key}.json"
        # It may be absent, broken or of an older format.
        with suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
            known = EnvironmentLock.from_json(json.loads(answer.read_text()))
            if all(sha256_of_file(wheel_path(wheel)) == wheel.sha256 for wheel in known.wheels):
                return known
        wheels = sorted(_download(wanted, repository, pins), key=lambda wheel: wheel.name)
        lock = EnvironmentLock(PYTHON, tuple(wheels), installer)
        cache.put_file(answer, json.dumps(lock.to_json()).encode())
    return lock


def _download(wanted: Sequence[str], repository: str, pins: Mapping[str, str]) -> list[LockedWheel]:
    """Let pip resolve and fetch; no PATH, so that no version control program can be started."""
    with tempfile.TemporaryDirectory(prefix="wheels-", dir=process_folder()) as folder:
        known = Path(folder) / "known"  # one folder, however many wheels were ever fetched
        known.mkdir()
        for path in (cache_folder() / "wheels").glob("*/*.whl"):
            (known / path.name).symlink_to(path)
        command = [
            *index.pip_command(), "--disable-pip-version-check", "--no-input", "download", "--quiet", "--only-binary=:all:",
            "--dest", f"{folder}/wheels", f"--find-links={known}", *(f"{name}=={version}" for name, version in pins.items()), *wanted,
        ]  # fmt: skip
        environment = {**os.environ, "PATH": folder}
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        if done.returncode != 0:
            cache.refuse_full_disk(done.stderr, Path(folder))
            raise _resolution_error(done.stderr, repository)
        paths = sorted(Path(folder, "wheels").iterdir())
        wheels = list(map(_locked, paths))
        for wheel, path in zip(wheels, paths, strict=True):
            cache.put_file(wheel_path(wheel).parent / "SHA256", f"{wheel.sha256}  {path.name}\n".encode())
            cache.put_file(wheel_path(wheel), path.read_bytes())
        return wheels


def _resolution_error(log: str, repository: str) -> Exception:
    lines = [line.removeprefix("ERROR: ") for line in log.splitlines() if line.startswith("ERROR: ")]
    asked = [line for line in lines if "satisfies the requirement" in line or "conflict" in line.lower()]
    # Nothing at all was found where nothing could be asked.
    if not asked or ("(from versions: none)" in log and "Retrying" in log):
        problem = f"pip could not fetch what the tests of {repository} need."
        return InputError("CR0407", problem, where=repository, fix=index.FETCH_FIX)
    return UnusableRepository("dependency-without-wheel", asked[0].partition(" (from versions")[0][:200])


# --- The environment itself.

_READY = "READY.json"
_INSTALL_SECONDS = 300.0
_INSTALL_LIMITS = Limits(
    memory_bytes=2 * 1024**3, num_processes=64, disk_bytes=4 * 1024**3, num_open_files=1024
)


@dataclass(frozen=True, slots=True)
class Environment:
    """An installed environment, to be mounted read-only."""

    fingerprint: str
    python: Path
    root: Path
    read_only: tuple[Path, ...]
    masked: tuple[Path, ...]


def open_environment(
    lock: EnvironmentLock,
    *,
    backend: str | None = None,
    read_wheel: Callable[[LockedWheel], bytes] = lambda wheel: wheel_path(wheel).read_bytes(),
) -> Environment:
    """The environment of a lock, made first, in a sandbox of ``backend``, if this machine has not got it.

    ``read_wheel`` gives the bytes of a wheel (a task store has them); the cache by default.

    Raises:
        InputError: the lock is for another Python or machine, or the installation failed (CR0413); a wheel's hash is
            wrong (CR0408).
        SandboxFailure: the sandbox broke.
    """
    misfit = [wheel.filename for wheel in lock.wheels if not index.fits_this_machine(wheel.filename)]
    if lock.python != PYTHON or misfit:
        here = f"its wheel {misfit[0]} does not fit here" if misfit else f"this is Python {PYTHON}"
        problem = f"the environment was locked for Python {lock.python} and {here}."
        fix = "use that Python version, or build the tasks again on this machine: composer-rl tasks build."
        raise InputError("CR0413", problem, where=lock.fingerprint[:12], fix=fix)
    base = Path(getattr(sys, "_base_executable", "") or sys.executable).resolve()
    key = f"{lock.fingerprint[:24]}-{sha256_of(f'{base}{sys.version}'.encode())[:8]}"
    root = cache_folder() / "environments" / key
    with cache.cache_lock(f"environment-{key}"):
        if not (root / _READY).is_file():
            _make(root, base, lock, backend, read_wheel)
    system = base_interpreter()
    return Environment(
        lock.fingerprint, root / "bin" / "python", root, (root, *system.read_only), system.masked
    )


def lock_of(environment: Environment) -> EnvironmentLock:
    """The lock that an environment was made from, so that it can be made again elsewhere."""
    return EnvironmentLock.from_json(json.loads((environment.root / _READY).read_text()))


def _make(
    root: Path, base: Path, lock: EnvironmentLock, backend: str | None, read_wheel: Callable[[LockedWheel], bytes]
) -> None:  # fmt: skip
    """Make the environment at its final place; ``READY.json`` comes last, so a torn one is made again."""
    shutil.rmtree(root, ignore_errors=True)
    wheels = root / ".wheels"
    wheels.mkdir(parents=True)
    cache.refuse_when_full(root)
    # Whatever umask is in force, a jail with a user id of its own must be able to read the files.
    root.chmod(0o755)
    for wheel in (*lock.wheels, lock.installer):
        data = read_wheel(wheel)
        index.check_hash(wheel.filename, wheel.sha256, sha256_of(data))
        (wheels / wheel.filename).write_bytes(data)
    system = base_interpreter()
    spec = SandboxSpec(tree=root, read_only=system.read_only, masked=system.masked, limits=_INSTALL_LIMITS)
    install = [
        "/bin/sh", "-c", 'umask 022; "$1" -I -m venv --without-pip "$2" && shift 2 && exec "$@"', "sh", str(base), str(root),
        str(root / "bin" / "python"), "-I", f"{wheels / lock.installer.filename}/pip", "--no-input", "--disable-pip-version-check", "install",
        "--quiet", "--no-index", "--no-deps", "--no-cache-dir", "--no-warn-script-location",
        *(str(wheels / wheel.filename) for wheel in lock.wheels),
    ]  # fmt: skip
    with open_sandbox(spec, backend) as sandbox:
        variables = {"PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8"}
        done = sandbox.exec(install, timeout_seconds=_INSTALL_SECONDS, env=variables)
    if done.exit_code != 0 or done.timed_out:
        said = done.stderr.strip() or "timed out"
        cache.refuse_full_disk(said, root)
        problem = f"the environment could not be made: {' '.join(said[-300:].split()).rstrip('.')}."
        raise InputError("CR0413", problem, where=lock.fingerprint[:12], fix="composer-rl doctor")
    shutil.rmtree(wheels)
    (root / _READY).write_text(json.dumps(lock.to_json(), sort_keys=True))
