"""Small projects on disk, in git and in archives, as a test writes them down."""

from __future__ import annotations

import io
import subprocess
import tarfile
from collections.abc import Mapping
from pathlib import Path

GIT_AUTHOR = ("-c", "user.name=A", "-c", "user.email=a@example.org")


def write_tree(root: Path, files: Mapping[str, str | bytes]) -> Path:
    for name, data in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data.encode() if isinstance(data, str) else data)
    return root


def flip_a_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a store by its name, but for the lock that a reader leaves."""
    found = (path for path in folder.rglob("*") if path.is_file() and path.name != "LOCK")
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in found}


def commit_all(root: Path) -> None:
    """A repository with all of a folder in one commit on ``main``."""
    for words in (["init", "-q", "-b", "main"], ["add", "-A"], [*GIT_AUTHOR, "commit", "-q", "-m", "x"]):
        subprocess.run(["git", "-C", str(root), *words], check=True, capture_output=True)


def tar_bytes(files: Mapping[str, str | bytes], top: str = "", mode: str = "w:gz") -> bytes:
    """An archive whose names begin with ``top``."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode=mode) as archive:  # type: ignore[call-overload]
        for name, data in files.items():
            content = data.encode() if isinstance(data, str) else data
            info = tarfile.TarInfo(top + name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return stream.getvalue()
