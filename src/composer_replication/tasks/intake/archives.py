"""List the files of a folder or of a foreign archive, and read some of them into memory; nothing is unpacked or run.

Nothing is written to disk here, so a member's path can do no harm; it is still
refused when it is absolute or climbs, because such an archive is hostile.
"""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import re
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import IO, Any, cast

from composer_replication.errors import InputError
from composer_replication.tasks.intake.packed_forms import forms_of

_CODE_SUFFIXES = (".py", ".pyc", ".pyo", ".pyi", ".ipynb", ".so", ".whl", ".egg", ".pkl", ".pickle")
_NOT_LOOKED_INTO = (b"BZh", b"\xfd7zXZ")
_DEFINITION = re.compile(rb"^[ \t+>-]*(async def|def|class) \w+.*:", re.MULTILINE)
MAX_MEMBERS = 50_000
MAX_TOTAL_BYTES = 512 * 1024**2
MAX_MEMBER_BYTES = 64 * 1024**2
ARCHIVE_SUFFIXES = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar", ".zip")
_NUM_PASSES = 3
"""How often a tar is read from its start: to list it, and for what is wanted of it in two turns."""
_STEP_BYTES = 1024**2
_MAX_LINK_BYTES = 4096
_OPENERS: dict[str, Callable[..., Any]] = {
    ".gz": gzip.open,
    ".tgz": gzip.open,
    ".bz2": bz2.open,
    ".xz": lzma.open,
}
_BOUNDED_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
_BAD_ARCHIVE = (
    tarfile.TarError,
    zipfile.BadZipFile,
    EOFError,
    OSError,
    ValueError,
    IndexError,  # zipfile: a member without a name
    RuntimeError,  # zipfile: a password is needed; as NotImplementedError: a method or version that it lacks
    zlib.error,
    lzma.LZMAError,
)


@dataclass(frozen=True, slots=True)
class Listing:
    """The files of a source by POSIX path, each with its size and what reads it; ``links`` are symbolic ones.

    ``refused`` makes the error for too many or too large files out of a sentence's part that says which.
    """

    files: dict[str, tuple[int, Callable[[], bytes]]]
    links: set[str]
    refused: Callable[[str], InputError]

    def read(self, names: Iterable[str] | None = None) -> dict[str, bytes]:
        """Some of the files; None: all.

        Raises:
            InputError: too many, or too large (CR0402); a member of an archive that cannot be read (CR0402).
        """
        wanted = self.files.keys() if names is None else frozenset(names)
        # In the order of an archive, which is then gone through once.
        chosen = {name: file for name, file in self.files.items() if name in wanted}
        large = next((name for name, (size, _) in chosen.items() if size > MAX_MEMBER_BYTES), None)
        if large is not None:
            raise self.refused(f"{large[:80]!r} is larger than {MAX_MEMBER_BYTES // 1024**2} MiB")
        if len(chosen) > MAX_MEMBERS:
            raise self.refused(f"more than {MAX_MEMBERS} of its files belong to a task tree")
        if sum(size for size, _ in chosen.values()) > MAX_TOTAL_BYTES:
            raise self.refused(f"its files are larger than {MAX_TOTAL_BYTES // 1024**2} MiB")
        return {name: content() for name, (_, content) in chosen.items()}


def list_folder(root: Path, *, skip: Callable[[str], bool]) -> Listing:
    """The files of a folder; links are neither followed nor read, and folders of a name to ``skip`` not looked into."""
    listing = Listing(
        {},
        set(),
        lambda problem: InputError(
            "CR0402",
            f"the folder is too large for task trees: {problem}.",
            where=str(root),
            fix="give a copy of the folder without what its tests do not need.",
        ),
    )
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = sorted(name for name in subfolders if not skip(name))
        for name in (*subfolders, *sorted(files)):
            path = Path(folder, name)
            if path.is_symlink():
                listing.links.add(path.relative_to(root).as_posix())
            elif path.is_file():
                listing.files[path.relative_to(root).as_posix()] = (path.stat().st_size, path.read_bytes)
    return listing


def is_archive(path: Path) -> bool:
    """Whether the file name is one of the archive formats that can be read."""
    return path.name.lower().endswith(ARCHIVE_SUFFIXES)


def hostile(source: str, detail: str) -> InputError:
    """The error for an archive that is refused."""
    return InputError(
        "CR0402",
        f"the archive is refused: {detail}.",
        where=source,
        fix="take the archive from its publisher, or unpack it yourself and give the folder.",
    )


def list_archive(path: Path, *, skip: Callable[[PurePosixPath], bool] = lambda _: False) -> Listing:
    """The files of an archive, a single top folder stripped.

    Args:
        path: ``.tar``, ``.tar.gz``, ``.tgz``, ``.tar.bz2``, ``.tar.xz`` or ``.zip``.
        skip: whether a member counts as not there, also when the top folder is looked for.

    Raises:
        InputError: unreadable, a path that leaves the archive, a link to the outside, a device, too many members
            or too many bytes (CR0402). What is encrypted, or neither stored nor deflated, is refused when it is read.
    """
    members = _zip_members if path.name.lower().endswith(".zip") else _tar_members
    files: dict[str, tuple[int, Callable[[], bytes]]] = {}
    links: set[str] = set()
    with _bad_archive_refused(path):
        for name, member in _checked(members(path)):
            if member.link is not None:
                links.add(name)
            elif member.content is not None and not skip(PurePosixPath(name)):
                files[name] = (member.num_bytes, member.content)
    tops = {name.partition("/")[0] for name in files}
    top = f"{tops.pop()}/" if len(tops) == 1 and all("/" in name for name in files) else ""
    stripped = {name.removeprefix(top): file for name, file in files.items()}
    return Listing(stripped, {name.removeprefix(top) for name in links}, partial(hostile, str(path)))


@contextmanager
def _bad_archive_refused(path: Path) -> Iterator[None]:
    try:
        yield
    except _BAD_ARCHIVE as error:
        raise hostile(str(path), str(error).rstrip(".") or type(error).__name__) from error


@dataclass(slots=True)
class _Member:
    """A member as its header describes it; ``content`` is None for a folder, ``link`` where a link leads to."""

    name: str
    num_bytes: int
    content: Callable[[], bytes] | None
    link: str | None = None


def _checked(members: Iterator[_Member]) -> Iterator[tuple[str, _Member]]:
    """Members that are not hostile, each with its path."""
    total = 0
    for count, member in enumerate(members, start=1):
        total += member.num_bytes
        path, shown = PurePosixPath(member.name), repr(member.name[:80])
        if path.is_absolute() or ".." in path.parts or "\\" in member.name or "\0" in member.name:
            raise ValueError(f"member {shown} leaves the archive")
        if count > MAX_MEMBERS:
            raise ValueError(f"it has more than {MAX_MEMBERS} members")
        if member.num_bytes > MAX_MEMBER_BYTES:
            raise ValueError(f"member {shown} is larger than {MAX_MEMBER_BYTES // 1024**2} MiB")
        if total > MAX_TOTAL_BYTES:
            raise ValueError(f"it unpacks to more than {MAX_TOTAL_BYTES // 1024**2} MiB")
        if member.link is not None and (
            member.link.startswith("/") or os.path.normpath(member.link).startswith("..")
        ):
            raise ValueError(f"the link {shown} points outside")
        yield str(path), member


def _not_a_file(name: str) -> ValueError:
    return ValueError(f"member {name[:80]!r} is a device or a pipe")


class _Unpacked:
    """A tar file, decompressed as it is read; it refuses once what was decompressed, each time anew, is too much."""

    def __init__(self, path: Path) -> None:
        self._most = MAX_TOTAL_BYTES + MAX_MEMBERS * 1024
        self._left = _NUM_PASSES * self._most
        if path.stat().st_size > self._most:
            raise tarfile.ReadError("it is too large")
        packed = io.BytesIO(path.read_bytes())
        opener = _OPENERS.get(path.suffix.lower())
        self._stream = packed if opener is None else opener(packed)
        self.tell = self._stream.tell

    def _spend(self, num_bytes: int) -> None:
        self._left -= num_bytes
        if num_bytes < 0 or self._left < 0 or num_bytes > self._most:
            raise tarfile.ReadError("it unpacks to too much data")

    def seek(self, position: int) -> int:
        self._spend(position - self.tell() if position >= self.tell() else position)
        return int(self._stream.seek(position))

    def read(self, size: int = -1) -> bytes:
        self._spend(size)
        return bytes(self._stream.read(size))


def _tar_members(path: Path) -> Iterator[_Member]:
    stream = cast("IO[bytes]", _Unpacked(path))
    archive = tarfile.open(fileobj=stream, mode="r:")  # noqa: SIM115  open while a listing reads from it
    for member in archive:
        if not (member.isfile() or member.isdir() or member.issym() or member.islnk()):
            raise _not_a_file(member.name)
        content = partial(_tar_content, path, archive, member) if member.isfile() else None
        link = member.linkname if member.islnk() else None
        if member.issym():
            link = os.path.join(os.path.dirname(member.name), member.linkname)
        yield _Member(member.name, member.size, content, link)


def _tar_content(path: Path, archive: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    with _bad_archive_refused(path):
        handle = archive.extractfile(member)
        return handle.read() if handle is not None else b""


def _zip_members(path: Path) -> Iterator[_Member]:
    archive = zipfile.ZipFile(path)  # it closes its file when nothing reads from it any more
    for info in archive.infolist():
        kind = stat.S_IFMT(info.external_attr >> 16)
        if kind not in (0, stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK):
            raise _not_a_file(info.filename)
        content = partial(_zip_content, path, archive, info)
        link = None
        if kind == stat.S_IFLNK:
            target = content().decode("utf-8", "replace") if info.file_size <= _MAX_LINK_BYTES else "/"
            link = os.path.join(os.path.dirname(info.filename), target)
        yield _Member(info.filename, info.file_size, None if info.is_dir() else content, link)


def _zip_content(path: Path, archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> bytes:
    """A member, in memory that is bounded by the size in its header, whether the header tells the truth or not.

    ``ZipFile.read`` decompresses a member whole and then cuts it to the size in the header. Read in steps, a
    stored or deflated one is decompressed no further than asked for, and what is cut off gives a wrong
    checksum. For bzip2 and lzma zipfile sets no bound in steps either, so they are refused.
    """
    with _bad_archive_refused(path):
        if info.compress_type not in _BOUNDED_METHODS:
            raise ValueError(f"member {info.filename[:80]!r} is neither stored nor deflated")
        with archive.open(info) as member:
            return b"".join(iter(lambda: member.read(_STEP_BYTES), b""))


def holds_code(data: bytes) -> bool:
    """Whether packed data may hold Python code, also in archives within it; what cannot be looked into whole may."""
    packed, *inner = forms_of("", data)
    return not inner or any(
        form.problem
        or form.path.lower().endswith(_CODE_SUFFIXES)
        or _DEFINITION.search(form.data)
        or form.data.startswith(_NOT_LOOKED_INTO)
        for form in (packed, *inner)
    )
