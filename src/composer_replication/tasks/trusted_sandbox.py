"""Code of repositories runs only in a sandbox whose self-test has passed on this machine since it was started.

    CACHE/selftests/<key>.json    a pass, for whatever could change the outcome: user, rights, container, programs, code

Only of the jails of this machine: what an engine or a cluster holds is decided elsewhere, and what somebody else's
backend holds nobody can tell from its file. These are tried once per process. Rewards ask for more: their self-test is
always one of the same process (``require_selftest``).
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path

from composer_replication import __version__
from composer_replication.run_folder import write_json
from composer_replication.sandbox import choose_backend, name_of, require_selftest
from composer_replication.tasks.intake.cache import cache_folder

FOLDER = "selftests"
"""In the cache; ``cache prune`` knows it by this name."""
REMEMBERED = frozenset({"bubblewrap", "bubblewrap-warm", "sandlock"})
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_SANDBOX_CODE = Path(__file__).parents[1] / "sandbox"
_NAMESPACES = ("user", "mnt", "net", "pid")
_PROGRAMS = ("bwrap", "setpriv")
_RIGHTS = ("CapEff", "CapBnd", "NoNewPrivs", "Seccomp")
_SETTINGS = "COMPOSER_RL_"


def require_trusted(name: str | None, progress: Callable[[int, int, str], None] | None = None) -> None:
    """Try the guards of a backend, unless all of them have held here already.

    Args:
        name: of the backend, or its dotted path; None for the best of this machine.
        progress: called with (guards tried, all of them, the next one).

    Raises:
        SandboxFailure: a guard does not hold and is not accepted (CR0306); nothing can be planted (CR0302).
        UsageError, MissingError: no such backend, or none works here; as ``choose_backend``.
    """
    backend = choose_backend(name)
    known = name_of(backend)
    passed = cache_folder() / FOLDER / f"{_key(known)}.json"
    if known in REMEMBERED and passed.exists():
        return
    if not require_selftest(backend, progress=progress) and known in REMEMBERED:
        with suppress(OSError):  # of a cache that somebody else filled: tried again the next time
            passed.parent.mkdir(exist_ok=True)
            write_json(passed, {"backend": known, "package_version": __version__})


def _key(backend: str) -> str:
    parts = [
        backend,
        __version__,
        os.geteuid(),
        os.getegid(),
        _rights(),
        os.uname().release,
        _BOOT.read_text().strip() if _BOOT.exists() else "",
        [_namespace(name) for name in _NAMESPACES],
        [_state(shutil.which(program)) for program in _PROGRAMS],
        _libraries(),
        _code(),
        sorted(item for item in os.environ.items() if item[0].startswith(_SETTINGS)),
    ]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def _rights() -> list[str]:
    found: list[str] = []
    with suppress(OSError):
        lines = Path("/proc/self/status").read_text().splitlines()
        found += [line for line in lines if line.partition(":")[0] in _RIGHTS]
        found += Path("/proc/self/uid_map").read_text().split()
    return found


def _libraries() -> str:
    with suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version("sandlock")
    return ""


@cache
def _code() -> str:
    files = sorted(_SANDBOX_CODE.rglob("*.py"))
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in files)).hexdigest()


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
