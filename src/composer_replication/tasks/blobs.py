"""How a store keeps bytes: compressed by zstd in ``<sha256>.zst``, or as they are in ``<sha256>``.

The name is the hash of the content, not of what lies on disk, so a library that compresses
otherwise changes no store's fingerprint.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import zstandard

from composer_replication.tasks.intake.archives import MAX_MEMBER_BYTES
from composer_replication.tasks.intake.cache import put_file, sha256_of

SUFFIX = ".zst"
LEVEL = 12
"""Python sources: level 19 takes seven times as long for three per cent less."""
MAX_BYTES = MAX_MEMBER_BYTES
"""What a file of a repository may have. A small frame that claims more is a decompression bomb."""


def compress(data: bytes) -> bytes:
    """One zstd frame that says its size; no dictionary, no checksum, one thread: equal bytes give equal bytes."""
    compressor = zstandard.ZstdCompressor(
        level=LEVEL, write_checksum=False, write_content_size=True, write_dict_id=False, threads=0
    )
    return compressor.compress(data)


def decompress(data: bytes, *, max_bytes: int = MAX_BYTES) -> bytes:
    """What was compressed.

    Raises:
        ValueError: not one whole zstd frame that says its size, or more than ``max_bytes``.
    """
    try:
        size = zstandard.frame_content_size(data)
        if size < 0:
            raise ValueError("it does not say how large it is")
        if size > max_bytes:
            raise ValueError(f"it unpacks to {size} bytes, more than {max_bytes}")
        return zstandard.ZstdDecompressor().decompress(data, max_output_size=size, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise ValueError(f"it is not zstd data ({error})") from error


def find_blob(folder: Path, digest: str) -> Path | None:
    """The file that holds a content, whichever way it is kept."""
    plain = folder / digest[:2] / digest
    return next((path for path in (plain.with_name(digest + SUFFIX), plain) if path.is_file()), None)


def write_blob(folder: Path, data: bytes, *, is_packed: bool = False) -> str:
    """Keep some bytes once; their sha256.

    Args:
        folder: ``objects`` of a store.
        data: the content.
        is_packed: it is compressed already (a wheel) and is kept as it is; so is what is
            larger than ``MAX_BYTES``.
    """
    digest = sha256_of(data)
    is_packed = is_packed or len(data) > MAX_BYTES
    if find_blob(folder, digest) is None:
        path = folder / digest[:2] / (digest if is_packed else digest + SUFFIX)
        put_file(path, data if is_packed else compress(data))
    return digest


def read_blob(path: Path) -> bytes:
    """The content of a file that ``find_blob`` found.

    Raises:
        OSError: it cannot be read.
        ValueError: what it holds cannot be unpacked.
    """
    data = path.read_bytes()
    return decompress(data) if path.suffix == SUFFIX else data


def remove_blob(folder: Path, digest: str) -> None:
    """Remove a content, whichever way it is kept; nothing happens where it is absent."""
    path = find_blob(folder, digest)
    if path is not None:
        path.unlink()


def sweep_blobs(folder: Path, named: Collection[str]) -> None:
    """Remove every content but the ``named`` ones, and folders that are empty then."""
    for path in [path for path in folder.glob("??/*") if path.is_file()]:
        if path.name.removesuffix(SUFFIX) not in named:
            path.unlink()
    for parent in [path for path in folder.glob("??") if path.is_dir() and not any(path.iterdir())]:
        parent.rmdir()
