"""No jail at all: the command is an ordinary process of ours, that may read, write and reach what we may.

For a machine that holds nothing and is thrown away, and for looking at the tests of code that one trusts.
Chosen only by name and only after ``accept`` (``--i-accept-no-isolation``, ``sandbox.accept_no_isolation``). Limits
and the end of daemons are best effort: they hold against accidents, not against intent.
"""

from __future__ import annotations

import os
import random
import resource
import subprocess
import time
from collections.abc import Mapping

from composer_replication.interfaces import Sandbox
from composer_replication.records import Check, ExecResult, SandboxSpec
from composer_replication.sandbox.jailed_tree import STARTER, failure, to_result
from composer_replication.sandbox.keeper_process import end_keeper, start_keeper
from composer_replication.sandbox.local_sandbox import LocalSandbox
from composer_replication.sandbox.supervised_run import supervise

_NUM_OWN_PROCESSES = 1


class NoIsolation:
    """The backend ``none``."""

    name = "none"

    def is_available(self) -> Check:
        """It always is, and never a jail."""
        return Check(self.name, True, "a plain process: nothing is isolated.")

    def open(self, spec: SandboxSpec) -> Sandbox:
        """Take over ``spec.tree``. ``read_only`` and ``masked`` are checked and have no effect.

        Raises:
            SandboxFailure: a path of the spec is missing (CR0304).
        """
        return NoIsolationSandbox(spec)


class NoIsolationSandbox(LocalSandbox):
    """Processes in a folder; ``exec`` may be called from several threads at once."""

    def __init__(self, spec: SandboxSpec) -> None:
        super().__init__(spec, None)

    def _run(
        self, argv: list[str], environment: Mapping[str, str], stdin: bytes, timeout_seconds: float
    ) -> ExecResult:
        marker = f"<{random.randbytes(16).hex()}>"  # noqa: S311  tells lines apart, guards nothing
        started = time.monotonic()
        process = self._start(["/bin/sh", "-c", STARTER, "sandbox", marker, *argv], environment)
        ended = supervise(
            process,
            lambda: _end(process),
            stdin=stdin,
            timeout_seconds=max(0.001, timeout_seconds - (time.monotonic() - started)),
            watched=self._jailed.watched(num_own_processes=_NUM_OWN_PROCESSES),
            extra_bytes=len(marker),
        )
        return to_result(ended, marker.encode(), self._jailed.limits, backend=NoIsolation.name)

    def _start(self, argv: list[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        limits = self._jailed.limits
        orders = {
            "parent": os.getpid(),
            "argv": argv,
            "env": dict(environment),
            "cwd": str(self._jailed.real_tree),
            "limits": [
                (resource.RLIMIT_CORE, 0),
                (resource.RLIMIT_DATA, limits.memory_bytes),
                (resource.RLIMIT_FSIZE, limits.disk_bytes),
                (resource.RLIMIT_NOFILE, limits.num_open_files),
            ],
        }
        try:
            return start_keeper("none_child", orders, {"PATH": os.defpath})
        except OSError as error:
            raise failure("CR0302", f"no process can be started: {error}.") from error


def _end(process: subprocess.Popen[bytes]) -> None:
    end_keeper(process)  # without a jail what escapes us cannot be helped
