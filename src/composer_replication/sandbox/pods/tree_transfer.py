"""A tree as a tar file, out and back in; what comes back was made among hostile files."""

from __future__ import annotations

import errno
import os
import stat
import tarfile
from collections.abc import Container
from pathlib import Path, PurePosixPath
from typing import IO, Any, BinaryIO

from composer_replication.sandbox.folder_removal import remove_folder
from composer_replication.sandbox.pods.pod_plan import nobodys

_STAT_BLOCK_BYTES = 512
_CHUNK_BYTES = 1 << 20


class UnsafeTreeError(Exception):
    """The archive would write outside the tree, or holds what no tree holds."""


def pack_tree(tree: Path, target: BinaryIO) -> bool:
    """Everything below ``tree``, without the folder itself, whose mode is the cluster's; True if a file has holes.

    Holes are not sent. Reference: GNU tar manual, "Storing Sparse Files", PAX format, version 1.0.
    """
    has_holes = False
    with tarfile.open(fileobj=target, mode="w", format=tarfile.PAX_FORMAT) as archive:
        queue = [(tree, "")]
        while queue:
            path, name = queue.pop()
            info = path.lstat()
            if stat.S_ISDIR(info.st_mode):
                queue += [(child, f"{name}/{child.name}") for child in sorted(path.iterdir(), reverse=True)]
            entry = archive.gettarinfo(path, name[1:]) if name else None
            if entry is None or not (
                entry.isreg() or entry.isdir() or entry.issym() or entry.islnk() or entry.isfifo()
            ):
                continue
            nobodys(entry)
            if entry.isreg() and info.st_blocks * _STAT_BLOCK_BYTES < info.st_size:
                _add_with_holes(archive, entry, path)
                has_holes = True
            elif entry.isreg():
                with path.open("rb") as handle:
                    archive.addfile(entry, handle)
            else:
                archive.addfile(entry)
    return has_holes


def _add_with_holes(archive: tarfile.TarFile, entry: tarfile.TarInfo, path: Path) -> None:
    with path.open("rb") as handle:
        parts = _data_in(handle.fileno(), entry.size)
        table = "".join(f"{number}\n" for number in (len(parts), *(each for part in parts for each in part)))
        head = _padded(table.encode())
        entry.pax_headers = {
            "GNU.sparse.major": "1",
            "GNU.sparse.minor": "0",
            "GNU.sparse.name": entry.name,
            "GNU.sparse.realsize": str(entry.size),
        }
        entry.size = len(head) + sum(size for _, size in parts)
        archive.addfile(entry)  # the headers alone
        target = archive.fileobj
        assert target is not None
        target.write(head)
        for start, size in parts:
            handle.seek(start)
            _copy(handle, target, size)
        target.write(bytes(-entry.size % tarfile.BLOCKSIZE))
        archive.offset += entry.size + -entry.size % tarfile.BLOCKSIZE


def _data_in(descriptor: int, size: int) -> list[tuple[int, int]]:
    """Where a file holds something: start and length, and at last its end."""
    parts, place = [], 0
    while place < size:
        try:
            start = os.lseek(descriptor, place, os.SEEK_DATA)
        except OSError as error:
            if error.errno != errno.ENXIO:
                raise
            break  # the rest is a hole
        place = os.lseek(descriptor, start, os.SEEK_HOLE)
        parts.append((start, place - start))
    return [*parts, (size, 0)]


def _padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % tarfile.BLOCKSIZE)


def _copy(source: IO[bytes], target: Any, num_bytes: int) -> None:
    while num_bytes > 0 and (chunk := source.read(min(num_bytes, _CHUNK_BYTES))):
        target.write(chunk)
        num_bytes -= len(chunk)


def unpack_tree(source: BinaryIO, tree: Path) -> None:
    """Make ``tree`` what the archive says.

    Each entry is made anew in a folder that was made here, so an entry that lies below a link, climbs,
    or is a device is refused; a hard link becomes one only to a file that came before. Holes stay holes.

    Raises:
        UnsafeTreeError: see above, or no tar file.
        OSError: it cannot be written (no space, a name too long).
    """
    empty_folder(tree)
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


def empty_folder(folder: Path) -> None:
    """Remove all that is in it; the folder stays, for somebody may hold it."""
    with os.scandir(folder) as entries:
        found = [(Path(entry.path), entry.is_dir(follow_symlinks=False)) for entry in entries]
    for path, is_folder in found:
        if is_folder:
            remove_folder(path)
        else:
            path.unlink(missing_ok=True)


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
        data = archive.extractfile(entry)
        assert data is not None
        descriptor = os.open(
            place, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
        )
        with os.fdopen(descriptor, "wb") as handle:
            parts: list[tuple[int, int]] = getattr(entry, "sparse", None) or [
                (0, entry.size)
            ]  # typed as a number
            for start, size in parts:
                data.seek(start)
                handle.seek(start)
                _copy(data, handle, size)
            handle.truncate(entry.size)
            os.fchmod(
                handle.fileno(), entry.mode & 0o777
            )  # it is ours now: setuid would make whoever runs it us
            os.utime(handle.fileno(), (entry.mtime, entry.mtime))
    else:
        raise UnsafeTreeError(f"an entry of a kind that no tree holds: {entry.name[:200]!r}")
