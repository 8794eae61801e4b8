"""Small programs and looks at this machine that the tests of the contract share."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from composer_replication.interfaces import Sandbox, SandboxBackend
from composer_replication.records import ExecResult, Limits, SandboxSpec
from composer_replication.sandbox.host_paths import base_python

MIB = 1 << 20
LONG_SECONDS = 60.0
_PAUSE_SECONDS = 0.02


def python(code: str) -> list[str]:
    """The command that runs ``code`` with the interpreter that every sandbox shows."""
    return [str(base_python()), "-I", "-c", code]


def run(sandbox: Sandbox, command: Any, **given: Any) -> ExecResult:
    """One command with plenty of time."""
    return sandbox.exec(command, timeout_seconds=LONG_SECONDS, **given)


def run_limited(backend: SandboxBackend, tree: Path, command: Any, **limits: int) -> ExecResult:
    """One command in a sandbox of its own, with these limits."""
    with backend.open(SandboxSpec(tree, limits=Limits(**limits))) as sandbox:
        return run(sandbox, command)


def living(token: str) -> list[int]:
    """Processes anywhere on this machine whose command line holds the token."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if token in (entry / "cmdline").read_text(errors="replace"):
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


def wait_until(condition: Callable[[], object], patience_seconds: float = 30.0) -> None:
    """Look until it is so; an ``AssertionError`` when patience is over."""
    deadline = time.monotonic() + patience_seconds
    while not condition():
        if time.monotonic() >= deadline:
            raise AssertionError("it did not come about")
        time.sleep(_PAUSE_SECONDS)


def open_to_all(path: Path) -> None:
    """Open a folder to every user: as root the jail runs as another one, and only the jail may be what stops it."""
    for entry in (path, *path.rglob("*")):
        entry.chmod(0o755 if entry.is_dir() else 0o644)


def start_ours(code: str, temporary: Path) -> subprocess.Popen[str]:
    """Start ``code`` in an interpreter that imports what this one does, with a temporary folder of its own."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": str(temporary)}
    return subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True)
