"""How a store keeps bytes: compressed by zstd in ``NAME.zst``, or as they are in ``NAME``.

Blobs are named by the hash of their content, and the manifest has the hashes of the records'
content, not of what lies on disk: a library that compresses otherwise changes no store's fingerprint.
"""

from __future__ import annotations

import errno
from collections.abc import Collection
from pathlib import Path

import zstandard

from composer_replication.run_folder import write_atomic
from composer_replication.tasks.intake.archives import MAX_MEMBER_BYTES
from composer_replication.tasks.intake.cache import put_file, sha256_of

SUFFIX = ".zst"
LEVEL, LEVEL_OF_LARGE = 19, 12
LARGE_BYTES = 1024**2
"""Level 19 takes a tenth less room and ten times as long as level 12, so it is for the many small files."""
MAX_BYTES = MAX_MEMBER_BYTES
"""What a file of a repository may have. A small frame that claims more is a decompression bomb."""


def compress(data: bytes) -> bytes:
    """One zstd frame that says its size; no dictionary, no checksum, one thread: equal bytes give equal bytes."""
    level = LEVEL if len(data) <= LARGE_BYTES else LEVEL_OF_LARGE
    compressor = zstandard.ZstdCompressor(
        level=level, write_checksum=False, write_content_size=True, write_dict_id=False, threads=0
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


def packed_path(plain: Path) -> Path:
    """Where a content lies compressed."""
    return plain.with_name(plain.name + SUFFIX)


def find_file(plain: Path) -> Path | None:
    """The file that holds a content, whichever way it is kept."""
    return next((path for path in (packed_path(plain), plain) if path.is_file()), None)


def kept_path(plain: Path) -> Path:
    """The file that holds a content, or would."""
    return find_file(plain) or packed_path(plain)


def find_blob(folder: Path, digest: str) -> Path | None:
    """The file that holds the content with this sha256."""
    return find_file(folder / digest[:2] / digest)


def write_file(plain: Path, data: bytes) -> None:
    """Keep a content under a name, synced, in place of what was there; compressed up to ``MAX_BYTES``."""
    if len(data) > MAX_BYTES:
        write_atomic(plain, data)
        packed_path(plain).unlink(missing_ok=True)
    else:
        write_atomic(packed_path(plain), compress(data))
        plain.unlink(missing_ok=True)


def drop_file(plain: Path) -> None:
    """Forget the content under a name, whichever way it is kept."""
    packed_path(plain).unlink(missing_ok=True)
    plain.unlink(missing_ok=True)


def write_blob(folder: Path, data: bytes, *, is_packed: bool = False) -> str:
    """Keep some bytes once; their sha256.

    What ``is_packed`` is compressed already (a wheel) and kept as it is; so is what is larger than ``MAX_BYTES``.
    """
    digest = sha256_of(data)
    is_packed = is_packed or len(data) > MAX_BYTES
    if find_blob(folder, digest) is None:
        path = folder / digest[:2] / (digest if is_packed else digest + SUFFIX)
        put_file(path, data if is_packed else compress(data))
    return digest


def read_file(path: Path) -> bytes:
    """The content of a file that ``find_file`` found.

    Raises:
        OSError: it cannot be read.
        ValueError: what it holds cannot be unpacked.
    """
    if not path.is_file():  # reading a pipe or a device would not end
        raise FileNotFoundError(errno.ENOENT, "it is missing or no regular file", str(path))
    data = path.read_bytes()
    return decompress(data) if path.suffix == SUFFIX else data


def sweep_blobs(folder: Path, named: Collection[str]) -> None:
    """Remove every content but the ``named`` ones, and folders that are empty then."""
    for path in [path for path in folder.glob("??/*") if path.is_file()]:
        if path.name.removesuffix(SUFFIX) not in named:
            path.unlink()
    for parent in [path for path in folder.glob("??") if path.is_dir() and not any(path.iterdir())]:
        parent.rmdir()
