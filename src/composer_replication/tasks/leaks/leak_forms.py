"""The forms in which code may lie in a file: unpacked, decoded, and said how.

Standard library only: the same text runs outside and, as the thief's tool, inside a jail.
Nothing is executed here, and each file unpacks to a bounded amount.
"""

from __future__ import annotations

import base64
import binascii
import bz2
import contextlib
import gzip
import html
import io
import json
import lzma
import pickletools
import re
import sqlite3
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO

MAX_DEPTH = 4
MAX_UNPACKED_BYTES = 256 * 1024**2
MAX_MEMBERS = 20_000
MIN_ENCODED = 40
# Everything but the letters of base64 becomes a space: a quick look whether there is a long run.
_LETTERS = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/-_")
_ONLY_BASE64 = bytes(code if code in _LETTERS else 32 for code in range(256))
_BASE64 = re.compile(rb"(?:[A-Za-z0-9+/_-]{16,}+(?:\\n|[\r\n\"' ,])*+)++={0,2}")
_NOT_BASE64 = re.compile(rb"\\n|[^A-Za-z0-9+/_-]")
_HEX = re.compile(rb"(?:[0-9a-fA-F]{2}){32,}")
_SQLITE = b"SQLite format 3\0"
_MAGIC = (b"PK\x03\x04", b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"PACK", _SQLITE)
_TAG = re.compile(r"<[^<>]{0,400}>")
_BROKEN = (
    OSError,
    EOFError,
    ValueError,
    KeyError,
    IndexError,
    RuntimeError,
    NotImplementedError,
    RecursionError,
    zlib.error,
    lzma.LZMAError,
    sqlite3.Error,
    tarfile.TarError,
    zipfile.BadZipFile,
)


@dataclass(frozen=True)
class Form:
    """One reading of a file: ``kind`` says how the outermost wrapping was taken off.

    ``path`` goes on into archives (``a.zip!/b.py``). ``problem`` is not empty where
    something could not be unpacked, so that it is counted and not passed over.
    """

    path: str
    kind: str
    data: bytes
    problem: str = ""


class _Budget:
    """How much one file may still unpack to, and what it has unpacked to."""

    def __init__(self) -> None:
        self.seen: set[tuple[str, str, bytes]] = set()
        self.left_bytes = MAX_UNPACKED_BYTES
        self.left_members = MAX_MEMBERS

    def take(self, stream: io.BufferedIOBase | io.RawIOBase | IO[bytes]) -> bytes:
        data = stream.read(self.left_bytes + 1)
        return self.count(data or b"")

    def count(self, data: bytes) -> bytes:
        self.left_bytes -= len(data)
        self.left_members -= 1
        if self.left_bytes < 0 or self.left_members < 0:
            raise ValueError("it unpacks to too much data")
        return data


def forms_of(path: str, data: bytes) -> Iterator[Form]:
    """The bytes as they are, then every form found in them, wrappings within wrappings included."""
    yield from _unwrap(path, "", data, 0, _Budget())


def _unwrap(path: str, kind: str, data: bytes, depth: int, budget: _Budget) -> Iterator[Form]:
    yield Form(path, kind, data)
    inner: list[tuple[str, str, bytes]] = []
    problem = ""
    for reader in _READERS if depth < MAX_DEPTH else ():
        found = reader(path, data, budget)
        try:
            while (one := next(found, None)) is not None:
                inner.append(one)
        except _BROKEN as error:  # what looked like an archive to one reader hides nothing from the others
            problem = problem or f"{type(error).__name__}: {error}"[:200]
    if problem and (data.startswith(_MAGIC) or data[257:262] == b"ustar"):
        yield Form(path, kind, b"", problem)
    for name, inner_kind, content in inner:
        one = name, kind or inner_kind, content
        if one not in budget.seen:  # two ways of unwrapping often end in the same text
            budget.seen.add(one)
            yield from _unwrap(*one, depth + 1, budget)


_Found = Iterator[tuple[str, str, bytes]]


def _in_texts(path: str, data: bytes, _: _Budget) -> _Found:
    if b"\0" not in data[:4096]:
        yield from ((path, kind, found) for kind, found in _decoded_texts(data))
    elif data[:2] in (b"\xff\xfe", b"\xfe\xff"):
        yield path, "encoded", data.decode("utf-16", "replace").encode()


def _in_digits(path: str, data: bytes, _: _Budget) -> _Found:
    long_runs = [run for run in data.translate(_ONLY_BASE64).split() if len(run) >= MIN_ENCODED]
    if long_runs:
        for match in _BASE64.finditer(data):
            if len(match[0]) >= MIN_ENCODED:
                yield from ((path, "base64", found) for found in _base64_of(match[0]))
    for run in long_runs:
        for match in _HEX.finditer(run):
            yield path, "hex", binascii.unhexlify(match[0])


def _members(path: str, data: bytes, budget: _Budget) -> _Found:
    kind = "wheel" if path.endswith((".whl", ".egg")) else "archive"
    if b"PK\x05\x06" in data[-66_000:] and zipfile.is_zipfile(io.BytesIO(data)):
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            for info in archive.infolist():
                if not info.is_dir():
                    with archive.open(info) as stream:
                        yield f"{path}!/{info.filename}", kind, budget.take(stream)
    elif data[257:262] == b"ustar":
        with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as tar:
            for member in tar:
                handle = tar.extractfile(member) if member.isfile() else None
                if handle is not None:
                    yield f"{path}!/{member.name}", kind, budget.take(handle)


def _records(path: str, data: bytes, budget: _Budget) -> _Found:
    """The values in a database of SQLite, the texts of a pickle, what an HTTP cache keeps of an answer.

    Nothing of a pickle is made: its instructions are only listed.
    """
    if data.startswith(_SQLITE):
        yield from ((path, "database", value) for value in _rows(data, budget))
    elif data[:1] == b"\x80" and data[1:2] in (b"\2", b"\3", b"\4", b"\5"):
        yield path, "pickle", budget.count("\n".join(_pickled_texts(data)).encode("utf-8", "replace"))
    elif data[:3] == b"cc=" and b"\x1f\x8b\x08" in data:
        # CacheControl, which pip uses, before it kept bodies in files of their own.
        body = zlib.decompressobj(31).decompress(data[data.index(b"\x1f\x8b\x08") :], budget.left_bytes + 1)
        yield path, "archive", budget.count(body)


def _pickled_texts(data: bytes) -> list[str]:
    texts: list[str] = []
    try:
        for _, argument, _ in pickletools.genops(data):
            if isinstance(argument, str):
                texts.append(argument.rstrip("\n"))
    except _BROKEN:
        return texts  # it only began like a pickle
    return texts


def _rows(data: bytes, budget: _Budget) -> Iterator[bytes]:
    """Every text and blob of every table; views, triggers and virtual tables are not asked."""
    with contextlib.closing(sqlite3.connect(":memory:")) as base:
        base.deserialize(data[:18] + b"\1\1" + data[20:])  # as if it had no journal in another file
        base.execute("PRAGMA trusted_schema = OFF")
        base.text_factory = bytes
        tables = base.execute("SELECT name, sql FROM sqlite_master WHERE type = 'table'").fetchall()
        for name, sql in tables:
            if not sql.lstrip().upper().startswith(b"CREATE VIRTUAL"):
                quoted = name.decode("utf-8", "replace").replace('"', '""')
                for row in base.execute(f'SELECT * FROM "{quoted}"'):  # noqa: S608  a name, quoted
                    yield from (budget.count(value) for value in row if isinstance(value, bytes))
    page = int.from_bytes(data[16:18], "big")
    if len(data) < int.from_bytes(data[28:32], "big") * (1 << 16 if page == 1 else page):
        raise sqlite3.DatabaseError("the database is cut off")  # SQLite may read the rest in silence


def _in_stream(path: str, data: bytes, budget: _Budget) -> _Found:
    plain = _inflated(data, budget)
    if plain is not None:
        is_git = re.match(rb"(?:blob|tree|commit|tag) \d+\0", plain)
        yield path, "git" if is_git else "archive", plain


def _inflated(data: bytes, budget: _Budget) -> bytes | None:
    if data[:2] == b"\x1f\x8b":
        return budget.take(gzip.GzipFile(fileobj=io.BytesIO(data)))
    if data[:3] == b"BZh":
        return budget.take(bz2.BZ2File(io.BytesIO(data)))
    if data[:6] == b"\xfd7zXZ\0" or data[:5] == b"\x5d\0\0\x80\0":
        return budget.take(lzma.LZMAFile(io.BytesIO(data)))
    if data[:1] == b"\x78" and len(data) > 2 and int.from_bytes(data[:2], "big") % 31 == 0:
        try:
            return budget.count(zlib.decompressobj().decompress(data, budget.left_bytes + 1))
        except zlib.error:
            return None  # any text may begin with an x
    return None


def _base64_of(run: bytes) -> Iterator[bytes]:
    letters = _NOT_BASE64.sub(b"", run).translate(bytes.maketrans(b"-_", b"+/"))
    yield base64.b64decode(letters[: len(letters) // 4 * 4])
    if len(letters) % 4 > 1:
        yield base64.b64decode(letters + b"=" * (-len(letters) % 4))


def _decoded_texts(data: bytes) -> Iterator[tuple[str, bytes]]:
    """The text without JSON or string escapes, and without the tags and entities of HTML."""
    if b"\\n" in data or b'\\"' in data:
        found = data
        if data[:1] in b"[{":
            try:
                found = "\n".join(_strings(json.loads(data))).encode("utf-8", "replace")
            except ValueError:
                found = data  # lines of JSON, or only like it
        if found is data:
            found = data.replace(b"\\\\", b"\\").replace(b"\\n", b"\n").replace(b"\\t", b"\t")
            found = found.replace(b'\\"', b'"').replace(b"\\'", b"'")
        yield "escaped", found
    if b"</" in data or b"&lt;" in data or b"&quot;" in data or b"&#" in data:
        text = _TAG.sub("", data.decode("utf-8", "replace"))
        yield "markup", html.unescape(text).encode("utf-8", "replace")


def _strings(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        if value and all(isinstance(item, str) for item in value):
            yield "".join(item if item.endswith("\n") else f"{item}\n" for item in value)
        else:
            for item in value:
                yield from _strings(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _strings(item)


def _in_pack(path: str, data: bytes, budget: _Budget) -> _Found:
    if data[:4] == b"PACK":
        yield from ((f"{path}!/{number}", "git", found) for number, found in _pack_objects(data, budget))


def _pack_objects(data: bytes, budget: _Budget) -> Iterator[tuple[int, bytes]]:
    """The objects of a git pack; a delta is applied to the object that it names by offset.

    A delta to an object that is named by hash gives the literal bytes that it brings.
    """
    count = int.from_bytes(data[8:12], "big")
    place = 12
    known: dict[int, bytes] = {}
    for _ in range(count):
        start, byte = place, data[place]
        place += 1
        kind = byte >> 4 & 7
        while byte & 0x80:
            byte = data[place]
            place += 1
        source = b""
        if kind == 6:
            back, place = _offset(data, place)
            source = known.get(start - back, b"")
        elif kind == 7:
            place += 20
        stream = zlib.decompressobj()
        found = budget.count(stream.decompress(data[place:], budget.left_bytes + 1))
        place = len(data) - len(stream.unused_data)
        known[start] = _apply_delta(source, found) if kind in (6, 7) else found
        yield start, known[start]


def _offset(data: bytes, place: int) -> tuple[int, int]:
    byte = data[place]
    value, place = byte & 0x7F, place + 1
    while byte & 0x80:
        byte = data[place]
        value, place = ((value + 1) << 7) | (byte & 0x7F), place + 1
    return value, place


def _apply_delta(source: bytes, delta: bytes) -> bytes:
    place = 0
    for _ in range(2):  # the sizes of source and result
        while delta[place] & 0x80:
            place += 1
        place += 1
    parts: list[bytes] = []
    while place < len(delta):
        code = delta[place]
        place += 1
        if code & 0x80:
            numbers = []
            for bit in range(7):
                numbers.append(delta[place] if code >> bit & 1 else 0)
                place += code >> bit & 1
            begin = int.from_bytes(bytes(numbers[:4]), "little")
            size = int.from_bytes(bytes(numbers[4:]), "little") or 0x10000
            parts.append(source[begin : begin + size])
        else:
            parts.append(delta[place : place + code])
            place += code
    return b"".join(parts)


_READERS = (_members, _in_stream, _records, _in_pack, _in_texts, _in_digits)
