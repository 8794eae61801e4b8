"""Jails made by ``bwrap``: own namespaces for files, processes, network, users and IPC.

Two ways to lose privileges, chosen by who we are. As root the jail is set up without a
user namespace and the command runs under a user id of its own, to which the tree is
handed over: the process limit counts nothing for root. As an ordinary user the jail
gets a user namespace in which no further one can be made.

Each command is started stopped (``--block-fd``): its limits are set and a handle on
the first process of its process namespace is taken before it runs. Killing that first
process makes the kernel kill every other one, however it daemonised.
"""

from __future__ import annotations

import json
import os
import random
import resource
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

from composer_replication.errors import MissingError
from composer_replication.interfaces import Sandbox
from composer_replication.records import Check, ExecResult, SandboxSpec
from composer_replication.sandbox.jailed_tree import STARTER, failure, to_result
from composer_replication.sandbox.local_sandbox import LocalSandbox
from composer_replication.sandbox.mounts import MountPlan
from composer_replication.sandbox.supervised_run import supervise
from composer_replication.sandbox.syscall_filter import filter_program
from composer_replication.sandbox.user_ids import private_uid

_START_SECONDS = 30.0
_NUM_INIT_PROCESSES = 1
_INSTALL = "install bubblewrap (Debian, Ubuntu: apt install bubblewrap)"


class Bubblewrap:
    """The backend ``bubblewrap``."""

    name = "bubblewrap"

    def is_available(self) -> Check:
        """Can a jail be started here? Starts one that runs ``true``."""
        if shutil.which("bwrap") is None:
            return Check(self.name, False, "bwrap is not on PATH.", _INSTALL)
        if _drops_uid() and shutil.which("setpriv") is None:
            return Check(self.name, False, "setpriv is not on PATH.", "install util-linux")
        problem = _first_start()
        if problem:
            fix = "allow user namespaces on this machine, or use --backend sandlock"
            return Check(self.name, False, f"bwrap cannot start a jail: {problem}", fix)
        return Check(self.name, True, "bwrap starts a jail.")

    def open(self, spec: SandboxSpec) -> Sandbox:
        """Take over ``spec.tree`` and prepare a jail around it.

        Raises:
            MissingError: ``bwrap`` or ``setpriv`` is not installed (CR0301).
            SandboxFailure: a path of the spec is missing or cannot be shown (CR0304).
        """
        for program in ("bwrap", "setpriv") if _drops_uid() else ("bwrap",):
            if shutil.which(program) is None:
                raise MissingError("CR0301", f"the program {program} is not installed.", fix=_INSTALL)
        return BubblewrapSandbox(spec)


class BubblewrapSandbox(LocalSandbox):
    """One jail; ``exec`` may be called from several threads at once."""

    def __init__(self, spec: SandboxSpec) -> None:
        self._uid = private_uid() if _drops_uid() else None
        super().__init__(spec, self._uid)
        try:
            uid, gid = (self._uid, self._uid) if self._uid is not None else (os.getuid(), os.getgid())
            self._jailed.write_accounts(uid, gid)
            self._mounts = MountPlan(spec, self._jailed.scratch)
        except BaseException:
            self.close()
            raise

    def _run(
        self, argv: list[str], environment: Mapping[str, str], stdin: bytes, timeout_seconds: float
    ) -> ExecResult:
        marker = f"<{random.randbytes(16).hex()}>"  # noqa: S311  tells lines apart, guards nothing
        started = time.monotonic()
        with (
            self._jailed.scratch.for_one_command(self._uid) as fresh,
            _Jail(self._command(argv, environment, marker, fresh)) as jail,
        ):
            jail.release(self._limits())
            ended = supervise(
                jail.process,
                jail.kill,
                stdin=stdin,
                timeout_seconds=max(0.001, timeout_seconds - (time.monotonic() - started)),
                watched=self._jailed.watched(fresh, num_own_processes=_NUM_INIT_PROCESSES),
                extra_bytes=len(marker),
            )
        return to_result(ended, marker.encode(), self._jailed.limits, backend=Bubblewrap.name)

    def _command(self, argv: Sequence[str], env: Mapping[str, str], marker: str, fresh: Path) -> list[str]:
        command = ["bwrap", "--die-with-parent", "--unshare-ipc", "--unshare-pid", "--unshare-net"]
        command += ["--unshare-uts", "--unshare-cgroup-try", "--hostname", "sandbox"]
        if self._uid is None:
            command += (
                ["--unshare-user", "--disable-userns"]
                if _can_disable_userns(shutil.which("bwrap"))
                else ["--unshare-user"]
            )
        else:
            command += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
        command += [*self._mounts.arguments(fresh), "--chdir", str(self._jailed.real_tree), "--clearenv"]
        for name, value in env.items():
            command += ["--setenv", name, value]
        starter = ["/bin/sh", "-c", STARTER, "sandbox", marker, *argv]
        if self._uid is not None:
            user = str(self._uid)
            drop = [
                "setpriv",
                "--reuid",
                user,
                "--regid",
                user,
                "--clear-groups",
                "--inh-caps=-all",
                "--no-new-privs",
            ]
            starter = [*drop, *starter]
        return [*command, "--", *starter]

    def _limits(self) -> list[tuple[int, int]]:
        limits = self._jailed.limits
        found = [
            (resource.RLIMIT_CORE, 0),
            (resource.RLIMIT_DATA, limits.memory_bytes),
            (resource.RLIMIT_FSIZE, limits.disk_bytes),
            (resource.RLIMIT_NOFILE, limits.num_open_files),
        ]
        if self._uid is not None:
            found.append((resource.RLIMIT_NPROC, limits.num_processes))
        elif _counts_per_namespace():
            found.append((resource.RLIMIT_NPROC, limits.num_processes + _NUM_INIT_PROCESSES))
        return found


class _Jail:
    """One started ``bwrap``, held before it runs the command, and a way to kill all of it."""

    def __init__(self, command: list[str]) -> None:
        info_read, info_write = os.pipe()
        block_read, self._block_write = os.pipe()
        filter_read = _pipe_with(filter_program())
        passed = [info_write, block_read, *([] if filter_read is None else [filter_read])]
        options = ["--info-fd", str(info_write), "--block-fd", str(block_read)]
        if filter_read is not None:
            options += ["--seccomp", str(filter_read)]
        self._init_pidfd: int | None = None
        self._info_read: int | None = info_read
        try:
            self.process = subprocess.Popen(
                [command[0], *options, *command[1:]],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env={"PATH": os.environ.get("PATH", os.defpath)},
                pass_fds=passed,
                start_new_session=True,
            )
        except OSError as error:
            self._close_descriptors()
            raise failure("CR0302", f"bwrap does not start: {error}.") from error
        finally:
            for descriptor in passed:
                os.close(descriptor)

    def release(self, limits: list[tuple[int, int]]) -> None:
        """Take hold of the jail's first process, set the limits, let the command run."""
        try:
            init = self._first_process()
            self._init_pidfd = os.pidfd_open(init)
            for kind, value in limits:
                resource.prlimit(init, kind, (value, value))
            os.write(self._block_write, b"x")
        except (OSError, ValueError, KeyError) as error:
            self.kill()
            said = self.process.stderr.read(2000).decode(errors="replace") if self.process.stderr else ""
            raise failure("CR0302", f"bwrap does not start a jail: {said.strip() or error}.") from error
        except BaseException:
            self.kill()
            raise

    def _first_process(self) -> int:
        """Its process id outside; ``bwrap`` writes JSON with the key ``child-pid``."""
        text = b""
        deadline = time.monotonic() + _START_SECONDS
        descriptor = self._info_read
        while descriptor is not None and time.monotonic() < deadline:
            if select.select([descriptor], [], [], 1.0)[0]:
                chunk = os.read(descriptor, 4096)
                text += chunk
                if not chunk or text.rstrip().endswith(b"}"):
                    break
        return int(json.loads(text)["child-pid"])

    def kill(self) -> None:
        """Kill every process of the jail and wait until they are gone."""
        if self._init_pidfd is None:
            self.process.kill()
        else:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._init_pidfd, signal.SIGKILL)
            select.select([self._init_pidfd], [], [], _START_SECONDS)
        self.process.wait()
        if self._init_pidfd is not None:
            # Orphaned, it belongs to process 1, which collects it. In a container that may be us.
            with suppress(ChildProcessError):
                os.waitid(os.P_PIDFD, self._init_pidfd, os.WEXITED | os.WNOHANG)

    def _close_descriptors(self) -> None:
        for descriptor in (self._init_pidfd, self._info_read, self._block_write):
            if descriptor is not None:
                os.close(descriptor)
        self._init_pidfd = self._info_read = None

    def __enter__(self) -> _Jail:
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()
        self._close_descriptors()
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()


def _pipe_with(data: bytes) -> int | None:
    """The reading end of a pipe that holds ``data`` (below the 64 KiB that a pipe takes)."""
    if not data:
        return None
    read, write = os.pipe()
    with os.fdopen(write, "wb") as handle:
        handle.write(data)
    return read


def _drops_uid() -> bool:
    """As root with its capabilities we change the user id; without them a user namespace must do."""
    if os.geteuid() != 0:
        return False
    needed = sum(1 << bit for bit in (0, 6, 7, 21))  # chown, setgid, setuid, sys_admin
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("CapEff:"):
            return int(line.split()[1], 16) & needed == needed
    return False


@lru_cache(maxsize=1)
def _can_disable_userns(program: str | None) -> bool:
    answer = subprocess.run([program or "bwrap", "--help"], capture_output=True, text=True, check=False)
    return "--disable-userns" in answer.stdout


@lru_cache(maxsize=1)
def _counts_per_namespace() -> bool:
    """Before Linux 5.14 the process limit counts all processes of the user, everywhere."""
    major, minor = os.uname().release.split(".")[:2]
    return (int(major), int("".join(filter(str.isdigit, minor)) or 0)) >= (5, 14)


@lru_cache(maxsize=1)
def _first_start() -> str:
    """Empty, or what bwrap said when it could not start the smallest jail."""
    privileges: Callable[[], list[str]] = lambda: [] if _drops_uid() else ["--unshare-user"]  # noqa: E731
    command = [
        "bwrap",
        *privileges(),
        "--unshare-pid",
        "--unshare-net",
        "--ro-bind",
        "/",
        "/",
        "--proc",
        "/proc",
    ]
    try:
        done = subprocess.run(
            [*command, "true"], capture_output=True, text=True, timeout=_START_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return "" if done.returncode == 0 else (done.stderr.strip() or f"exit code {done.returncode}")
