"""A tree as a tar file, out and back in; what comes back was made among hostile files."""

from __future__ import annotations

import os
import stat
import subprocess
import tarfile
from collections.abc import Container
from pathlib import Path, PurePosixPath
from typing import IO, Any, BinaryIO

from composer_replication.sandbox.fresh_folders import empty

_CHUNK_BYTES = 1 << 20
# GNU tar: holes of files stay holes.
_PACK = ["tar", "--sparse", "--format=pax", "--owner=0", "--group=0", "--numeric-owner", "-cf", "-", "-C"]


class UnsafeTreeError(Exception):
    """The archive would write outside the tree, or holds what no tree holds."""


def pack_tree(tree: Path, target: IO[bytes]) -> None:
    """Write everything below ``tree`` into a file.

    Raises:
        OSError: with what ``tar`` said.
    """
    done = subprocess.run([*_PACK, str(tree), "."], stdout=target, stderr=subprocess.PIPE, check=False)
    if done.returncode != 0:
        said = done.stderr.decode(errors="replace").strip().splitlines() or [f"exit code {done.returncode}"]
        raise OSError(said[0][:300])


def unpack_tree(source: BinaryIO, tree: Path) -> None:
    """Make ``tree`` what the archive says; what was closed to its owner is open to him then.

    Each entry is made anew in a folder that was made here, so an entry that lies below a link, climbs,
    or is a device is refused; a hard link becomes one only to a file that came before. Holes stay holes.

    Raises:
        UnsafeTreeError: see above, or no tar file.
        OSError: it cannot be written (no space, a name too long).
    """
    empty(tree)
    modes: dict[Path, int] = {tree: 0}  # the folders that were made, and no others
    try:
        with tarfile.open(fileobj=source, mode="r:") as archive:
            for entry in archive:
                place = _place(tree, entry.name, modes)
                if place != tree:
                    _make(archive, entry, tree, place, modes)
                    if entry.isdir():
                        modes[place] = entry.mode
    except (tarfile.TarError, ValueError, OverflowError) as error:
        raise UnsafeTreeError(f"no tar file: {error}") from error
    del modes[tree]
    for place, mode in reversed(modes.items()):
        place.chmod(stat.S_IMODE(mode) & 0o777 | 0o700)


def _place(tree: Path, name: str, folders: Container[Path]) -> Path:
    pure = PurePosixPath(name)
    if pure.is_absolute() or ".." in pure.parts or "\0" in name:
        raise UnsafeTreeError(f"an entry leads out of the tree: {name[:200]!r}")
    place = tree / pure
    if place != tree and place.parent not in folders:
        raise UnsafeTreeError(f"an entry lies below what is no folder: {name[:200]!r}")
    return place


def _make(
    archive: tarfile.TarFile, entry: tarfile.TarInfo, tree: Path, place: Path, folders: Container[Path]
) -> None:
    if entry.isdir():
        place.mkdir(mode=0o700, exist_ok=False)
    elif entry.issym():
        os.symlink(entry.linkname, place)
    elif entry.islnk():
        first = _place(tree, entry.linkname, folders)
        if not stat.S_ISREG(os.lstat(first).st_mode):
            raise UnsafeTreeError(f"a hard link to what is no file: {entry.name[:200]!r}")
        os.link(first, place, follow_symlinks=False)
    elif entry.isfifo():
        os.mkfifo(place, stat.S_IMODE(entry.mode))
    elif entry.isreg():
        _make_file(archive, entry, place)
    else:
        raise UnsafeTreeError(f"an entry of a kind that no tree holds: {entry.name[:200]!r}")


def _make_file(archive: tarfile.TarFile, entry: tarfile.TarInfo, place: Path) -> None:
    data = archive.extractfile(entry)
    assert data is not None
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(place, flags, 0o600), "wb") as handle:
        parts: list[tuple[int, int]] = getattr(entry, "sparse", None) or [(0, entry.size)]
        for start, size in parts:
            data.seek(start)
            handle.seek(start)
            _copy(data, handle, size)
        handle.truncate(entry.size)
        # It is ours now: a set-user-id bit would make whoever runs it us.
        os.fchmod(handle.fileno(), entry.mode & 0o777 | 0o400)
        os.utime(handle.fileno(), (entry.mtime, entry.mtime))


def _copy(source: IO[bytes], target: Any, num_bytes: int) -> None:
    while num_bytes > 0 and (chunk := source.read(min(num_bytes, _CHUNK_BYTES))):
        target.write(chunk)
        num_bytes -= len(chunk)
