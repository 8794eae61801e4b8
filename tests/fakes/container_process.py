"""A container of the fakes: exactly as confined as its request says, by ``bwrap``, and no more.

What the request forgets is open: no ``NetworkMode`` is the host's network, no ``ReadonlyRootfs`` a writable
root. So a conformance test that passes says something about the request, not about the fake.
What is not modelled: cgroups (memory is watched, processes are counted per user id) and the
engine's default seccomp profile, for which the project's own filter stands.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from composer_replication.sandbox.bwrap_program import require_bwrap
from composer_replication.sandbox.process_memory import memory_bytes, proportional_memory_bytes
from composer_replication.sandbox.process_tree import descendants, speakers
from composer_replication.sandbox.syscall_filter import filter_program

IS_ROOT = os.geteuid() == 0
_LOOK_SECONDS = 0.03


@dataclass
class Confinement:
    """What a request asks for, in one form for both fakes."""

    root: Path
    argv: list[str]
    env: dict[str, str]
    working_directory: str
    mounts: list[tuple[str, str, bool]] = field(default_factory=list)
    """Source, place, read-only."""
    user: str = ""
    has_network: bool = True
    is_root_read_only: bool = False
    has_capabilities: bool = True
    memory_bytes: int = 0
    num_processes: int = 0
    ulimits: dict[str, int] = field(default_factory=dict)
    hostname: str = "fake"
    is_first_process: bool = False
    """The command is process 1 itself, instead of an init around it."""


def make_mount_points(confinement: Confinement) -> None:
    """As runc does: whatever is missing is made, in the root or in the mount around it."""
    known: list[tuple[str, str]] = []
    for source, place, _ in sorted(confinement.mounts, key=lambda mount: mount[1].count("/")):
        around = [(target, origin) for target, origin in known if place.startswith(target + "/")]
        target, origin = max(around, default=("", str(confinement.root)), key=lambda pair: len(pair[0]))
        point = Path(origin) / place[len(target) :].lstrip("/")
        if Path(source).is_dir():
            point.mkdir(parents=True, exist_ok=True)
        else:
            point.parent.mkdir(parents=True, exist_ok=True)
            point.touch()
        known.append((place, source))


def command_of(confinement: Confinement, filter_descriptor: int | None) -> list[str]:
    command = ["prlimit", *(f"--{name}={value}" for name, value in confinement.ulimits.items())]
    if confinement.num_processes and IS_ROOT:
        command.append(f"--nproc={confinement.num_processes}")
    command += [require_bwrap(), "--die-with-parent", "--unshare-pid", "--unshare-ipc", "--unshare-uts"]
    command += ["--hostname", confinement.hostname, "--unshare-cgroup-try"]
    if not confinement.has_network:
        command.append("--unshare-net")
    if confinement.is_first_process:
        command.append("--as-pid-1")
    if not IS_ROOT:
        command.append("--unshare-user")
    elif confinement.has_capabilities:
        command += ["--cap-add", "ALL"]
    else:
        command += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    command += ["--bind", str(confinement.root), "/", "--proc", "/proc", "--dev", "/dev"]
    for source, place, is_read_only in sorted(confinement.mounts, key=lambda mount: mount[1].count("/")):
        command += ["--ro-bind" if is_read_only else "--bind", source, place]
    if confinement.is_root_read_only:
        command += ["--remount-ro", "/"]
    command += ["--chdir", confinement.working_directory, "--clearenv"]
    for name, value in confinement.env.items():
        command += ["--setenv", name, value]
    if filter_descriptor is not None:
        command += ["--seccomp", str(filter_descriptor)]
    return [*command, "--", *as_user(confinement), *confinement.argv]


def as_user(confinement: Confinement) -> list[str]:
    if not (IS_ROOT and confinement.user):
        return []
    uid, _, gid = confinement.user.partition(":")
    drop = ["setpriv", "--reuid", uid, "--regid", gid or uid, "--clear-groups"]
    return drop if confinement.has_capabilities else [*drop, "--inh-caps=-all", "--no-new-privs"]


class ContainerProcess:
    """A started container; ``wait`` gives its exit code."""

    def __init__(self, confinement: Confinement, *, has_streams: bool = True) -> None:
        make_mount_points(confinement)
        self.is_out_of_memory = False
        self._limit = confinement.memory_bytes
        self.more_roots: set[int] = set()
        """Processes that entered the container from outside, and what is below them."""
        self._started = threading.Event()
        self._problem: OSError | None = None
        # bwrap dies with the thread that started it, so that thread has to live as long.
        threading.Thread(target=self._live, args=(confinement, has_streams), daemon=True).start()
        self._started.wait()
        if self._problem is not None:
            raise self._problem

    def _live(self, confinement: Confinement, has_streams: bool) -> None:
        kind = subprocess.PIPE if has_streams else subprocess.DEVNULL
        read = _pipe_with(filter_program()) if not confinement.has_capabilities else None
        try:
            self.process = subprocess.Popen(
                command_of(confinement, read),
                stdin=kind,
                stdout=kind,
                stderr=kind,
                pass_fds=[] if read is None else [read],
                env={"PATH": os.environ.get("PATH", os.defpath)},
                start_new_session=True,
            )
        except OSError as error:
            self._problem = error
        finally:
            self._started.set()
            if read is not None:
                os.close(read)
        if self._problem is None:
            self._watch_memory()
            self.process.wait()

    def first_pid(self) -> int:
        """Process 1 of the container, as the host sees it; 0 while there is none.

        While it is still ``bwrap`` it sees the host's files, and nobody may enter it.
        """
        for pid in descendants(self.process.pid)[:1]:
            with suppress(OSError):
                if Path(f"/proc/{pid}/comm").read_text().strip() not in ("bwrap", "prlimit", "setpriv"):
                    return pid
        return 0

    def _watch_memory(self) -> None:
        while self._limit and self.process.poll() is None:
            roots = (self.process.pid, *self.more_roots.copy())
            pids = speakers([pid for root in roots for pid in descendants(root)])
            if memory_bytes(pids) > self._limit and proportional_memory_bytes(pids) > self._limit:
                self.is_out_of_memory = True
                self.kill()
                return
            threading.Event().wait(_LOOK_SECONDS)

    def kill(self) -> None:
        below = descendants(self.process.pid)
        self.process.kill()
        for pid in below:
            with suppress(ProcessLookupError):
                os.kill(pid, 9)

    def wait(self) -> int:
        code = self.process.wait()
        return 128 - code if code < 0 else code


def copy_root(source: Path, target: Path) -> Path:
    shutil.copytree(source, target, symlinks=True)
    return target


def _pipe_with(data: bytes) -> int:
    read, write = os.pipe()
    with os.fdopen(write, "wb") as handle:
        handle.write(data)
    return read
