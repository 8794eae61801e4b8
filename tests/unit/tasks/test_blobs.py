"""Bytes go in and come out; what lies on disk is small, the same every time, and no bomb."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from composer_replication.errors import InputError
from composer_replication.tasks.store import TaskStore
from composer_replication.tasks.store_manifest import (
    compress,
    decompress,
    find_blob,
    read_content,
    write_blob,
)


@given(st.binary(max_size=5000))
def test_what_went_in_comes_out(data: bytes) -> None:
    assert decompress(compress(data)) == data
    assert zstandard.ZstdDecompressor().decompress(compress(data)) == data
    assert zstandard.frame_content_size(compress(data)) == len(data)


def test_the_name_is_the_hash_of_the_content(tmp_path: Path) -> None:
    data = b"x = 1\n" * 1000
    digest = write_blob(tmp_path, data)
    assert digest == hashlib.sha256(data).hexdigest()
    path = tmp_path / digest[:2] / f"{digest}.zst"
    assert path.stat().st_size < 100
    assert find_blob(tmp_path, digest) == path
    assert read_content(path) == data
    assert find_blob(tmp_path, "0" * 64) is None


def test_what_is_compressed_already_is_kept_as_it_is(tmp_path: Path) -> None:
    digest = write_blob(tmp_path, b"a wheel", is_packed=True)
    assert (tmp_path / digest[:2] / digest).read_bytes() == b"a wheel"
    assert write_blob(tmp_path, b"a wheel") == digest
    assert len(list(tmp_path.rglob("*.zst"))) == 0


def test_a_bomb_is_refused_before_it_unpacks() -> None:
    bomb = compress(b"\0" * 2_000_000)
    assert len(bomb) < 1000
    assert len(decompress(bomb, max_bytes=2_000_000)) == 2_000_000
    with pytest.raises(ValueError, match="unpacks to 2000000 bytes, more than 1999999"):
        decompress(bomb, max_bytes=1_999_999)


def test_a_frame_that_hides_its_size_is_refused() -> None:
    silent = zstandard.ZstdCompressor(write_content_size=False).compress(b"\0" * 2_000_000)
    with pytest.raises(ValueError, match="does not say how large"):
        decompress(silent)


@pytest.mark.parametrize(
    "data",
    [b"", b"no zstd", compress(b"x" * 100)[:-3], compress(b"x") + b"more", compress(b"x") + compress(b"y")],
)
def test_what_is_no_whole_frame_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"zstd|does not say"):
        decompress(data)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (b"no zstd", "it is not zstd data"),
        (compress(b"something else"), "its sha256 is"),
        (zstandard.ZstdCompressor().compress(b"\0" * (65 * 1024**2)), "unpacks to 68157440 bytes"),
    ],
)
def test_a_store_names_the_damaged_blob(tmp_path: Path, damage: bytes, said: str) -> None:
    store = TaskStore.create(tmp_path / "store")
    digest = store.put_blob(b"x = 1\n")
    min((store.root / "objects").rglob("*.zst")).write_bytes(damage)
    with pytest.raises(InputError, match="CR0411") as caught:
        store.blob(digest)
    assert said in caught.value.message
    assert digest in caught.value.where
