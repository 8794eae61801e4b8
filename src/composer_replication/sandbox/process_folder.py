"""One temporary folder a process, so that nothing outlives a kill for long.

Every tree that is judged and every jail's home lies below it. The process holds a lock on
the folder that dies with it, whatever kills it; the next process that needs such a folder
removes those that nobody holds, and ends the jails that name them. A folder gets its name
once it is locked, so one of that name without a lock has no owner any more.
"""

from __future__ import annotations

import atexit
import fcntl
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from composer_replication.sandbox.folders import hand_over, remove_folder
from composer_replication.sandbox.process_tree import end_jails_naming, end_jails_without_folder

PREFIX = "composer-rl-scratch-"
BAIT_PREFIX = "composer-rl-bait-"  # must be reachable by other users, so it stands on its own
# Says which environment a service of Harbor's has for us, and is not swept.
HARBOR_PREFIX = "composer-rl-harbor-"
NEW_PREFIX = "composer-rl-new-"
_NEW_SECONDS = 60.0  # a folder is made a moment before it is locked
_NUM_TRIES = 3
_own: dict[int, Path] = {}


def process_folder() -> Path:
    """The folder of this process, below the system's temporary folder; made at first use."""
    pid = os.getpid()  # a forked child makes its own
    folder = _own.get(pid)
    if folder is None or not folder.is_dir():
        sweep()
        folder, _ = make_held_folder(PREFIX)
        _own[pid] = folder
        atexit.register(_remove_at_exit, pid, folder)
    return folder


def make_held_folder(prefix: str, parent: str | None = None) -> tuple[Path, int]:
    """A new folder that ``sweep`` leaves alone until this process ends, or the descriptor that holds it is closed."""
    for _ in range(_NUM_TRIES):
        made = Path(tempfile.mkdtemp(prefix=NEW_PREFIX, dir=parent)).resolve()
        folder = made.with_name(prefix + made.name.removeprefix(NEW_PREFIX))
        with suppress(FileNotFoundError):  # we slept so long that a sweep took it for abandoned
            descriptor = hold(made)
            try:
                made.rename(folder)
            except BaseException:
                os.close(descriptor)
                raise
            return folder, descriptor
    raise FileNotFoundError(f"somebody keeps removing the new folders in {made.parent}")


def hold(folder: Path) -> int:
    """Lock ``folder`` against ``sweep`` as long as this process lives or until the descriptor is closed."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    return descriptor


def sweep() -> list[Path]:
    """Remove what killed processes left in the temporary folder, jails too; returns the folders."""
    removed = [folder for folder in abandoned_folders() if remove_abandoned(folder)]
    prefix = str(Path(tempfile.gettempdir()).resolve() / PREFIX)
    end_jails_without_folder(prefix)
    return removed


def abandoned_folders(prefixes: Sequence[str] = (PREFIX, BAIT_PREFIX, NEW_PREFIX)) -> Iterator[Path]:
    """Our folders in the temporary folder whose process is gone; each is locked while it is looked at."""
    root = Path(tempfile.gettempdir())
    for folder in [folder for prefix in prefixes for folder in root.glob(f"{prefix}*")]:
        with suppress(OSError):  # somebody else's, held, or gone by now
            info = folder.lstat()
            if info.st_uid != os.getuid():
                continue
            if folder.name.startswith(NEW_PREFIX) and time.time() - info.st_mtime < _NEW_SECONDS:
                continue
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                yield folder
            finally:
                os.close(descriptor)


def remove_abandoned(folder: Path) -> bool:
    """End the jails whose folders lie in this one and remove it, whatever they left in it; True when it is gone.

    A jail ends with the process that started it. One whose start that process did not live to
    see is missed by the kernel's signal and sits there; it is known by its command line.
    """
    end_jails_naming(f"{folder.resolve()}/")
    remove_folder(folder)
    return not folder.exists()


def _remove_at_exit(pid: int, folder: Path) -> None:
    if os.getpid() == pid:
        remove_folder(folder)


class Scratch:
    """A private folder of one sandbox: ``home``, ``tmp``, and read-only files of ours."""

    def __init__(self) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="sandbox-", dir=process_folder()))
        self.home, self.tmp = self.root / "home", self.root / "tmp"
        try:
            for folder in self.writable:
                folder.mkdir(mode=0o700)
            self.empty_folder = self.root / "empty"
            self.empty_folder.mkdir(mode=0o555)
            self.empty_file = self.write("empty_file", "")
        except OSError:  # no space
            self.remove()
            raise

    @property
    def writable(self) -> tuple[Path, Path]:
        return self.home, self.tmp

    @contextmanager
    def for_one_command(self, uid: int | None) -> Iterator[Path]:
        """A folder with ``tmp`` and ``shm`` that no earlier command has touched.

        Mount points are made in it: a link that an earlier command left there would lead
        the mount of the next one out of the jail.
        """
        folder = Path(tempfile.mkdtemp(prefix="run-", dir=self.root))
        try:
            for name in ("tmp", "shm"):
                (folder / name).mkdir(mode=0o700)
            hand_over(folder, uid)
            yield folder
        finally:
            remove_folder(folder)

    def write(self, name: str, text: str) -> Path:
        path = self.root / name
        path.write_text(text)
        path.chmod(0o444)
        return path

    def remove(self) -> None:
        """Remove the folder whatever the jail left in it."""
        remove_folder(self.root)


def account_files(uid: int, gid: int, home: Path) -> dict[str, str]:
    """By name, the files of ``/etc`` that tell of users and hosts."""
    nobody = "" if uid == 65534 else "nobody:x:65534:65534::/nonexistent:/bin/false\n"
    return {
        "passwd": f"sandbox:x:{uid}:{gid}::{home}:/bin/sh\n{nobody}",
        "group": f"sandbox:x:{gid}:\n" + ("" if gid == 65534 else "nogroup:x:65534:\n"),
        "hosts": "127.0.0.1 localhost sandbox\n::1 localhost\n",
        "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
    }
