"""What every jail on this machine's own file system shares: its files, snapshots and end."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Self

from composer_replication.records import ExecResult, FileEntry, SandboxSpec
from composer_replication.sandbox.call_checks import (
    are_too_long,
    check_timeout,
    checked_command,
    checked_input,
    checked_variables,
)
from composer_replication.sandbox.jailed_tree import JailedTree, failure
from composer_replication.sandbox.tree_files import TreeFiles
from composer_replication.sandbox.tree_snapshots import TreeSnapshots

_NOT_STARTED = 126


class LocalSandbox(ABC):
    """A jail whose tree is a folder of this machine; a backend adds ``_run``.

    Args:
        spec: its ``tree`` is taken over.
        uid: the user id inside, or None when it is our own.
    """

    def __init__(self, spec: SandboxSpec, uid: int | None) -> None:
        self.tree = spec.tree
        self._jailed = JailedTree(spec, uid)
        self._tree_files = TreeFiles(self._jailed.real_tree, uid)
        self._snapshots = TreeSnapshots(self._jailed.real_tree, self._jailed.scratch.root / "snapshots")

    def exec(
        self,
        command: Sequence[str] | str,
        *,
        timeout_seconds: float,
        stdin: bytes = b"",
        env: Mapping[str, str] | None = None,
    ) -> ExecResult:
        """Run one command; see ``interfaces.Sandbox``.

        Raises:
            SandboxFailure: closed (CR0303), the jail itself failed (CR0302), or no room on the machine's disk (CR0104).
            CommandError: no command, a NUL byte, text that has no bytes, a time-out that is not above 0 and finite, input
                that is not bytes, a variable without a name or with an equals sign in it (CR0886).
        """
        argv = checked_command(command)
        check_timeout(timeout_seconds)
        data = checked_input(stdin)
        environment = self._jailed.environment(checked_variables(env))
        with self._jailed.running():
            if are_too_long(argv, environment):
                stderr = f"{argv[0]}: Argument list too long\n"
                return ExecResult(_NOT_STARTED, "", stderr, False, False, False, 0.0)
            if not self._jailed.real_tree.is_dir():
                raise failure("CR0302", "the tree of the sandbox is gone.", str(self.tree))
            self._jailed.open_folders()
            try:
                self._jailed.require_room()
                return self._run(argv, environment, data, float(timeout_seconds))
            except OSError as error:  # no space, no descriptor, no process: never the command's doing
                why = f"the command cannot be run: {error.strerror or error}."
                raise failure("CR0302", why, str(error.filename or self.tree)) from error
            except RecursionError as error:
                raise failure("CR0302", "the tree is too deep to be sent.", str(self.tree)) from error

    @abstractmethod
    def _run(
        self, argv: list[str], environment: Mapping[str, str], stdin: bytes, timeout_seconds: float
    ) -> ExecResult:
        """Run a checked command in the tree."""

    def read_file(self, path: str, *, max_bytes: int = 4 * 1024**2) -> bytes:
        """The first ``max_bytes`` bytes of a file.

        Raises:
            SandboxFileError: missing, no regular file, or out of the tree (CR0309).
            SandboxFailure: closed (CR0303).
        """
        with self._jailed.running():
            return self._tree_files.read(path, max_bytes)

    def write_file(self, path: str, data: bytes, *, is_executable: bool = False) -> None:
        """Put a file there, whole or not at all; missing folders are made.

        Raises:
            SandboxFileError: it cannot be written, or lies out of the tree (CR0309).
            SandboxFailure: closed (CR0303).
        """
        with self._jailed.running():
            self._tree_files.write(path, data, is_executable=is_executable)

    def list_files(self, path: str = ".") -> list[FileEntry]:
        """Everything below a folder, sorted by path.

        Raises:
            SandboxFileError: missing, no folder, or out of the tree; more than is looked through (CR0309).
            SandboxFailure: closed (CR0303), or we have no descriptor left (CR0302).
        """
        with self._jailed.running():
            return self._tree_files.list(path)

    def snapshot(self) -> str:
        """Keep the tree as it is; the name to ``restore`` it by.

        Raises:
            SandboxFileError: a path in it is too long for a copy, or there are too many of them (CR0309).
            SandboxFailure: closed (CR0303), or it cannot be copied (CR0309).
        """
        with self._jailed.alone():
            try:
                return self._snapshots.take()
            except OSError as error:
                raise failure("CR0309", f"the tree cannot be kept: {error}.", str(self.tree)) from error

    def restore(self, snapshot: str) -> None:
        """Bring the tree back to a snapshot.

        Raises:
            SandboxFailure: closed (CR0303), an unknown name, or it cannot be copied back (CR0309).
        """
        with self._jailed.alone():
            if snapshot not in self._snapshots:
                raise failure("CR0309", f"there is no snapshot {snapshot!r} of this tree.", str(self.tree))
            try:
                self._snapshots.restore(snapshot)
            except OSError as error:
                raise failure("CR0309", f"the tree is not whole: {error}.", str(self.tree)) from error

    def close(self) -> None:
        """Give the tree back, remove the scratch folder and the snapshots; idempotent."""
        self._jailed.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
