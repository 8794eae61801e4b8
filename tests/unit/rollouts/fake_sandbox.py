"""A sandbox in memory for tests of pure logic: files as a dictionary, commands as recorded answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from composer_replication.errors import SandboxFailure, SandboxFileError
from composer_replication.records import Check, ExecResult, FileEntry, SandboxSpec
from composer_replication.sandbox import LocalSandbox


def done(stdout: str = "", stderr: str = "", exit_code: int = 0, **flags: bool) -> ExecResult:
    """What a command did."""
    known = {"truncated": False, "timed_out": False, "out_of_memory": False} | flags
    return ExecResult(exit_code, stdout, stderr, seconds=0.0, **known)


class BrokenBackend:
    """A jail that never opens."""

    name = "broken"

    def is_available(self) -> Check:
        return Check("broken", True, "says so")

    def open(self, spec: SandboxSpec) -> LocalSandbox:
        raise SandboxFailure("CR0302", f"no jail around {spec.tree.name}.")


class FakeSandbox:
    """Files are bytes by path; each command gets ``answer``, and is kept with its input in ``commands``."""

    tree = Path("/tree")

    def __init__(self, files: Mapping[str, bytes] | None = None, answer: ExecResult | None = None) -> None:
        self.files = dict(files or {})
        self.answer = answer or done()
        self.commands: list[tuple[list[str], bytes, float]] = []
        self.is_broken = False
        self.is_closed = False

    def exec(
        self,
        command: Sequence[str] | str,
        *,
        timeout_seconds: float,
        stdin: bytes = b"",
        env: Mapping[str, str] | None = None,
    ) -> ExecResult:
        self._check()
        if not timeout_seconds > 0 or any("\0" in word for word in command):
            raise ValueError("a NUL byte in the command")
        for word in command:
            word.encode()  # a UnicodeEncodeError is a ValueError, as in a real one
        self.commands.append((list(command), stdin, timeout_seconds))
        return self.answer

    def read_file(self, path: str, *, max_bytes: int = 4 * 1024**2) -> bytes:
        self._check()
        if self._name(path) not in self.files:
            raise SandboxFileError("CR0309", "the file cannot be used: no such file.", where=path[:300])
        return self.files[self._name(path)][:max_bytes]

    def write_file(self, path: str, data: bytes, *, is_executable: bool = False) -> None:
        self._check()
        name = self._name(path)
        if not name or name in self._folders():
            raise SandboxFileError("CR0309", "the file cannot be used: is a directory.", where=path[:300])
        self.files[name] = data

    def list_files(self, path: str = ".") -> list[FileEntry]:
        self._check()
        name = self._name(path)
        if name and name not in self._folders():
            raise SandboxFileError("CR0309", "the file cannot be used: not a directory.", where=path[:300])
        below = f"{name}/" if name else ""
        entries = [FileEntry(each, "file", len(data), 0o644) for each, data in self.files.items()]
        entries += [FileEntry(each, "folder", 0, 0o755) for each in self._folders()]
        return sorted((each for each in entries if each.path.startswith(below)), key=lambda each: each.path)

    def snapshot(self) -> str:
        raise NotImplementedError

    def restore(self, snapshot: str) -> None:
        raise NotImplementedError

    def close(self) -> None:
        self.is_closed = True

    def __enter__(self) -> FakeSandbox:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _check(self) -> None:
        if self.is_broken or self.is_closed:
            raise SandboxFailure("CR0303", "the sandbox is closed.")

    def _folders(self) -> set[str]:
        return {name[:at] for name in self.files for at, letter in enumerate(name) if letter == "/"}

    def _name(self, path: str) -> str:
        if "\0" in path or path.startswith("/") or ".." in path.split("/"):
            raise SandboxFileError(
                "CR0309", "the file cannot be used: it leads out of the tree.", where=path[:300]
            )
        return "/".join(part for part in path.split("/") if part not in ("", "."))
