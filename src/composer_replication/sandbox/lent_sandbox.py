"""A sandbox of a pool, as whoever has it for the moment sees it: in a thread, or awaited."""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from composer_replication.records import ExecResult, FileEntry
from composer_replication.sandbox.jailed_tree import failure
from composer_replication.sandbox.warm_bubblewrap import WarmBubblewrapSandbox


class PooledSandbox:
    """A sandbox of a pool, lent until ``close``; fulfils ``interfaces.Sandbox``.

    Every method raises ``SandboxFailure`` (CR0303) after ``close``: by then it may be somebody else's.
    """

    def __init__(
        self, sandbox: WarmBubblewrapSandbox, give_back: Callable[[WarmBubblewrapSandbox], None]
    ) -> None:
        self.tree = sandbox.tree
        self._give_back = give_back
        self._lent: WarmBubblewrapSandbox | None = sandbox
        self._lock = threading.Lock()

    @property
    def _sandbox(self) -> WarmBubblewrapSandbox:
        if self._lent is None:
            raise failure("CR0303", "the sandbox was given back to its pool.", str(self.tree))
        return self._lent

    def exec(
        self,
        command: Sequence[str] | str,
        *,
        timeout_seconds: float,
        stdin: bytes = b"",
        env: Mapping[str, str] | None = None,
    ) -> ExecResult:
        """As ``Sandbox.exec``."""
        return self._sandbox.exec(command, timeout_seconds=timeout_seconds, stdin=stdin, env=env)

    def read_file(self, path: str, *, max_bytes: int = 4 * 1024**2) -> bytes:
        """As ``Sandbox.read_file``."""
        return self._sandbox.read_file(path, max_bytes=max_bytes)

    def write_file(self, path: str, data: bytes, *, is_executable: bool = False) -> None:
        """As ``Sandbox.write_file``."""
        self._sandbox.write_file(path, data, is_executable=is_executable)

    def list_files(self, path: str = ".") -> list[FileEntry]:
        """As ``Sandbox.list_files``."""
        return self._sandbox.list_files(path)

    def snapshot(self) -> str:
        """As ``Sandbox.snapshot``."""
        return self._sandbox.snapshot()

    def restore(self, snapshot: str) -> None:
        """As ``Sandbox.restore``."""
        self._sandbox.restore(snapshot)

    def reset(self, tree: Path | None = None, files: Mapping[str, bytes] | None = None) -> None:
        """Make it new for a further rollout without giving it back, and fill its tree as ``take`` does.

        Raises:
            SandboxFailure: something survived (CR0310): that jail is ended, and the next command gets another.
        """
        self._sandbox.reset()
        if tree is not None or files:
            self._sandbox.fill(tree, files)

    def close(self) -> None:
        """Give it back; idempotent."""
        with self._lock:
            sandbox, self._lent = self._lent, None
        if sandbox is not None:
            self._give_back(sandbox)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class AsyncSandbox:
    """A lent sandbox whose methods are awaited: those of ``Sandbox``, and ``reset`` and ``close``."""

    def __init__(self, sandbox: PooledSandbox, call: Callable[..., Awaitable[Any]]) -> None:
        self.tree = sandbox.tree
        self.sandbox = sandbox
        self._call = call

    async def exec(self, command: Sequence[str] | str, **options: Any) -> ExecResult:
        """As ``Sandbox.exec``."""
        done: ExecResult = await self._call(self.sandbox.exec, command, **options)
        return done

    async def read_file(self, path: str, **options: Any) -> bytes:
        """As ``Sandbox.read_file``."""
        data: bytes = await self._call(self.sandbox.read_file, path, **options)
        return data

    async def write_file(self, path: str, data: bytes, **options: Any) -> None:
        """As ``Sandbox.write_file``."""
        await self._call(self.sandbox.write_file, path, data, **options)

    async def list_files(self, path: str = ".") -> list[FileEntry]:
        """As ``Sandbox.list_files``."""
        found: list[FileEntry] = await self._call(self.sandbox.list_files, path)
        return found

    async def snapshot(self) -> str:
        """As ``Sandbox.snapshot``."""
        name: str = await self._call(self.sandbox.snapshot)
        return name

    async def restore(self, snapshot: str) -> None:
        """As ``Sandbox.restore``."""
        await self._call(self.sandbox.restore, snapshot)

    async def reset(self, tree: Path | None = None, files: Mapping[str, bytes] | None = None) -> None:
        """As ``PooledSandbox.reset``."""
        await self._call(self.sandbox.reset, tree, files)

    async def close(self) -> None:
        """Give it back."""
        self.sandbox.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()
