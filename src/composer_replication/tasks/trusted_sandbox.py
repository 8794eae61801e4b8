"""Code of repositories runs only in a sandbox whose self-test has passed on this machine since it was started.

    CACHE/selftests/<key>.json    a pass, for whatever could change the outcome: user, machine, container, programs

Rewards ask for more: their self-test is one of the same process (``require_selftest``).
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
from contextlib import suppress
from pathlib import Path

from composer_replication import __version__
from composer_replication.interfaces import SandboxBackend
from composer_replication.run_folder import write_json
from composer_replication.sandbox import choose_backend, require_selftest
from composer_replication.tasks.intake.cache import cache_folder

FOLDER = "selftests"
"""In the cache; ``cache prune`` knows it by this name."""
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_NAMESPACES = ("user", "mnt", "net", "pid")
_PROGRAMS = ("bwrap", "setpriv", "docker", "podman")


def require_trusted(name: str | None) -> None:
    """Try the guards of a backend, unless all of them have held here already.

    Args:
        name: of the backend, or its dotted path; None for the best of this machine.

    Raises:
        SandboxFailure: a guard does not hold and is not accepted (CR0306); nothing can be planted (CR0302).
        UsageError, MissingError: no such backend, or none works here; as ``choose_backend``.
    """
    backend = choose_backend(name)
    passed = cache_folder() / FOLDER / f"{_key(backend)}.json"
    if passed.exists():
        return
    if not require_selftest(backend):
        passed.parent.mkdir(exist_ok=True)
        write_json(passed, {"backend": backend.name, "package_version": __version__})


def _key(backend: SandboxBackend) -> str:
    kind = type(backend)
    module = sys.modules.get(kind.__module__)
    parts = [
        f"{kind.__module__}:{kind.__qualname__}:{backend.name}",
        __version__,
        os.geteuid(),
        os.uname().release,
        _BOOT.read_text().strip() if _BOOT.exists() else "",
        [_namespace(name) for name in _NAMESPACES],
        _state(getattr(module, "__file__", None)),
        [_state(shutil.which(program)) for program in _PROGRAMS],
    ]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def _namespace(name: str) -> str:
    with suppress(OSError):
        return os.readlink(f"/proc/self/ns/{name}")
    return ""


def _state(path: str | None) -> list[object]:
    """What changes when a program is another one."""
    if path is None:
        return []
    info = os.stat(path)
    return [path, info.st_size, info.st_mtime_ns]
