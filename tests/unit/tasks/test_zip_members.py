"""Members of a foreign zip: each is read within the size that its header claims, or refused in one sentence."""

from __future__ import annotations

import io
import os
import struct
import tracemalloc
import zipfile
import zlib
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from composer_replication.errors import InputError
from composer_replication.tasks.intake.archives import read_archive

MIB = 1024**2
LOCAL = struct.Struct("<4s5H3L2H")
CENTRAL = struct.Struct("<4s6H3L5H2L")


def everything(*_: frozenset[str]) -> object:
    return lambda path: True


def read(path: Path) -> dict[str, bytes]:
    return read_archive(path, everything)  # type: ignore[arg-type]


def sentence(path: Path) -> str:
    with pytest.raises(InputError) as caught:
        read(path)
    assert caught.value.code == "CR0402"
    return caught.value.message


def zip_bytes(method: int, data: bytes = b"x = 1\n" * 200) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", method) as archive:
        archive.writestr("thing/a.py", data)
    return out.getvalue()


def patched(data: bytes, *, flags: int = 0, method: int | None = None, size: int | None = None) -> bytes:
    """The one member's two headers with other flags, method or size."""
    made = bytearray(data)
    start = data.rindex(b"PK\x01\x02")
    for layout, at, flag_field in ((LOCAL, 0, 2), (CENTRAL, start, 3)):
        fields = list(layout.unpack_from(made, at))
        fields[flag_field] |= flags
        fields[flag_field + 1] = fields[flag_field + 1] if method is None else method
        fields[flag_field + 6] = fields[flag_field + 6] if size is None else size
        layout.pack_into(made, at, *fields)
    return bytes(made)


def bomb(method: int, num_mib: int) -> bytes:
    """Many zeros whose headers claim a hundred bytes; made piece by piece."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", method) as archive, archive.open("thing/a.py", "w") as member:
        for _ in range(num_mib):
            member.write(bytes(MIB))
    return patched(out.getvalue(), size=100)


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_stored_and_deflated_members_come_whole(tmp_path: Path, method: int) -> None:
    data = os.urandom(3 * MIB) + b"x" * 500  # longer than what is read at a time
    (tmp_path / "a.zip").write_bytes(zip_bytes(method, data))
    assert read(tmp_path / "a.zip") == {"a.py": data}


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (patched(zip_bytes(zipfile.ZIP_DEFLATED), flags=1), "is encrypted"),
        (patched(zip_bytes(zipfile.ZIP_DEFLATED), method=9), "member 'thing/a.py' is neither stored nor deflated"),
        (zip_bytes(zipfile.ZIP_BZIP2), "neither stored nor deflated"),
        (patched(zip_bytes(zipfile.ZIP_DEFLATED), flags=0x20), "compressed patched data"),
        (patched(zip_bytes(zipfile.ZIP_DEFLATED), flags=0x40), "strong encryption"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_one_sentence(tmp_path: Path, data: bytes, words: str) -> None:
    (tmp_path / "a.zip").write_bytes(data)
    assert words in sentence(tmp_path / "a.zip")


def test_what_nobody_wants_may_be_packed_as_it_likes(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("thing/a.py", "x = 1\n")
        archive.writestr(zipfile.ZipInfo("thing/b.bin"), b"b" * 99, zipfile.ZIP_BZIP2)
    found = read_archive(tmp_path / "a.zip", lambda _names, _links: lambda path: path.suffix == ".py")
    assert found == {"a.py": b"x = 1\n"}


@pytest.mark.parametrize(
    ("method", "words"),
    [(zipfile.ZIP_DEFLATED, "CRC"), (zipfile.ZIP_BZIP2, "neither"), (zipfile.ZIP_LZMA, "neither")],
)
def test_a_size_that_is_a_lie_takes_no_memory(tmp_path: Path, method: int, words: str) -> None:
    path = tmp_path / "a.zip"
    path.write_bytes(bomb(method, 32))
    assert path.stat().st_size < MIB
    tracemalloc.start()
    try:
        assert words in sentence(path)
        assert tracemalloc.get_traced_memory()[1] < 4 * MIB
    finally:
        tracemalloc.stop()


@given(st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), min_size=1, max_size=4))
def test_a_zip_with_changed_bytes_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, changes: list[tuple[int, int]]
) -> None:
    whole = zip_bytes(zipfile.ZIP_DEFLATED, zlib.compress(bytes(range(256)) * 4))
    made = bytearray(whole)
    for place, value in changes:
        made[place % len(made)] = value
    path = tmp_path_factory.mktemp("zip") / "a.zip"
    path.write_bytes(made)
    with suppress(InputError):  # and nothing else
        assert all(isinstance(data, bytes) for data in read(path).values())
