"""Jails made by the package ``sandlock``: Landlock and seccomp, no namespaces.

For machines where no user namespace can be made (most pods). Files outside the allow
list stay visible by name but cannot be opened; there is no network at all, not even a
loopback, no ``/proc``, no ``/tmp`` (``TMPDIR`` is private) and no ``/dev/shm``. A name
that is no UTF-8 cannot be looked at (EFAULT): in the tree it is respelled (``%FF``) after
each command.

Each command gets a process of ours around it (``sandlock_child``). What sandlock itself
does not hold we hold: daemons that leave the process group, the death of this process,
disk use, masks inside an allowed folder, and modes, times and links outside (``file_changes``).
"""

from __future__ import annotations

import importlib.util
import os
import resource
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from composer_replication.errors import MissingError
from composer_replication.interfaces import Sandbox
from composer_replication.records import Check, ExecResult, SandboxSpec
from composer_replication.sandbox.bwrap_program import remembered
from composer_replication.sandbox.calls import failure
from composer_replication.sandbox.host_paths import base_interpreter, is_below, system_folders
from composer_replication.sandbox.keeper_process import KeptSandbox, end_keeper

_DEVICES = ("/dev/zero", "/dev/random", "/dev/urandom", "/dev/full")
_INSTALL = "pip install sandlock (Linux 6.12 or newer; the kernel needs Landlock)"
_LOAD_SECONDS = 60.0
# They exist by name and cannot be opened, at which git gives up. In a namespace they are not there.
_GIT_READS_NO_FILE_OF_THE_SYSTEM = {"GIT_CONFIG_NOSYSTEM": "1", "GIT_ATTR_NOSYSTEM": "1"}


class Sandlock:
    """The backend ``sandlock``."""

    name = "sandlock"

    def is_available(self) -> Check:
        """Is the package there, and does the kernel have the Landlock that it needs?"""
        if importlib.util.find_spec("sandlock") is None:
            return Check(self.name, False, "the package sandlock is not installed.", _INSTALL)
        problem = remembered("sandlock", _kernel_problem)
        if problem:
            return Check(self.name, False, problem, "use a newer kernel, or --backend bubblewrap")
        return Check(self.name, True, "Landlock and sandlock are there.")

    def open(self, spec: SandboxSpec) -> Sandbox:
        """Take over ``spec.tree`` and prepare a jail around it.

        Raises:
            MissingError: the package or Landlock is missing (CR0301).
            SandboxFailure: a path of the spec is missing or cannot be shown (CR0304).
        """
        check = self.is_available()
        if not check.ok:
            raise MissingError("CR0301", check.detail, fix=check.fix)
        return SandlockSandbox(spec)


class SandlockSandbox(KeptSandbox):
    """One jail."""

    backend_name = Sandlock.name
    child_module = "sandlock_child"

    def __init__(self, spec: SandboxSpec) -> None:
        super().__init__(spec, 0 if os.geteuid() == 0 else None)
        self._tree_files.respell()
        known = (system_folders(), base_interpreter())
        shown = {path.resolve() for group in known for path in group.read_only}
        shown |= {path.resolve() for path in spec.read_only}
        masked = {path.resolve() for group in known for path in group.masked}
        masked |= {path.resolve() for path in spec.masked}
        self._masked = sorted(path for path in masked if is_below(path, shown | {self._real_tree}))
        self._readable = [*sorted(shown), *(Path(name) for name in _DEVICES if os.path.exists(name))]

    def _run(
        self, argv: list[str], environment: Mapping[str, str], stdin: bytes, timeout_seconds: float
    ) -> ExecResult:
        try:
            return super()._run(argv, environment, stdin, timeout_seconds)
        finally:
            self._tree_files.respell()

    def write_file(self, path: str, data: bytes, *, is_executable: bool = False) -> None:
        """As ``Sandbox.write_file``; a name that is no UTF-8 is respelled at once."""
        super().write_file(path, data, is_executable=is_executable)
        self._tree_files.respell()

    def _orders(self, argv: list[str], env: Mapping[str, str]) -> dict[str, Any]:
        limits, above = self._limits, str(self._real_tree.parent)
        return {
            "sandlock_path": _sandlock_path(),
            "argv": argv,
            "masked": [str(path) for path in self._masked],
            "limits": [
                (resource.RLIMIT_CORE, 0),
                (resource.RLIMIT_DATA, limits.memory_bytes),
                (resource.RLIMIT_FSIZE, limits.disk_bytes),
            ],
            "policy": {
                "fs_readable": [str(path) for path in self._readable],
                "fs_denied": [str(path) for path in self._masked],
                "fs_writable": [*(str(path) for path in self._writable), "/dev/null"],
                "max_processes": limits.num_processes,
                "max_open_files": limits.num_open_files,
                "extra_deny_syscalls": ["landlock_create_ruleset"],  # rules keep deleted files and show none
                "clean_env": True,
                "env": {**_GIT_READS_NO_FILE_OF_THE_SYSTEM, "GIT_CEILING_DIRECTORIES": above, **env},
                "cwd": str(self._real_tree),
            },
        }

    def _kill(self, process: subprocess.Popen[bytes]) -> None:
        if not end_keeper(process):
            raise failure("CR0302", "sandlock left processes that cannot be killed.")


def _sandlock_path() -> str:
    spec = importlib.util.find_spec("sandlock")
    if spec is None or spec.origin is None:
        raise MissingError("CR0301", "the package sandlock is not installed.", fix=_INSTALL)
    return str(Path(spec.origin).parents[1])


def _kernel_problem() -> str:
    """Empty, or why Landlock does not do; asked in a process of its own, for it loads a library."""
    code = (
        f"import sys; sys.path.insert(0, {_sandlock_path()!r}); import sandlock;"
        "print(sandlock.landlock_abi_version(), sandlock.min_landlock_abi())"
    )
    command = [sys.executable, "-I", "-S", "-c", code]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_LOAD_SECONDS, check=False, env={"HOME": "/"}
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"the package sandlock cannot be loaded: {error}."
    if done.returncode != 0:
        why = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return f"the package sandlock cannot be loaded: {why}."
    has, needs = (int(word) for word in done.stdout.split())
    return "" if has >= needs else f"the kernel has Landlock version {has} and sandlock needs {needs}."
