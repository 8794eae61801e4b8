"""A tree as a tar file, out and back in; what comes back was made among hostile files."""

from __future__ import annotations

import os
import stat
import tarfile
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from composer_replication.sandbox.pods.pod_plan import nobodys
from composer_replication.sandbox.private_folders import remove_folder


class UnsafeTreeError(Exception):
    """The archive would write outside the tree, or holds what no tree holds."""


def pack_tree(tree: Path, target: BinaryIO) -> None:
    """Everything below ``tree``, without the folder itself, whose mode is the cluster's."""
    with tarfile.open(fileobj=target, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for child in sorted(tree.iterdir()):
            archive.add(child, child.name, filter=_portable)


def _portable(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
    return (
        nobodys(entry)
        if entry.isreg() or entry.isdir() or entry.issym() or entry.islnk() or entry.isfifo()
        else None
    )


def unpack_tree(source: BinaryIO, tree: Path) -> None:
    """Make ``tree`` what the archive says.

    Each entry is made anew in a folder that is no link, so an entry that lies below a link, climbs,
    or is a device is refused; a hard link becomes one only to a file that came before.

    Raises:
        UnsafeTreeError: see above, or no tar file.
        OSError: it cannot be written (no space, a name too long).
    """
    empty_folder(tree)
    modes: list[tuple[Path, int]] = []
    try:
        with tarfile.open(fileobj=source, mode="r:") as archive:
            for entry in archive:
                place = _place(tree, entry.name)
                if place != tree:
                    _make(archive, entry, tree, place)
                    if entry.isdir():
                        modes.append((place, entry.mode))
    except tarfile.TarError as error:
        raise UnsafeTreeError(f"no tar file: {error}") from error
    for place, mode in reversed(modes):
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


def _place(tree: Path, name: str) -> Path:
    pure = PurePosixPath(name)
    if pure.is_absolute() or ".." in pure.parts or "\0" in name:
        raise UnsafeTreeError(f"an entry leads out of the tree: {name[:200]!r}")
    place = tree
    for part in pure.parts[:-1]:
        place /= part
        if not stat.S_ISDIR(os.lstat(place).st_mode):
            raise UnsafeTreeError(f"an entry lies below what is no folder: {name[:200]!r}")
    return place / pure.parts[-1] if pure.parts else place


def _make(archive: tarfile.TarFile, entry: tarfile.TarInfo, tree: Path, place: Path) -> None:
    if entry.isdir():
        place.mkdir(mode=0o700, exist_ok=False)
    elif entry.issym():
        os.symlink(entry.linkname, place)
    elif entry.islnk():
        first = _place(tree, entry.linkname)
        if not stat.S_ISREG(os.lstat(first).st_mode):
            raise UnsafeTreeError(f"a hard link to what is no file: {entry.name[:200]!r}")
        os.link(first, place, follow_symlinks=False)
    elif entry.isfifo():
        os.mkfifo(place, stat.S_IMODE(entry.mode))
    elif entry.isreg():
        data = archive.extractfile(entry)
        descriptor = os.open(
            place, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
        )
        with os.fdopen(descriptor, "wb") as handle:
            while data is not None and (chunk := data.read(1 << 20)):
                handle.write(chunk)
            os.fchmod(
                handle.fileno(), entry.mode & 0o777
            )  # it is ours now: setuid would make whoever runs it us
            os.utime(handle.fileno(), (entry.mtime, entry.mtime))
    else:
        raise UnsafeTreeError(f"an entry of a kind that no tree holds: {entry.name[:200]!r}")
