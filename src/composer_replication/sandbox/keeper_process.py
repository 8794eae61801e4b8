"""A process of ours around one command: started with its orders, ended with all that the command left.

And the sandboxes that are made so, of which ``none`` is no jail at all. The other kind is made by the package
``sandlock``: Landlock and seccomp, no namespaces, for machines where no user namespace can be made (most pods). Files
outside the allow list stay visible by name but cannot be opened; there is no network at all, not even a loopback, no
``/proc``, no ``/tmp`` (``TMPDIR`` is private) and no ``/dev/shm``. A name that is no UTF-8 cannot be looked at (EFAULT).
What sandlock itself does not hold we hold (``sandlock_child``): daemons that leave the process group, the death of this
process, disk use, masks inside an allowed folder, and modes, times and links outside (``file_changes``).
"""

from __future__ import annotations

import ctypes
import errno
import importlib.util
import json
import os
import resource
import subprocess
import sys
import time
from abc import abstractmethod
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from composer_replication.errors import MissingError
from composer_replication.records import Check, ExecResult, SandboxSpec
from composer_replication.sandbox.calls import STARTER, failure, new_marker, resource_limits, to_result
from composer_replication.sandbox.child_process import allowed
from composer_replication.sandbox.host_paths import is_below, paths_of
from composer_replication.sandbox.local_sandbox import LocalSandbox
from composer_replication.sandbox.process_tree import descendants, kill_descendants
from composer_replication.sandbox.supervised_run import Watched, supervise

_MFD_NOEXEC_SEAL = 8  # where the machine allows files in memory only so (vm.memfd_noexec)
_DEVICES = ("/dev/zero", "/dev/random", "/dev/urandom", "/dev/full")
_INSTALL = "pip install sandlock (Linux 6.12 or newer; the kernel needs Landlock)"
_CREATE_RULESET, _TELL_THE_VERSION = 444, 1  # one number everywhere
_LEAST_LANDLOCK = 6  # Linux 6.12
# They exist by name and cannot be opened, at which git gives up. In a namespace they are not there.
_GIT_READS_NO_FILE_OF_THE_SYSTEM = {"GIT_CONFIG_NOSYSTEM": "1", "GIT_ATTR_NOSYSTEM": "1"}
# The packages are named to the child without running their __init__: half of its start-up time.
_LAUNCH = """
import sys, types
for name, folder in {folders!r}.items():
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [folder]
from composer_replication.sandbox.{module} import main
main()
"""


def file_with(data: bytes) -> int:
    """A file in memory that holds ``data``, to be read from its start.

    No pipe: once a jail has used up what pipes may take of this user id, one holds 8 KiB or less.
    """
    try:
        descriptor = os.memfd_create("data", os.MFD_CLOEXEC | _MFD_NOEXEC_SEAL)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        descriptor = os.memfd_create("data")  # Linux before 6.3
    try:
        with os.fdopen(os.dup(descriptor), "wb") as handle:
            handle.write(data)
        os.lseek(descriptor, 0, os.SEEK_SET)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def start_keeper(
    module: str, orders: Mapping[str, Any], environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """Run ``main`` of a module of this folder, with its orders as JSON in the descriptor that its argument names."""
    descriptor = file_with(json.dumps(orders).encode())
    try:
        here = Path(__file__).resolve().parent
        folders = {"composer_replication": str(here.parent), "composer_replication.sandbox": str(here)}
        program = launch_program(folders, module)
        return subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", program, str(descriptor)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=dict(environment),
            pass_fds=[descriptor],
            start_new_session=True,
        )
    finally:
        os.close(descriptor)


def launch_program(folders: Mapping[str, str], module: str) -> str:
    """The text of a program that runs ``main`` of a module of this folder; ``folders`` has the packages by name."""
    return _LAUNCH.format(folders=dict(folders), module=module)


def end_keeper(process: subprocess.Popen[bytes]) -> bool:
    """Kill what the command left, then the process around it, which collects orphans.

    False if something lives, or may: a keeper that was killed itself has left its orphans to others.
    """
    if process.poll() is not None:
        return process.returncode >= 0
    is_clean = kill_descendants(process.pid)
    dead = descendants(process.pid)
    process.kill()
    process.wait()
    for pid in dead:  # process 1 collects them now; in a container that may be us
        with suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)
    return is_clean


class KeptSandbox(LocalSandbox):
    """A jail with a process of ours around each command; ``exec`` may be called from several threads at once."""

    backend_name: str
    child_module: str
    num_own_processes = 0
    """Of ours, among those that are watched."""

    def _run(
        self, argv: list[str], environment: Mapping[str, str], stdin: bytes, timeout_seconds: float
    ) -> ExecResult:
        marker = new_marker()
        started = time.monotonic()
        orders = self._orders(["/bin/sh", "-c", STARTER, "sandbox", marker, *argv], environment)
        own = {"HOME": str(self._scratch.home), "PATH": os.defpath}
        try:
            process = start_keeper(self.child_module, {"parent": os.getpid(), **orders}, own)
        except OSError as error:
            raise failure("CR0302", f"{self.backend_name} does not start: {error}.") from error
        ended = supervise(
            process,
            lambda: self._kill(process),
            stdin=stdin,
            timeout_seconds=max(0.001, timeout_seconds - (time.monotonic() - started)),
            watched=Watched(self._limits, self._writable, self._baseline_bytes, self.num_own_processes),
            extra_bytes=len(marker),
        )
        return to_result(ended, marker.encode(), self._limits, backend=self.backend_name)

    @abstractmethod
    def _orders(self, argv: list[str], env: Mapping[str, str]) -> dict[str, Any]:
        """What the process is told: how to run this program in the tree."""

    def _kill(self, process: subprocess.Popen[bytes]) -> None:
        """End the process and all that its command left; may be called once it is dead."""
        end_keeper(process)


class NoIsolation:
    """The backend ``none``: an ordinary process of ours, that may read, write and reach what we may.

    For a machine that holds nothing and is thrown away, and for looking at the tests of code that one trusts. Chosen only
    by name and only after ``accept``. Limits and the end of daemons hold against accidents, not against intent.
    """

    name = "none"

    def is_available(self) -> Check:
        """It always is, and never a jail."""
        return Check(self.name, True, "a plain process: nothing is isolated.")

    def open(self, spec: SandboxSpec) -> LocalSandbox:
        """Take over ``spec.tree``. ``read_only`` and ``masked`` are checked and have no effect."""
        return NoIsolationSandbox(spec, None)


class NoIsolationSandbox(KeptSandbox):
    """Processes in a folder; what escapes us cannot be helped without a jail."""

    backend_name = NoIsolation.name
    child_module = "child_process"
    num_own_processes = 1

    def _orders(self, argv: list[str], env: Mapping[str, str]) -> dict[str, Any]:
        limits = resource_limits(self._limits)
        return {"argv": argv, "env": dict(env), "cwd": str(self._real_tree), "limits": limits}


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

    def open(self, spec: SandboxSpec) -> LocalSandbox:
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
        known = paths_of(spec)
        shown = {path.resolve() for path in known.read_only}
        self._masked = [path for path in known.masked if is_below(path, shown | {self._real_tree})]
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
