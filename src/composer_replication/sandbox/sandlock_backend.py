"""Jails made by the package ``sandlock``: Landlock and seccomp, no namespaces.

For machines where no user namespace can be made (most pods). Files outside the allow
list stay visible by name but cannot be opened; there is no network at all, not even a
loopback, no ``/proc``, no ``/tmp`` (``TMPDIR`` is private) and no ``/dev/shm``. A name
that is no UTF-8 cannot be looked at (EFAULT).

Each command gets a process of ours around it (``sandlock_child``). What sandlock itself
does not hold we hold: daemons that leave the process group, the death of this process,
disk use, masks inside an allowed folder, and modes, times and links outside (``file_changes``).
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import resource
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from composer_replication.errors import MissingError
from composer_replication.interfaces import Sandbox
from composer_replication.records import Check, SandboxSpec
from composer_replication.sandbox.calls import failure, resource_limits
from composer_replication.sandbox.child_process import allowed
from composer_replication.sandbox.host_paths import base_interpreter, is_below, system_folders
from composer_replication.sandbox.keeper_process import KeptSandbox, end_keeper

_DEVICES = ("/dev/zero", "/dev/random", "/dev/urandom", "/dev/full")
_INSTALL = "pip install sandlock (Linux 6.12 or newer; the kernel needs Landlock)"
_CREATE_RULESET, _TELL_THE_VERSION = 444, 1  # one number everywhere
_LEAST_LANDLOCK = 6  # Linux 6.12
# They exist by name and cannot be opened, at which git gives up. In a namespace they are not there.
_GIT_READS_NO_FILE_OF_THE_SYSTEM = {"GIT_CONFIG_NOSYSTEM": "1", "GIT_ATTR_NOSYSTEM": "1"}


class Sandlock:
    """The backend ``sandlock``."""

    name = "sandlock"

    def is_available(self) -> Check:
        """Is the package there, and does the kernel have the Landlock that it needs?"""
        if importlib.util.find_spec("sandlock") is None:
            return Check(self.name, False, "the package sandlock is not installed.", _INSTALL)
        if (has := _landlock_version()) < _LEAST_LANDLOCK:
            problem = f"the kernel has Landlock version {max(has, 0)} and sandlock needs {_LEAST_LANDLOCK}."
            return Check(self.name, False, problem, "use a newer kernel, or --backend bubblewrap")
        return Check(self.name, True, "Landlock and sandlock are there.")

    def open(self, spec: SandboxSpec) -> Sandbox:
        """Take over ``spec.tree`` and prepare a jail around it."""
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
        known = (system_folders(), base_interpreter())
        shown = {path.resolve() for group in known for path in group.read_only}
        shown |= {path.resolve() for path in spec.read_only}
        masked = {path.resolve() for group in known for path in group.masked}
        masked |= {path.resolve() for path in spec.masked}
        self._masked = sorted(path for path in masked if is_below(path, shown | {self._real_tree}))
        self._readable = [*sorted(shown), *(Path(name) for name in _DEVICES if os.path.exists(name))]

    def _orders(self, argv: list[str], env: Mapping[str, str]) -> dict[str, Any]:
        limits, above = self._limits, str(self._real_tree.parent)
        return {
            "sandlock_path": _sandlock_path(),
            "argv": argv,
            "masked": [str(path) for path in self._masked],
            "limits": [each for each in resource_limits(limits) if each[0] != resource.RLIMIT_NOFILE],
            "policy": {
                "fs_readable": [str(path) for path in self._readable],
                "fs_denied": [str(path) for path in self._masked],
                "fs_writable": [*(str(path) for path in self._writable), "/dev/null"],
                "max_processes": limits.num_processes,
                "max_open_files": allowed(resource.RLIMIT_NOFILE, limits.num_open_files),
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


def _landlock_version() -> int:
    """Of this kernel; below 1 where it has none."""
    return int(ctypes.CDLL(None).syscall(_CREATE_RULESET, None, 0, _TELL_THE_VERSION))
