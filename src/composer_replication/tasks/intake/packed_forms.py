"""The forms in which code may lie in a file: unpacked, decoded, and said how.

Standard library only: the same text runs outside and, for the search of ``leaks``, inside a jail.
Nothing is executed here, and each file unpacks to a bounded amount.
"""

from __future__ import annotations

import base64
import gzip
import io
import re
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from typing import IO

MAX_DEPTH = 4
MAX_UNPACKED_BYTES = 256 * 1024**2
MAX_MEMBERS = 20_000
MIN_ENCODED = 40
_LONG_RUN = re.compile(rb"[A-Za-z0-9+/_-]{%d}" % MIN_ENCODED)
_BASE64 = re.compile(rb"(?:[A-Za-z0-9+/_-]{16,}+(?:\\n|[\r\n\"' ,])*+)++={0,2}")
_NOT_BASE64 = re.compile(rb"\\n|[^A-Za-z0-9+/_-]")
BOUNDED_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)  # of the others zipfile unpacks all at once
_GZIP = b"\x1f\x8b"
_STEP_BYTES = 1024**2
BROKEN = (
    OSError, EOFError, ValueError, LookupError, RuntimeError, zlib.error, tarfile.TarError, zipfile.BadZipFile
)  # fmt: skip
"""What the readers of archives raise for a damaged one, or for one with a password."""


def forms_of(
    path: str,
    data: bytes,
    problems: list[str],
    *,
    kind: str = "",
    depth: int = 0,
    budget: Budget | None = None,
) -> Iterator[tuple[str, str, bytes]]:
    """The bytes as they are, then every form found in them, wrappings within wrappings included: (path, kind, bytes).

    The path goes on into archives (``a.zip!/b.py``), the kind says how the outermost wrapping was taken off. What could not
    be unpacked is told in ``problems``, so that it is counted and not passed over.
    """
    yield path, kind, data
    budget = budget or Budget()
    for reader in (_members, _encoded) if depth < MAX_DEPTH else ():
        try:
            for name, found, content in reader(path, data, budget):
                yield from forms_of(
                    name, content, problems, kind=kind or found, depth=depth + 1, budget=budget
                )
        except BROKEN as error:  # what looked like an archive to one reader hides nothing from the other
            problems.append(f"{path} ({type(error).__name__}: {error})"[:300])


class Budget:
    """How much one file may still unpack to."""

    def __init__(self, max_bytes: int = MAX_UNPACKED_BYTES, max_members: int = MAX_MEMBERS) -> None:
        self.left_bytes, self.left_members = max_bytes, max_members

    def take(self, stream: IO[bytes] | io.BufferedIOBase) -> bytes:
        """All of a stream. Read in steps it is unpacked no further than asked for, whatever a header says."""
        whole = io.BytesIO()
        self.left_members -= 1
        while piece := stream.read(_STEP_BYTES):
            self.left_bytes -= len(piece)
            if self.left_bytes < 0:
                break
            whole.write(piece)
        if self.left_bytes < 0 or self.left_members < 0:
            raise ValueError("it unpacks to too much data, or too many files")
        return whole.getvalue()


def members_of(
    archive: zipfile.ZipFile | tarfile.TarFile, budget: Budget
) -> Iterator[tuple[str, bytes | None]]:
    """The members but folders: the path, and the bytes of a file; None for a link, a device or a pipe."""
    if isinstance(archive, zipfile.ZipFile):
        for info in archive.infolist():
            if info.compress_type not in BOUNDED_METHODS:
                raise ValueError(f"member {info.filename[:80]!r} is neither stored nor deflated")
            if not info.is_dir():
                is_file = stat.S_IFMT(info.external_attr >> 16) in (0, stat.S_IFREG)
                with archive.open(info) as stream:
                    yield info.filename, budget.take(stream) if is_file else None
        return
    for member in archive:
        if member.issparse():  # it would be larger than what lies in the archive
            raise ValueError(f"member {member.name[:80]!r} has holes")
        handle = archive.extractfile(member) if member.isfile() else None
        if not member.isdir():
            yield member.name, None if handle is None else budget.take(handle)


_Found = Iterator[tuple[str, str, bytes]]


def _members(path: str, data: bytes, budget: Budget) -> _Found:
    """What lies in a zip or tar, and what a gzip holds."""
    whole = io.BytesIO(data)
    if data.startswith(_GZIP):
        yield path, "archive", budget.take(gzip.GzipFile(fileobj=whole))
        return
    archive: zipfile.ZipFile | tarfile.TarFile
    if b"PK\x05\x06" in data[-66_000:] and zipfile.is_zipfile(whole):
        archive = zipfile.ZipFile(whole)
    elif data[257:262] == b"ustar":
        archive = tarfile.TarFile(fileobj=whole)
    else:
        return
    for name, content in members_of(archive, budget):
        if content is not None:
            yield f"{path}!/{name}", "archive", content


def _encoded(path: str, data: bytes, _: Budget) -> _Found:
    """What the runs of base64 in a text say."""
    if _LONG_RUN.search(data):  # a quick look
        for match in _BASE64.finditer(data):
            if len(match[0]) >= MIN_ENCODED:
                letters = _NOT_BASE64.sub(b"", match[0]).translate(bytes.maketrans(b"-_", b"+/"))
                whole = letters[:-1] if len(letters) % 4 == 1 else letters
                yield path, "base64", base64.b64decode(whole + b"=" * (-len(whole) % 4))
