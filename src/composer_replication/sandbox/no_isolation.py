"""No jail at all: the command is an ordinary process of ours, that may read, write and reach what we may.

For a machine that holds nothing and is thrown away, and for looking at the tests of code that one trusts.
Chosen only by name and only after ``accept`` (``--i-accept-no-isolation``, ``sandbox.accept_no_isolation``). Limits
and the end of daemons are best effort: they hold against accidents, not against intent.
"""

from __future__ import annotations

import resource
import subprocess
from collections.abc import Mapping
from typing import Any

from composer_replication.interfaces import Sandbox
from composer_replication.records import Check, SandboxSpec
from composer_replication.sandbox.keeper_process import KeptSandbox, end_keeper


class NoIsolation:
    """The backend ``none``."""

    name = "none"

    def is_available(self) -> Check:
        """It always is, and never a jail."""
        return Check(self.name, True, "a plain process: nothing is isolated.")

    def open(self, spec: SandboxSpec) -> Sandbox:
        """Take over ``spec.tree``. ``read_only`` and ``masked`` are checked and have no effect."""
        return NoIsolationSandbox(spec, None)


class NoIsolationSandbox(KeptSandbox):
    """Processes in a folder; what escapes us cannot be helped without a jail."""

    backend_name = NoIsolation.name
    child_module = "child_process"
    num_own_processes = 1

    def _orders(self, argv: list[str], env: Mapping[str, str]) -> dict[str, Any]:
        limits = self._limits
        return {
            "argv": argv,
            "env": dict(env),
            "cwd": str(self._real_tree),
            "limits": [
                (resource.RLIMIT_CORE, 0),
                (resource.RLIMIT_DATA, limits.memory_bytes),
                (resource.RLIMIT_FSIZE, limits.disk_bytes),
                (resource.RLIMIT_NOFILE, limits.num_open_files),
            ],
        }

    def _kill(self, process: subprocess.Popen[bytes]) -> None:
        end_keeper(process)
