"""Which files of the host a jail may see, and which parts of those it must not.

Everything is an allow-list: shared libraries and programs of the system, the running
base interpreter with its standard library, a handful of harmless files of ``/etc``.
Installed packages are never among them: a copy of a package there would give a
deleted feature back.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ETC_FILES = (
    "/etc/alternatives",
    "/etc/debian_version",  # pip reads the system's name, and fails where the file is there but closed
    "/etc/ld.so.cache",
    "/etc/ld.so.conf",
    "/etc/ld.so.conf.d",
    "/etc/localtime",
    "/etc/lsb-release",
    "/etc/mime.types",  # so does Python's mimetypes
    "/etc/os-release",
    "/etc/protocols",
    "/etc/services",
    "/etc/timezone",
)
"""Files of ``/etc`` that both backends show as they are."""

_PROGRAM_FOLDERS = ("/usr/bin", "/usr/sbin", "/bin", "/sbin")
_LIBRARY_FOLDERS = ("/usr/lib", "/usr/lib32", "/usr/lib64", "/lib", "/lib32", "/lib64")
# What programs need of a library folder that holds applications as well.
_LIBRARY_CHILDREN = (
    "*-linux-*", "locale", "gcc", "git-core", "terminfo", "perl", "perl5", "ld-*", "libc.*", "os-release",
)  # fmt: skip
_SHARED_DATA = (
    "/usr/share/zoneinfo",
    "/usr/share/locale",
    "/usr/share/i18n",
    "/usr/share/terminfo",
    "/usr/share/git-core",
    "/usr/share/mime",
    "/usr/share/perl",
    "/usr/share/perl5",
    "/usr/libexec/git-core",
)
# Below a library folder: other people's packages, and the wheels of pip with all that they vendor.
_PACKAGE_PATTERNS = (
    "python*/site-packages",
    "python*/dist-packages",
    "python*/ensurepip/_bundled",
    "pypy*/site-packages",
)


@dataclass(frozen=True, slots=True)
class HostPaths:
    """``read_only`` may be read and executed, except what lies below a path of ``masked``."""

    read_only: tuple[Path, ...]
    masked: tuple[Path, ...]


@cache
def system_folders() -> HostPaths:
    """Programs, shared libraries and public data of the system, without any Python packages.

    A library folder that keeps the C library itself (Arch, Alpine, ``lib64`` of Fedora)
    is shown whole; elsewhere (Debian) only its shared libraries are, for it holds
    applications too, which may bundle packages.
    """
    shown = [Path(name) for name in (*_PROGRAM_FOLDERS, *_SHARED_DATA, *ETC_FILES) if os.path.exists(name)]
    masked: list[Path] = []
    for name in _LIBRARY_FOLDERS:
        folder = Path(name)
        if not folder.is_dir():
            continue
        if any(folder.glob("libc.so*")) or any(folder.glob("libc.musl*")):
            shown.append(folder)
            masked += _packages_below(folder)
        else:
            shown += _matching(folder, _LIBRARY_CHILDREN)
    return HostPaths(tuple(_without_repeats(shown)), tuple(_without_repeats(masked)))


def base_interpreter(prefix: str | None = None) -> HostPaths:
    """The interpreter below this process's virtual environment, with packages masked.

    Args:
        prefix: by default ``sys.base_prefix``. A prefix of its own (pyenv, conda, uv)
            shows its ``bin`` and ``lib``; ``/usr`` shows only this version's standard
            library, for the rest is the system's. Neighbours of the prefix are not shown.
    """
    return _interpreter_at(sys.base_prefix if prefix is None else prefix)


@cache
def _interpreter_at(prefix: str) -> HostPaths:
    root = Path(prefix)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    libraries = [root / name for name in ("lib", "lib32", "lib64") if (root / name).is_dir()]
    masked = [path for folder in libraries for path in _packages_below(folder)]
    if root.resolve() == Path("/usr"):
        shown = [folder / version for folder in libraries if (folder / version).is_dir()]
    else:
        shown = [path for path in (root / "bin", *libraries) if path.is_dir()]
    return HostPaths(tuple(_without_repeats(shown)), tuple(_without_repeats(masked)))


def _packages_below(folder: Path) -> list[Path]:
    return _matching(folder, _PACKAGE_PATTERNS)


def _matching(folder: Path, patterns: Iterable[str]) -> list[Path]:
    return sorted({path for pattern in patterns for path in folder.glob(pattern)})


def _without_repeats(paths: Iterable[Path]) -> list[Path]:
    return list(dict.fromkeys(paths))


def resolve_links(path: Path) -> tuple[Path, tuple[tuple[Path, str], ...]]:
    """The real path, and every symbolic link on the way to it as ``(link, target)``.

    A jail that binds real paths only and repeats the links shows each file once, so
    that a mask over a real path cannot be walked around.
    """
    links: list[tuple[Path, str]] = []
    done = Path("/")
    todo = list(path.absolute().parts[1:])
    while todo:
        part = todo.pop(0)
        if part == "..":
            done = done.parent
            continue
        step = done / part
        if not step.is_symlink():
            done = step
            continue
        target = os.readlink(step)
        if len(links) >= 40:  # as many as the kernel follows
            break
        links.append((step, target))
        pieces = Path(target).parts
        if target.startswith("/"):
            done, pieces = Path("/"), pieces[1:]
        todo = [*pieces, *todo]
    return done, tuple(links)


def is_below(path: Path, folders: Iterable[Path]) -> bool:
    """Is ``path`` one of the folders, or below one? Pure text: give resolved paths."""
    return any(path == folder or folder in path.parents for folder in folders)


def base_python() -> Path:
    """The program of the base interpreter, which every jail can start."""
    folder = Path(sys.base_prefix) / "bin"
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    found = [folder / name for name in (f"python{version}", "python3") if (folder / name).exists()]
    return found[0] if found else Path("python3")
