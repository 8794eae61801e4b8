"""Which sandbox proved the tasks of a store: what a test may notice when it runs elsewhere."""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from functools import cache

from composer_replication.sandbox import choose_backend, name_of
from composer_replication.sandbox.bwrap_program import START_SECONDS, find_bwrap


@dataclass(frozen=True, slots=True, order=True)
class ProvingSandbox:
    """A backend, its version (empty where it tells none), and the Python and the system that run in it."""

    backend: str
    version: str
    python: str
    platform: str

    def __str__(self) -> str:
        name = f"{self.backend} {self.version}".strip()
        return f"{name} (Python {self.python}, {self.platform})"


@cache
def sandbox_in_force(backend: str | None) -> ProvingSandbox:
    """The sandbox that a backend gives here; None for the best of this machine."""
    name = name_of(choose_backend(backend))
    system = f"{platform.system()} {platform.machine()}"
    return ProvingSandbox(name, _version(name), platform.python_version(), system)


def _version(name: str) -> str:
    if name == "sandlock":
        with suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    found = find_bwrap() if name.startswith("bubblewrap") else None
    if found is None:
        return ""
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(
            [found.path, "--version"], capture_output=True, text=True, timeout=START_SECONDS, check=False
        )
        return done.stdout.strip().rpartition(" ")[2]
    return ""
