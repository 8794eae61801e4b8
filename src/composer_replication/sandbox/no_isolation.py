"""No jail at all: the command is an ordinary process of ours, that may read, write and reach what we may.

For a machine that holds nothing and is thrown away, and for looking at the tests of code that one trusts.
Chosen only by name and only after ``accept`` (``--i-accept-no-isolation``, ``sandbox.accept_no_isolation``). Limits
and the end of daemons are best effort: they hold against accidents, not against intent.
"""

from __future__ import annotations

import json
import os
import random
import resource
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from composer_replication.interfaces import Sandbox
from composer_replication.records import Check, ExecResult, SandboxSpec
from composer_replication.sandbox.jailed_tree import STARTER, failure, to_result
from composer_replication.sandbox.local_sandbox import LocalSandbox
from composer_replication.sandbox.process_tree import descendants, kill_descendants
from composer_replication.sandbox.supervised_run import supervise

_NUM_OWN_PROCESSES = 1
# The packages are named to the child without running their __init__, which would load what it does not need.
_LAUNCH = """
import sys, types
for name, folder in {folders!r}.items():
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [folder]
from composer_replication.sandbox.none_child import main
main()
"""


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
            lambda: _kill(process),
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
        descriptor = os.memfd_create("orders")
        try:
            with os.fdopen(os.dup(descriptor), "w") as handle:
                json.dump(orders, handle)
            os.lseek(descriptor, 0, os.SEEK_SET)
            return subprocess.Popen(
                [
                    sys.executable,
                    "-I",
                    "-S",
                    "-c",
                    _LAUNCH.format(folders=_package_folders()),
                    str(descriptor),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env={"PATH": os.defpath},
                pass_fds=[descriptor],
                start_new_session=True,
            )
        except OSError as error:
            raise failure("CR0302", f"no process can be started: {error}.") from error
        finally:
            os.close(descriptor)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill what the command left, then the process around it, which collects orphans."""
    if process.poll() is None:
        kill_descendants(process.pid)
        dead = descendants(process.pid)
        process.kill()
        process.wait()
        for pid in dead:  # process 1 collects them now; in a container that may be us
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)


def _package_folders() -> dict[str, str]:
    here = Path(__file__).resolve().parent
    return {"composer_replication": str(here.parent), "composer_replication.sandbox": str(here)}
