"""The control: a runner that holds nothing, written as one writes it without thinking of hostile code."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Self

from composer_replication.records import Check, ExecResult, FileEntry, SandboxSpec


class Plain:
    """Fulfils ``SandboxBackend``. Attempts that would hurt this machine are never given to it."""

    name = "control"

    def is_available(self) -> Check:
        """Always."""
        return Check(self.name, True, "a plain process")

    def open(self, spec: SandboxSpec) -> PlainSandbox:
        """A folder, and a home that all of one tree's lives share."""
        return PlainSandbox(spec.tree)


class PlainSandbox:
    """Fulfils ``Sandbox``, naively."""

    def __init__(self, tree: Path) -> None:
        self.tree = tree
        place = tree.parent
        self._home = str(place / "home")
        self._snapshots = place / f"kept-of-{tree.name}"
        for folder in (Path(self._home), self._snapshots):
            folder.mkdir(exist_ok=True)

    def exec(self, command: Sequence[str] | str, *, timeout_seconds: float, **more: Any) -> ExecResult:
        """Run it, with our variables, our descriptors and no limits; a time-out ends the one process."""
        argv = ["/bin/sh", "-c", command] if isinstance(command, str) else list(command)
        path = f".:{self._home}/bin:{os.environ.get('PATH', os.defpath)}"
        own = {"HOME": self._home, "PATH": path, "TMPDIR": self._home}
        variables = {**os.environ, **own, **(more.get("env") or {})}
        variables.pop("PYTHONDONTWRITEBYTECODE", None)
        started = time.monotonic()
        with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
            streams = {"input": more.get("stdin", b""), "stdout": stdout, "stderr": stderr}
            how = {"env": variables, "cwd": self.tree, "close_fds": False}
            timed_out = False
            try:
                code = subprocess.run(argv, **streams, **how, timeout=timeout_seconds, check=False).returncode
            except subprocess.TimeoutExpired:
                code, timed_out = -signal.SIGKILL, True
            facts = {"truncated": False, "timed_out": timed_out, "out_of_memory": False}
            seconds, code = time.monotonic() - started, 128 - code if code < 0 else code
            return ExecResult(code, _whole(stdout), _whole(stderr), **facts, seconds=seconds)

    def read_file(self, path: str, *, max_bytes: int = 4 * 1024**2) -> bytes:
        """Whatever is there."""
        return (self.tree / path).read_bytes()[:max_bytes]

    def write_file(self, path: str, data: bytes, *, is_executable: bool = False) -> None:
        """Wherever that is."""
        place = self.tree / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(data)
        if is_executable:
            place.chmod(0o755)

    def list_files(self, path: str = ".") -> list[FileEntry]:
        """Links followed."""
        return [FileEntry(name, "file", 0, 0o644) for name in sorted(os.listdir(self.tree / path))]

    def snapshot(self) -> str:
        """A copy of what the links lead to."""
        name = f"kept-{len(os.listdir(self._snapshots))}"
        with suppress(shutil.Error):  # what cannot be copied, sockets say, is left out
            shutil.copytree(self.tree, self._snapshots / name, ignore_dangling_symlinks=True)
        return name

    def restore(self, snapshot: str) -> None:
        """Write each file over what is there, into what is there."""
        with suppress(shutil.Error):
            shutil.copytree(self._snapshots / snapshot, self.tree, dirs_exist_ok=True)

    def close(self) -> None:
        """Forget the copies."""
        shutil.rmtree(self._snapshots, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _whole(stream: IO[bytes]) -> str:
    stream.seek(0)
    return stream.read().decode(errors="replace")
