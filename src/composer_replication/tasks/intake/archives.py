"""List the files of a folder or of an archive, and read some of them into memory; nothing is unpacked or run.

Nothing is written to disk, so a member's path can do no harm; it is refused all the same when it is absolute or climbs,
because such an archive is hostile.
"""

from __future__ import annotations

import gzip
import io
import os
import tarfile
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from composer_replication.errors import InputError
from composer_replication.tasks.intake.packed_forms import BROKEN, Budget, members_of
from composer_replication.tasks.intake.tree_rules import is_system_file, skips_folder

MAX_MEMBERS = 50_000
MAX_TOTAL_BYTES = 512 * 1024**2
MAX_MEMBER_BYTES = 64 * 1024**2
ARCHIVE_SUFFIXES = (".tar.gz", ".tgz", ".tar", ".zip")


def refusal(where: str, problem: str) -> InputError:
    """The error for a source whose files cannot be taken."""
    fix = "give a folder: a clone, what was unpacked, or a copy, without what its tests do not need."
    return InputError("CR0402", f"the source is refused: {problem}.", where=where, fix=fix)


@dataclass(frozen=True, slots=True)
class Listing:
    """The files of a source by POSIX path, each as its bytes or where they lie; ``links`` are symbolic ones."""

    where: str
    files: dict[str, bytes | Path]
    links: set[str]

    def read(self, names: Iterable[str] | None = None) -> dict[str, bytes]:
        """Some of the files (None: all).

        Raises:
            InputError: too many, too large, or unreadable (CR0402).
        """
        chosen = dict(self.files) if names is None else {name: self.files[name] for name in names}
        sizes = [one.stat().st_size if isinstance(one, Path) else len(one) for one in chosen.values()]
        is_large = max(sizes, default=0) > MAX_MEMBER_BYTES or sum(sizes) > MAX_TOTAL_BYTES
        if is_large or len(sizes) > MAX_MEMBERS:
            each, whole = MAX_MEMBER_BYTES // 1024**2, MAX_TOTAL_BYTES // 1024**2
            problem = (
                f"a task tree has at most {MAX_MEMBERS} files, each of {each} MiB, together of {whole} MiB"
            )
            raise refusal(self.where, problem)
        return {name: one.read_bytes() if isinstance(one, Path) else one for name, one in chosen.items()}


def list_folder(root: Path) -> Listing:
    """The files of a folder; links are neither followed nor read, and folders that are always left out not looked into."""
    listing = Listing(str(root), {}, set())
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = sorted(name for name in subfolders if not skips_folder(name))
        for path in (Path(folder, name) for name in (*subfolders, *sorted(files))):
            name = path.relative_to(root).as_posix()
            if path.is_symlink():
                listing.links.add(name)
            elif path.is_file():
                listing.files[name] = path
    return listing


def list_archive(path: Path, where: str = "") -> Listing:
    """The files of an archive (``ARCHIVE_SUFFIXES``), all of them in memory; links, devices and pipes are not read.

    A single top folder is stripped; what a system added counts as not there. ``where`` is what errors name in place of the path.

    Raises:
        InputError: unreadable, a path out of the archive, too many members or bytes (CR0402).
    """
    listing = Listing(where or str(path), {}, set())
    try:
        for name, data in members_of(_opened(path), Budget(MAX_TOTAL_BYTES, MAX_MEMBERS)):
            pure = PurePosixPath(name)
            if pure.is_absolute() or ".." in pure.parts or "\0" in name:
                raise ValueError(f"member {name[:80]!r} leaves the archive")
            if data is None:
                listing.links.add(str(pure))
            elif not is_system_file(pure):
                listing.files[str(pure)] = data
    except BROKEN as error:
        raise refusal(listing.where, str(error).rstrip(".") or type(error).__name__) from error
    tops = {name.partition("/")[0] for name in listing.files}
    if len(tops) != 1 or not all("/" in name for name in listing.files):
        return listing
    top = f"{tops.pop()}/"
    stripped = {name.removeprefix(top): file for name, file in listing.files.items()}
    return Listing(listing.where, stripped, {name.removeprefix(top) for name in listing.links})


def _opened(path: Path) -> zipfile.ZipFile | tarfile.TarFile:
    """An archive to read from; a tar is unpacked into memory first, so that its headers may lead anywhere."""
    if path.name.lower().endswith(".zip"):
        return zipfile.ZipFile(path)
    with path.open("rb") if path.suffix.lower() == ".tar" else gzip.open(path) as stream:
        whole = Budget(MAX_TOTAL_BYTES + MAX_MEMBERS * 1024).take(stream)  # with the headers
    return tarfile.open(fileobj=io.BytesIO(whole), mode="r:")
