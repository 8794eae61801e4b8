"""The manifest of a store: which records and files belong to it, under one fingerprint.

It is written at the end of a build. Meanwhile, and after a build that was cut off, a file ``unsettled`` lies beside it, and the
records are those that are in the folders: each is written whole or not at all, so what a build writes grows with its tasks and
not with their square.

Records are kept compressed by zstd in ``NAME.zst``; blobs, which are named by the hash of their content, are so or as they
are. The manifest has the hashes of the records' content, not of what lies on disk: a library that compresses otherwise
changes no store's fingerprint.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import zstandard
from pydantic import BeforeValidator, TypeAdapter

from composer_replication.errors import InputError
from composer_replication.run_folder import SCHEMA_VERSION, write_atomic
from composer_replication.sandbox import choose_backend, name_of
from composer_replication.tasks.intake.archives import MAX_MEMBER_BYTES
from composer_replication.tasks.intake.cache import sha256_of

# --- Bytes in files, compressed or as they are.

SUFFIX = ".zst"
LEVEL = 12
"""Level 19 takes about a hundredth less room and five times as long."""
MAX_BYTES = MAX_MEMBER_BYTES
"""What a file of a repository may have. A small frame that claims more is a decompression bomb; what is larger is kept as it is."""


def compress(data: bytes) -> bytes:
    """One zstd frame that says its size; no dictionary, no checksum, one thread: equal bytes give equal bytes."""
    return zstandard.ZstdCompressor(level=LEVEL).compress(data)


def decompress(data: bytes, *, max_bytes: int = MAX_BYTES) -> bytes:
    """What was compressed; ValueError where it is not one whole zstd frame that says its size, or of more than ``max_bytes``."""
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


def write_file(plain: Path, data: bytes) -> None:
    """Keep a content under a name, compressed and synced, in place of what was there."""
    write_atomic(packed_path(plain), compress(data))


def find_blob(folder: Path, digest: str) -> Path | None:
    """The file that holds the content with this sha256."""
    plain = folder / digest[:2] / digest
    return next((path for path in (packed_path(plain), plain) if path.is_file()), None)


def read_content(path: Path) -> bytes:
    """The content of a file of the store, unpacked; InputError where it is missing or not what a store writes (CR0411)."""
    if not path.is_file():  # reading a pipe or a device would not end
        raise damaged(path, "it is missing or no regular file" if path.exists() else "it is missing")
    try:
        data = path.read_bytes()
        return decompress(data) if path.suffix == SUFFIX else data
    except (OSError, ValueError) as error:
        raise damaged(path, str(error).rstrip(".")) from error


# --- The manifest of a store: which records belong to it, under one fingerprint.

STORE_VERSION = 7
"""Raised when records or files are laid out otherwise."""
READABLE_VERSIONS = (5, 6, STORE_VERSION)
"""Version 5 told which test calls what, version 6 three parts of a sandbox. A store of any other version is built again."""
NAME = "manifest.json"
FOLDERS = ("instructions", "locks", "repositories", "tasks", "secrets")
UNSETTLED = "unsettled"


_SANDBOX = "{backend} (Python {python}, {platform})"
"""What a test may notice of a sandbox. Earlier stores keep the three apart."""


@cache
def sandbox_in_force(backend: str | None) -> str:
    """The sandbox that a backend gives here; None for the best of this machine."""
    name, system = name_of(choose_backend(backend)), f"{platform.system()} {platform.machine()}"
    return _SANDBOX.format(backend=name, python=platform.python_version(), platform=system)


Sandbox = Annotated[str, BeforeValidator(lambda one: one if isinstance(one, str) else _SANDBOX.format(**one))]


@dataclass(slots=True)
class Manifest:
    """The sha256 of every record, and the sandboxes in which its builds judged (``proved_by``)."""

    records: dict[str, str]
    proved_by: tuple[Sandbox, ...] = ()


_FORM = TypeAdapter(Manifest)
_BUILD = "composer-rl tasks build SOURCE --out {}"


def read_manifest(folder: Path) -> Manifest:
    """What the manifest of a store says; while records are written, those that lie in its folders.

    InputError where there is none, or it is damaged or of another version (CR0411).
    """
    path = folder / NAME
    if not path.is_file():
        problem, fix = "this is not a task store: it has no manifest.json.", _BUILD.format("DIR")
        raise InputError("CR0411", problem, where=str(folder), fix=fix)
    try:
        value = json.loads(path.read_text())
        # Before anything else: a newer version may hold whatever it likes.
        if (version := value.get("store_version", 1)) not in READABLE_VERSIONS:
            known = ", ".join(map(str, READABLE_VERSIONS))
            problem = f"the version of the task store is {version}, this program reads {known}."
            again = f"build it again into a new folder: {_BUILD.format('NEW_DIR')}"
            fix = f"pip install --upgrade composer-replication where it is newer, or {again}"
            raise InputError("CR0411", problem, where=str(path), fix=fix)
        manifest = _FORM.validate_python(value)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise damaged(path, "it cannot be read") from error
    if value.get("fingerprint") != fingerprint_of(manifest.records):
        raise damaged(path, "its fingerprint does not cover its records")
    if not is_settled(folder):
        manifest.records = _records_in(folder)
    return manifest


def _records_in(folder: Path) -> dict[str, str]:
    """The sha256 of every record that lies in the folders of a store."""
    paths = [path for kind in FOLDERS for path in (folder / kind).glob(f"*.json{SUFFIX}")]
    there = (path for path in paths if path.exists())  # a process that builds takes some out meanwhile
    return {f"{path.parent.name}/{path.stem}": sha256_of(read_content(path)) for path in there}


def is_settled(folder: Path) -> bool:
    """Whether the last build came to its end."""
    return not (folder / UNSETTLED).exists()


def unsettle(folder: Path) -> None:
    """Note that records are about to change: the manifest does not name every change then."""
    if is_settled(folder):
        write_atomic(folder / UNSETTLED, "")


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Replace the manifest, whole or not at all; the fingerprint covers the records alone."""
    value: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "store_version": STORE_VERSION,
        "fingerprint": fingerprint_of(manifest.records),
        **_FORM.dump_python(manifest, exclude_defaults=True),
    }
    write_atomic(folder / NAME, json.dumps(value, indent=1, sort_keys=True) + "\n")


def fingerprint_of(records: Mapping[str, str]) -> str:
    """sha256 over the names and hashes of all records."""
    return sha256_of(json.dumps(sorted(records.items())).encode())


def damaged(path: Path, detail: str) -> InputError:
    """The error for a store that cannot be trusted."""
    return InputError(
        "CR0411",
        f"the task store is damaged: {detail}.",
        where=str(path),
        fix=f"copy it again, or build it into a new folder: {_BUILD.format('NEW_DIR')} (in the cache: composer-rl cache prune)",
    )
