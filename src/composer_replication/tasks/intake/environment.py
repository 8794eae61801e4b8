"""The environment in which a repository's tests run: made once per lock, inside the sandbox.

The package under test is never installed: it is imported from the task tree. Wheels are
installed by pip inside a sandbox without network, on top of a virtual environment of the
base interpreter, so nothing of this program's own environment is visible to a test.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from composer_replication.errors import InputError
from composer_replication.records import Limits, SandboxSpec
from composer_replication.sandbox import base_interpreter, open_sandbox
from composer_replication.tasks.intake.cache import (
    cache_folder,
    cache_lock,
    hold,
    refuse_full_disk,
    sha256_of,
)
from composer_replication.tasks.intake.index import fits_this_machine, hash_error
from composer_replication.tasks.intake.lock import (
    EnvironmentLock,
    LockedWheel,
    prefetch_toolchain,
    python_version,
    wheel_path,
)

__all__ = ["Environment", "lock_of", "open_environment", "prefetch_toolchain"]

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
    names: frozenset[str]


def open_environment(
    lock: EnvironmentLock,
    *,
    backend: str | None = None,
    read_wheel: Callable[[LockedWheel], bytes] | None = None,
) -> Environment:
    """The environment of a lock, made first if this machine has not got it.

    Args:
        lock: what it holds.
        backend: sandbox backend in which the wheels are installed.
        read_wheel: gives the bytes of a wheel (a task store has them); the cache by default.

    Raises:
        InputError: the lock is for another Python or machine (CR0413), a wheel's hash is
            wrong (CR0408), or the installation failed (CR0413).
        SandboxFailure: the sandbox broke.
    """
    _check_fit(lock)
    base = Path(getattr(sys, "_base_executable", "") or sys.executable).resolve()
    key = f"{lock.fingerprint[:24]}-{sha256_of(f'{base}{sys.version}'.encode())[:8]}"
    root = cache_folder() / "environments" / key
    while not (hold(root) and (root / _READY).is_file()):
        with cache_lock(f"environment-{key}"):
            if not (root / _READY).is_file():
                _make(root, base, lock, backend, read_wheel or (lambda wheel: wheel_path(wheel).read_bytes()))
    interpreter = base_interpreter()
    return Environment(
        fingerprint=lock.fingerprint,
        python=root / "bin" / "python",
        root=root,
        read_only=(root, *interpreter.read_only),
        masked=interpreter.masked,
        names=lock.names,
    )


def lock_of(environment: Environment) -> EnvironmentLock:
    """The lock that an environment was made from, so that it can be made again elsewhere."""
    return EnvironmentLock.from_json(json.loads((environment.root / _READY).read_text()))


def _check_fit(lock: EnvironmentLock) -> None:
    misfit = [wheel.filename for wheel in lock.wheels if not fits_this_machine(wheel.filename)]
    if lock.python != python_version() or misfit:
        detail = (
            f"its wheel {misfit[0]} does not fit here" if misfit else f"this is Python {python_version()}"
        )
        raise InputError(
            "CR0413",
            f"the environment was locked for Python {lock.python} and {detail}.",
            where=lock.fingerprint[:12],
            fix="use that Python version, or build the tasks again on this machine with composer-rl tasks build.",
        )


def _make(
    root: Path,
    base: Path,
    lock: EnvironmentLock,
    backend: str | None,
    read_wheel: Callable[[LockedWheel], bytes],
) -> None:
    """Make the environment at its final place; ``READY.json`` comes last, so a torn one is made again."""
    shutil.rmtree(root, ignore_errors=True)
    root.parent.mkdir(parents=True, exist_ok=True)
    _make_venv(root, base, lock)
    wheels = root / ".wheels"
    wheels.mkdir()
    for wheel in (*lock.wheels, lock.installer):
        data = read_wheel(wheel)
        if sha256_of(data) != wheel.sha256:
            raise hash_error(wheel.filename, wheel.sha256, sha256_of(data))
        (wheels / wheel.filename).write_bytes(data)
    _install(root, wheels, lock, backend)
    shutil.rmtree(wheels)
    _make_readable(root)
    (root / _READY).write_text(json.dumps(lock.to_json(), sort_keys=True))


def _make_venv(root: Path, base: Path, lock: EnvironmentLock) -> None:
    """A virtual environment without pip."""
    done = subprocess.run(
        [str(base), "-I", "-m", "venv", "--without-pip", str(root)],
        check=False, capture_output=True, text=True, errors="replace", env={**os.environ, "LC_ALL": "C.UTF-8"},
    )  # fmt: skip
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip()
        refuse_full_disk(said, root)
        raise _not_installed(
            f"the virtual environment could not be made: {said[-300:] or 'no reason is given'}", lock
        )


def _not_installed(problem: str, lock: EnvironmentLock) -> InputError:
    message = " ".join(problem.split()).rstrip(".")  # one sentence on one line
    return InputError("CR0413", f"{message}.", where=lock.fingerprint[:12], fix="composer-rl doctor")


def _install(root: Path, wheels: Path, lock: EnvironmentLock, backend: str | None) -> None:
    interpreter = base_interpreter()
    spec = SandboxSpec(
        tree=root, read_only=interpreter.read_only, masked=interpreter.masked, limits=_INSTALL_LIMITS
    )
    command = [
        str(root / "bin" / "python"), "-I", f"{wheels / lock.installer.filename}/pip", "--no-input", "--disable-pip-version-check", "install",
        "--quiet", "--no-index", "--no-deps", "--no-cache-dir", "--no-warn-script-location",
        *(str(wheels / wheel.filename) for wheel in lock.wheels),
    ]  # fmt: skip
    with open_sandbox(spec, backend) as sandbox:
        done = sandbox.exec(
            command, timeout_seconds=_INSTALL_SECONDS, env={"PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8"}
        )
    if done.exit_code != 0 or done.timed_out:
        refuse_full_disk(done.stderr, root)
        why = done.stderr.strip()[-300:] or "timed out"
        raise _not_installed(f"the wheels could not be installed: {why}", lock)


def _make_readable(root: Path) -> None:
    """Let a jail with a user id of its own read the files, whatever umask made them."""
    for folder, _, files in os.walk(root):
        os.chmod(folder, 0o755)
        for name in files:
            path = os.path.join(folder, name)
            if not os.path.islink(path):
                os.chmod(path, 0o644 | (os.stat(path).st_mode & stat.S_IXUSR and 0o111))
