"""What the backend ``harbor`` runs inside a container, as its root: it prepares, and runs one command after the other.

It is sent there with the modules that it imports, and keeps its orders and results in a folder that only root may
look into. The container is the wall; within it a command is an ordinary user that nobody else is, with the limits, the
watchers and the filter of system calls of the jails on this machine.

A container's root may usually not look at processes of others (no CAP_SYS_PTRACE). So whoever watches takes that
user's id for access to files: it may look then, and cannot be killed or traced by him.

The tree travels as a tar file; what comes back of one was made among hostile files.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path, PurePosixPath
from typing import IO, Any, BinaryIO

from composer_replication.errors import SandboxFailure
from composer_replication.records import Limits
from composer_replication.sandbox import folders
from composer_replication.sandbox.calls import STARTER, new_marker, resource_limits, to_result
from composer_replication.sandbox.folders import SHARED_MEMORY
from composer_replication.sandbox.keeper_process import end_keeper, start_keeper
from composer_replication.sandbox.privileges import reserve_uid
from composer_replication.sandbox.process_folder import account_files
from composer_replication.sandbox.supervised_run import Ended, Verdict, Watched, supervise

_OURS = Path("/composer-rl")
_SHARED = (Path("/tmp"), Path("/var/tmp"), SHARED_MEMORY)
_CLOSED = (Path("/run/lock"), Path("/dev/mqueue"))  # everybody may write there, and nobody counts it
_SECONDS_TO_DIE = 10.0
_SLACK_BYTES = 64 << 20
# GNU tar: holes of files stay holes.
_PACK = ["tar", "--sparse", "--format=pax", "--owner=0", "--group=0", "--numeric-owner", "-cf", "-", "-C"]


def main() -> None:
    """Do what the first argument says, with the orders that were sent."""
    orders = json.loads((_OURS / "orders.json").read_text()) if sys.argv[1] != "kill" else {}
    try:
        {"prepare": _prepare, "run": _run, "kill": _kill}[sys.argv[1]](orders)
    except SandboxFailure as error:  # its last line is what the caller is told
        sys.exit(error.message.removesuffix("."))
    print("done")


def _prepare(orders: dict[str, Any]) -> None:
    """Lay out what was sent, hide what must not be seen, make the folders of the user inside."""
    with tarfile.open(_OURS / "shown.tar") as archive:
        for entry in archive:
            if not (entry.issym() and os.path.lexists(f"/{entry.name}")):
                archive.extract(entry, "/", filter="fully_trusted")
    for path in map(Path, orders["masked"]):
        _hide(path)
    uid = reserve_uid()
    for folder in map(Path, orders["folders"]):
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o700)
        os.chown(folder, uid, uid)
    for folder in _CLOSED:
        with suppress(OSError):
            folder.chmod(0o755)
    for name, text in account_files(uid, uid, Path(orders["folders"][1])).items():
        Path(f"/etc/{name}").write_text(text)
    (_OURS / "uid").write_text(str(uid))


def _hide(path: Path) -> None:
    """Take away the content of what must not be read: the files of a container are its own."""
    if path.is_dir():
        folders.empty(path)
    elif path.is_file():
        path.write_bytes(b"")


def _run(orders: dict[str, Any]) -> None:
    """One command, from its tree to its result; nothing of it lives on."""
    uid = int((_OURS / "uid").read_text())
    (_OURS / "run.pid").write_text(str(os.getpid()))
    tree, *private = map(Path, orders["folders"])
    if orders["has_tree"]:
        with (_OURS / "tree.tar").open("rb") as source:
            unpack_tree(source, tree)
        folders.hand_over(tree, uid)
    for folder in (tree, *private):
        with suppress(OSError):
            folders.open_to_owner(folder, folders.LOOK)
    limits = Limits(**orders["limits"])
    watched = _watched(limits, (tree, *private), uid)
    marker = new_marker()
    ended = _supervised(orders, marker, uid, watched)
    _end_all_of(uid)
    for entry in (child for shared in _SHARED if shared.is_dir() for child in shared.iterdir()):
        with suppress(OSError):  # what leads to the tree is root's
            if entry.lstat().st_uid == uid:
                folders.remove(entry)
    result = to_result(ended, marker.encode(), limits, backend=orders["backend"])
    found = {"result": asdict(result), "has_tree": _packs_tree(ended, tree, watched)}
    (_OURS / "result.json").write_text(json.dumps(found))


def _watched(limits: Limits, own: tuple[Path, ...], uid: int) -> Watched:
    """The limits, and everywhere that the user may write; what lay there at the first command is not charged."""
    # What lies in a memory of its own the kernel tells to the byte, deleted or mapped.
    is_memory = os.path.ismount(SHARED_MEMORY)
    memory = None
    if is_memory:
        memory = folders.MemoryFolder(os.open(SHARED_MEMORY, os.O_RDONLY | os.O_DIRECTORY))
    shared = [folder for folder in _SHARED if folder.is_dir() and not (is_memory and folder == SHARED_MEMORY)]
    found = {child: child.lstat() for folder in shared for child in folder.iterdir()}
    closed = {str(path) for path, info in found.items() if info.st_uid != uid and not info.st_mode & 0o002}
    written = (*own, *shared)
    remembered = _OURS / "baseline"
    if not remembered.exists():
        remembered.write_text(str(folders.folder_bytes(written, closed)))
    return Watched(limits, written, int(remembered.read_text()), closed=closed, memory=memory)


def _supervised(orders: dict[str, Any], marker: str, uid: int, watched: Watched) -> Ended:
    kinds = [*resource_limits(watched.limits), (resource.RLIMIT_NPROC, watched.limits.num_processes)]
    command = ["/bin/sh", "-c", STARTER, "sandbox", marker, *orders["argv"]]
    child = {"parent": os.getpid(), "argv": command, "env": orders["env"], "cwd": orders["folders"][0]}
    process = start_keeper("child_process", {**child, "limits": kinds, "user": uid}, {"PATH": os.defpath})
    for pipe in (process.stdin, process.stdout, process.stderr):
        assert pipe is not None
        os.fchown(pipe.fileno(), uid, uid)  # so that /dev/stdout can be opened by name

    def kill() -> None:
        with _files_as(0):
            end_keeper(process)
            _end_all_of(uid)

    stdin = (_OURS / "stdin").read_bytes()
    with _files_as(uid):
        return supervise(
            process,
            kill,
            stdin=stdin,
            timeout_seconds=orders["timeout_seconds"],
            watched=watched,
            extra_bytes=len(marker),
        )


def _packs_tree(ended: Ended, tree: Path, watched: Watched) -> bool:
    """Leave the tree to be fetched, unless there is more in it than could have been allowed; whether it is there."""
    most = watched.baseline_bytes + 2 * watched.limits.disk_bytes + _SLACK_BYTES
    try:
        if folders.folder_bytes((tree,), enough_bytes=most) > most:
            return False
        with (_OURS / "tree.tar").open("wb") as target:
            pack_tree(tree, target)
    except (OSError, folders.UnmeasurableError):
        if ended.verdict is Verdict.ENDED:
            raise
        return False
    return True


def _kill(_: dict[str, Any]) -> None:
    """End a command whose caller has gone, and whoever watches it."""
    with suppress(OSError, ValueError):
        os.kill(int((_OURS / "run.pid").read_text()), signal.SIGKILL)
    _end_all_of(int((_OURS / "uid").read_text()))


@contextmanager
def _files_as(uid: int) -> Iterator[None]:
    """Use files, and look at processes, as this user; everything else as before."""
    library = ctypes.CDLL(None)
    before = library.setfsuid(-1), library.setfsgid(-1)
    library.setfsgid(uid)
    library.setfsuid(uid)
    try:
        yield
    finally:
        library.setfsuid(before[0])
        library.setfsgid(before[1])


def _end_all_of(uid: int) -> None:
    """Kill every process of the user, until there is none: one call reaches all, and no fork slips through."""
    deadline = time.monotonic() + _SECONDS_TO_DIE
    while _has_processes(uid):
        if time.monotonic() > deadline:
            raise OSError("a process of the command cannot be killed")
        child = os.fork()
        if child == 0:
            with suppress(OSError):
                os.setresuid(uid, uid, uid)
                os.kill(-1, signal.SIGKILL)
            os._exit(0)
        os.waitpid(child, 0)
        with suppress(ChildProcessError):  # as a container's first process we are sent orphans
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.005)


def _has_processes(uid: int) -> bool:
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            if entry.name.isdigit():
                text = (entry / "status").read_text(errors="replace")  # the folder's owner it may hide
                lines = text.split("\n")
                if f"Uid:\t{uid}\t{uid}\t{uid}\t{uid}" in lines and "State:\tZ (zombie)" not in lines:
                    return True
    return False


class UnsafeTreeError(Exception):
    """The archive would write outside the tree, or holds what no tree holds."""


def pack_tree(tree: Path, target: IO[bytes]) -> None:
    """Write everything below ``tree`` into a file."""
    done = subprocess.run([*_PACK, str(tree), "."], stdout=target, stderr=subprocess.PIPE, check=False)
    if done.returncode != 0:
        said = done.stderr.decode(errors="replace").strip().splitlines() or [f"exit code {done.returncode}"]
        raise OSError(said[0][:300])


def unpack_tree(source: BinaryIO, tree: Path) -> None:
    """Make ``tree`` what the archive says; what was closed to its owner is open to him then.

    Each entry is made anew in a folder that was made here, so an entry that lies below a link, climbs, comes twice
    or is a device is refused; a hard link becomes one only to a file that came before. Holes stay holes.
    """
    folders.empty(tree)
    above, files = {PurePosixPath()}, set[PurePosixPath]()  # that were made, and no others
    try:
        with tarfile.open(fileobj=source, mode="r:", errorlevel=2) as archive:
            archive.extraction_filter = lambda entry, _: entry  # ours is below; an older Python has none
            for entry in archive:
                path, said = _path_inside(entry.name), repr(entry.name[:200])
                if path == PurePosixPath():
                    continue
                if path.parent not in above or os.path.lexists(tree / path):
                    raise UnsafeTreeError(f"an entry lies below what is no folder, or comes twice: {said}")
                if entry.islnk() and _path_inside(entry.linkname) not in files:
                    raise UnsafeTreeError(f"a hard link to what is no file: {said}")
                if not (entry.isdir() or entry.isreg() or entry.islnk() or entry.issym() or entry.isfifo()):
                    raise UnsafeTreeError(f"an entry of a kind that no tree holds: {said}")
                if not (entry.issym() or entry.isfifo()):
                    (above if entry.isdir() else files).add(path)
                # It is ours now: a set-user-id bit would make whoever runs it us.
                entry.mode = entry.mode & 0o777 | (0o700 if entry.isdir() else 0o400)
                entry.name, entry.uid, entry.gid = str(path), os.geteuid(), os.getegid()
                entry.uname = entry.gname = ""
                archive.extract(entry, tree)
    except (tarfile.TarError, ValueError, OverflowError) as error:
        raise UnsafeTreeError(f"no tar file: {error}") from error


def _path_inside(name: str) -> PurePosixPath:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "\0" in name:
        raise UnsafeTreeError(f"an entry leads out of the tree: {name[:200]!r}")
    return path
