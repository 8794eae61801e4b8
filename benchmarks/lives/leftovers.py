"""What a run of sandboxes left on this machine, by kind; and one planted leak of each kind, to see that it is seen."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from composer_replication.sandbox.process_tree import descendants

_SYSTEM_FOLDERS = (Path("/tmp"), Path("/var/tmp"))
_SHARED_MEMORY = Path("/dev/shm")
_CGROUPS = Path("/sys/fs/cgroup")
_TABLES = ("shm", "sem", "msg")
_PR_SET_CHILD_SUBREAPER = 36
_IPC_CREATE, _IPC_REMOVE = 0o1600, 0
_PAUSE_SECONDS = 0.02
_FIRST_UID = 0x60000000  # of the users that jails of root run as


class Leftovers:
    """Counts what belongs to one run and is still there.

    Ours is a process that descends from this one (orphans come to us: we make ourselves their subreaper)
    or whose arguments, variables or mounts name the token; a mount or unix socket whose line names it; an entry
    of ``folder``, and an entry of the system's temporary folders whose name holds it. Control groups and
    System V memory have no such name: what was not there at the start counts, memory where it belongs to us or to
    a user that jails of root run as.
    The token is a word that nothing else on this machine has; it stands in the name of the run's temporary ``folder``.
    """

    def __init__(self, token: str, folder: Path) -> None:
        self.token, self.folder = token, folder
        if ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
            raise OSError("orphans cannot be made ours")
        self._cgroups, self._segments = _cgroups(), _segments()

    def found(self) -> dict[str, list[str]]:
        """What is there now, by kind; dead processes do not count."""
        memory = sorted(_segments() - self._segments) + self._named(_SHARED_MEMORY)
        mounts, sockets = self._lines("/proc/self/mountinfo"), self._lines("/proc/net/unix")
        cgroups = sorted(_cgroups() - self._cgroups)
        found = (self._processes(), mounts, cgroups, self._entries(), sockets, memory)
        return dict(zip(KINDS, found, strict=True))

    def settled(self, patience_seconds: float) -> dict[str, list[str]]:
        """The same, once no process is left or patience is over: a killed process needs a moment to die."""
        deadline = time.monotonic() + patience_seconds
        while self._processes() and time.monotonic() < deadline:
            time.sleep(_PAUSE_SECONDS)
        return self.found()

    def _processes(self) -> list[str]:
        collect()
        token = self.token.encode()
        ours = set(descendants(os.getpid()))
        for name in (entry.name for entry in Path("/proc").iterdir()):
            if name.isdigit() and int(name) not in {*ours, os.getpid()}:
                with suppress(OSError):
                    files = (Path(f"/proc/{name}/{file}") for file in ("cmdline", "environ", "mountinfo"))
                    if any(token in file.read_bytes() for file in files):
                        ours.add(int(name))
        return [f"{pid} {text}" for pid in sorted(ours) if (text := _living(pid))]

    def _lines(self, file: str) -> list[str]:
        return [line for line in Path(file).read_text(errors="replace").splitlines() if self.token in line]

    def _entries(self) -> list[str]:
        found = [str(path) for path in self.folder.iterdir()] if self.folder.is_dir() else []
        return found + [name for place in _SYSTEM_FOLDERS for name in self._named(place)]

    def _named(self, place: Path) -> list[str]:
        inside = place.iterdir() if place.is_dir() else iter(())
        return [str(path) for path in inside if self.token in path.name and path != self.folder]


def collect() -> dict[int, int]:
    """Take the exit codes of all dead children, orphans that came to us too, by process id."""
    codes: dict[int, int] = {}
    with suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            codes[found[0]] = os.waitstatus_to_exitcode(found[1])
    return codes


def _living(pid: int) -> str:
    """The command line of a process, or its name; empty for a dead one."""
    with suppress(OSError):
        state = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
        if state not in "ZX":
            words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            return words.strip()[:200] or Path(f"/proc/{pid}/comm").read_text().strip()
    return ""


def _cgroups() -> set[str]:
    return {place for place, _, _ in os.walk(_CGROUPS)}


def _segments() -> set[str]:
    found = set()
    for table in _TABLES:
        with suppress(OSError):
            header, *rows = map(str.split, Path(f"/proc/sysvipc/{table}").read_text().splitlines())
            owner = header.index("uid")
            found |= {
                f"{table} {row[1]}"
                for row in rows
                if int(row[owner]) in {0, os.getuid()} or int(row[owner]) >= _FIRST_UID
            }
    return found


KINDS = ("processes", "mounts", "cgroups", "folders", "sockets", "shared memory")


@contextmanager
def planted(kind: str, token: str, folder: Path) -> Iterator[None]:
    """One leak of this kind, for as long as the block.

    Raises:
        OSError: this user may not make one here (mounts and control groups need root).
    """
    name = f"leak-{token}"
    with ExitStack() as undo:
        match kind:
            case "processes":
                code = f"setsid sh -c ': {token}; sleep 600' >/dev/null 2>&1 & echo $!"
                done = subprocess.run(["sh", "-c", code], capture_output=True, check=True, text=True)
                undo.callback(_end, int(done.stdout))
            case "mounts":
                (place := folder / name).mkdir()
                undo.callback(place.rmdir)
                mount = ["mount", "-t", "tmpfs", name, str(place)]
                if subprocess.run(mount, capture_output=True, check=False).returncode != 0:
                    raise PermissionError("no mount")
                undo.callback(subprocess.run, ["umount", str(place)], check=True)
            case "cgroups":
                for controller in (_CGROUPS, *sorted(_CGROUPS.iterdir())):
                    with suppress(OSError):
                        (controller / name).mkdir()
                        undo.callback((controller / name).rmdir)
                        break
                else:
                    raise PermissionError("no control group")
            case "folders":
                (folder / name).mkdir()
                undo.callback((folder / name).rmdir)
            case "sockets":
                undo.enter_context(socket.socket(socket.AF_UNIX)).bind(f"\0{name}")
            case "shared memory":
                library = ctypes.CDLL(None)
                if (number := library.shmget(0, 4096, _IPC_CREATE)) < 0:
                    raise PermissionError("no shared memory")
                undo.callback(library.shmctl, number, _IPC_REMOVE, None)
        yield


def _end(pid: int) -> None:
    while os.getpgid(pid) != pid:  # on a busy machine setsid comes after we have seen it
        time.sleep(_PAUSE_SECONDS)
    os.killpg(pid, signal.SIGKILL)
