"""Read the members of a foreign archive or folder into memory; nothing is unpacked or run.

Nothing is written to disk here, so a member's path can do no harm; it is still
refused when it is absolute or climbs, because such an archive is hostile.
"""

from __future__ import annotations

import bz2
import gzip
import lzma
import os
import re
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Collection, Iterator
from pathlib import Path, PurePosixPath
from typing import IO, cast

from composer_replication.errors import InputError
from composer_replication.tasks.intake.packed_forms import forms_of

_CODE_SUFFIXES = (".py", ".pyc", ".pyo", ".pyi", ".ipynb", ".so", ".whl", ".egg", ".pkl", ".pickle")
_NOT_LOOKED_INTO = (b"BZh", b"\xfd7zXZ")
_DEFINITION = re.compile(rb"^[ \t+>-]*(async def|def|class) \w+.*:", re.MULTILINE)
MAX_MEMBERS = 50_000
MAX_TOTAL_BYTES = 512 * 1024**2
MAX_MEMBER_BYTES = 64 * 1024**2
ARCHIVE_SUFFIXES = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar", ".zip")

Wanted = Callable[[PurePosixPath], bool]
Choose = Callable[[frozenset[str], frozenset[str]], Wanted]
"""Given the paths of all files, and those of the symbolic links, gives the rule that chooses among the files."""
_STEP_BYTES = 1024**2
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


class _Capped:
    """A decompressed stream that ends the reading once it has given too much."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._left = MAX_TOTAL_BYTES + MAX_MEMBERS * 1024

    def read(self, size: int = -1) -> bytes:
        if size < 0 or size > self._left:
            raise tarfile.ReadError("it unpacks to too much data")
        data = self._stream.read(size)
        self._left -= len(data)
        return data


def read_archive(
    path: Path, choose: Choose, *, skip: Callable[[PurePosixPath], bool] = lambda _: False
) -> dict[str, bytes]:
    """The wanted files of an archive by POSIX path, a single top folder stripped.

    Args:
        path: ``.tar``, ``.tar.gz``, ``.tgz``, ``.tar.bz2``, ``.tar.xz`` or ``.zip``.
        choose: gives the rule that chooses among the files.
        skip: whether a member counts as not there, also when the top folder is looked for.

    Raises:
        InputError: unreadable, encrypted, a zip whose members are neither stored nor deflated, a path that leaves
            the archive, a link to the outside, a device, too many members or too many bytes (CR0402).
    """
    read = _read_zip if path.name.lower().endswith(".zip") else _read_tar
    links: set[str] = set()
    try:
        names = frozenset(
            name for name, _ in read(path, lambda _: False, links) if not skip(PurePosixPath(name))
        )
        top = _single_top(names)
        rule = choose(*(frozenset(name.removeprefix(top) for name in some) for some in (names, links)))
        found = read(
            path,
            lambda member: not skip(member) and rule(PurePosixPath(str(member).removeprefix(top))),
            links,
        )
        return {name.removeprefix(top): data for name, data in found if data is not None}
    except _BAD_ARCHIVE as error:
        raise hostile(str(path), str(error).rstrip(".") or type(error).__name__) from error


def _single_top(names: frozenset[str]) -> str:
    tops = {name.partition("/")[0] for name in names}
    return f"{tops.pop()}/" if len(tops) == 1 and all("/" in name for name in names) else ""


def _safe_name(raw: str, source: Path) -> str:
    path = PurePosixPath(raw)
    if path.is_absolute() or ".." in path.parts or "\\" in raw or "\0" in raw:
        raise hostile(str(source), f"member {raw[:80]!r} leaves the archive")
    return str(path)


def _check_link(name: str, target: str, source: Path, *, from_root: bool) -> None:
    base = "" if from_root else os.path.dirname(name)
    landing = os.path.normpath(os.path.join(base, target))
    if os.path.isabs(target) or landing.startswith(".."):
        raise hostile(str(source), f"the link {name[:80]!r} points outside")


def _open_tar(path: Path) -> IO[bytes]:
    name = path.name.lower()
    if name.endswith((".gz", ".tgz")):
        return cast("IO[bytes]", gzip.open(path, "rb"))
    if name.endswith(".bz2"):
        return cast("IO[bytes]", bz2.open(path, "rb"))
    if name.endswith(".xz"):
        return cast("IO[bytes]", lzma.open(path, "rb"))
    return path.open("rb")


def _read_tar(path: Path, wanted: Wanted, links: set[str]) -> Iterator[tuple[str, bytes | None]]:
    """Each regular file's name, with its bytes when it is wanted; the names of links go to ``links``."""
    total = count = 0
    with (
        _open_tar(path) as stream,
        tarfile.open(fileobj=cast("IO[bytes]", _Capped(stream)), mode="r|") as archive,
    ):
        for member in archive:
            count += 1
            total += member.size
            name = _safe_name(member.name, path)
            _check_sizes(path, name, count, member.size, total)
            if member.issym() or member.islnk():
                _check_link(name, member.linkname, path, from_root=member.islnk())
                links.add(name)
            elif member.isfile():
                handle = archive.extractfile(member) if wanted(PurePosixPath(name)) else None
                yield name, handle.read() if handle else None
            elif not member.isdir():
                raise hostile(str(path), f"member {name[:80]!r} is a device or a pipe")


def _read_zip(path: Path, wanted: Wanted, links: set[str]) -> Iterator[tuple[str, bytes | None]]:
    total = 0
    with zipfile.ZipFile(path) as archive:
        for count, info in enumerate(archive.infolist(), start=1):
            total += info.file_size
            name = _safe_name(info.filename, path)
            _check_sizes(path, name, count, info.file_size, total)
            kind = stat.S_IFMT(info.external_attr >> 16)
            if kind == stat.S_IFLNK:
                target = _zip_member(archive, info, path, name).decode("utf-8", "replace")
                _check_link(name, target, path, from_root=False)
                links.add(name)
            elif kind not in (0, stat.S_IFREG, stat.S_IFDIR):
                raise hostile(str(path), f"member {name[:80]!r} is a device or a pipe")
            elif not info.is_dir():
                yield name, _zip_member(archive, info, path, name) if wanted(PurePosixPath(name)) else None


def _zip_member(archive: zipfile.ZipFile, info: zipfile.ZipInfo, path: Path, name: str) -> bytes:
    """A member, in memory that is bounded by the size in its header, whether the header tells the truth or not.

    ``ZipFile.read`` decompresses a member whole and then cuts it to the size in the header. Read in steps, a
    stored or deflated one is decompressed no further than asked for, and what is cut off gives a wrong
    checksum. For bzip2 and lzma zipfile sets no bound in steps either, so they are refused.
    """
    if info.compress_type not in _BOUNDED_METHODS:
        raise hostile(str(path), f"member {name[:80]!r} is neither stored nor deflated")
    with archive.open(info) as member:
        return b"".join(iter(lambda: member.read(_STEP_BYTES), b""))


def _check_sizes(path: Path, name: str, count: int, size: int, total: int) -> None:
    if count > MAX_MEMBERS:
        raise hostile(str(path), f"it has more than {MAX_MEMBERS} members")
    if size > MAX_MEMBER_BYTES:
        raise hostile(str(path), f"member {name[:80]!r} is larger than {MAX_MEMBER_BYTES // 1024**2} MiB")
    if total > MAX_TOTAL_BYTES:
        raise hostile(str(path), f"it unpacks to more than {MAX_TOTAL_BYTES // 1024**2} MiB")


def holds_code(data: bytes) -> bool:
    """Whether a compressed file or an archive may hold Python code, within others too; one that cannot be looked into whole may."""
    packed, *inner = forms_of("", data)
    return not inner or any(
        form.problem
        or form.path.lower().endswith(_CODE_SUFFIXES)
        or _DEFINITION.search(form.data)
        or form.data.startswith(_NOT_LOOKED_INTO)
        for form in (packed, *inner)
    )


def too_large(names_and_sizes: Collection[tuple[str, int]]) -> str:
    """What is too much about files that are chosen from a folder or a commit; empty when they fit."""
    large = next((name for name, size in names_and_sizes if size > MAX_MEMBER_BYTES), None)
    if large is not None:
        return f"{large[:80]!r} is larger than {MAX_MEMBER_BYTES // 1024**2} MiB"
    if len(names_and_sizes) > MAX_MEMBERS:
        return f"more than {MAX_MEMBERS} of its files belong to a task tree"
    if sum(size for _, size in names_and_sizes) > MAX_TOTAL_BYTES:
        return f"its files are larger than {MAX_TOTAL_BYTES // 1024**2} MiB"
    return ""


def read_folder(root: Path, choose: Choose, *, skip: Callable[[str], bool]) -> dict[str, bytes]:
    """The wanted files of a folder by POSIX path; links are neither followed nor read.

    Args:
        root: the folder.
        choose: gives the rule that chooses among the files.
        skip: whether a folder of that name is not looked into.

    Raises:
        InputError: too many files or bytes (CR0402).
    """
    names: list[str] = []
    links: set[str] = set()
    for folder, subfolders, files in os.walk(root):
        kept = [name for name in subfolders if not skip(name)]
        linked = {name for name in (*kept, *files) if os.path.islink(os.path.join(folder, name))}
        links |= {Path(folder, name).relative_to(root).as_posix() for name in linked}
        subfolders[:] = sorted(set(kept) - linked)
        for name in sorted(files):
            path = Path(folder, name)
            if stat.S_ISREG(path.lstat().st_mode):
                names.append(path.relative_to(root).as_posix())
    rule = choose(frozenset(names), frozenset(links))
    chosen = [name for name in names if rule(PurePosixPath(name))]
    problem = too_large([(name, (root / name).stat().st_size) for name in chosen])
    if problem:
        raise InputError(
            "CR0402",
            f"the folder is too large for task trees: {problem}.",
            where=str(root),
            fix="give a copy of the folder without what its tests do not need.",
        )
    return {name: (root / name).read_bytes() for name in chosen}
