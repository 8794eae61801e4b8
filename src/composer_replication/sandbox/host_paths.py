"""Which files of the host a jail may see, which parts of those it must not, and the view that ``bwrap`` builds of them.

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

from composer_replication.records import SandboxSpec
from composer_replication.sandbox.folders import SHARED_MEMORY
from composer_replication.sandbox.process_folder import Scratch

# pip (debian_version) and Python's mimetypes read some of these, and fail where the file is there but closed.
_ETC_FILES = (
    "/etc/alternatives", "/etc/debian_version", "/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d",
    "/etc/localtime", "/etc/lsb-release", "/etc/mime.types", "/etc/os-release", "/etc/protocols", "/etc/services",
    "/etc/timezone",
)  # fmt: skip

_PROGRAM_FOLDERS = ("/usr/bin", "/usr/sbin", "/bin", "/sbin")
_LIBRARY_FOLDERS = ("/usr/lib", "/usr/lib32", "/usr/lib64", "/lib", "/lib32", "/lib64")
# What programs need of a library folder that holds applications as well.
_LIBRARY_CHILDREN = (
    "*-linux-*", "locale", "gcc", "git-core", "terminfo", "perl", "perl5", "ld-*", "libc.*", "os-release",
)  # fmt: skip
_SHARED_DATA = (
    "/usr/share/zoneinfo", "/usr/share/locale", "/usr/share/i18n", "/usr/share/terminfo", "/usr/share/git-core",
    "/usr/share/mime", "/usr/share/perl", "/usr/share/perl5", "/usr/libexec/git-core",
)  # fmt: skip
# Below a library folder: other people's packages, and the wheels of pip with all that they vendor.
_PACKAGE_PATTERNS = (
    "python*/site-packages",
    "python*/dist-packages",
    "python*/ensurepip/_bundled",
    "pypy*/site-packages",
)
_ACCOUNT_FILES = ("passwd", "group", "hosts", "nsswitch.conf")
# Writable places of the jail that other paths may lie below: a folder of their own for each command.
_FRESH_PLACES = {Path("/tmp"): "tmp", Path("/var/tmp"): "tmp", Path("/dev/shm"): "shm"}
_FRESH_FOLDER = Path("<fresh>")


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
    shown = [Path(name) for name in (*_PROGRAM_FOLDERS, *_SHARED_DATA, *_ETC_FILES) if os.path.exists(name)]
    masked: list[Path] = []
    for folder in map(Path, _LIBRARY_FOLDERS):
        if any(folder.glob("libc.so*")) or any(folder.glob("libc.musl*")):
            shown.append(folder)
            masked += _matching(folder, _PACKAGE_PATTERNS)
        else:
            shown += _matching(folder, _LIBRARY_CHILDREN)
    return HostPaths(tuple(dict.fromkeys(shown)), tuple(dict.fromkeys(masked)))


@cache
def base_interpreter(prefix: str = sys.base_prefix) -> HostPaths:
    """The interpreter below this process's virtual environment, with packages masked.

    A prefix of its own (pyenv, conda, uv) shows its ``bin`` and ``lib``; ``/usr`` shows only this version's
    standard library, for the rest is the system's. Neighbours of the prefix are not shown.
    """
    root = Path(prefix)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    libraries = [root / name for name in ("lib", "lib32", "lib64") if (root / name).is_dir()]
    masked = [path for folder in libraries for path in _matching(folder, _PACKAGE_PATTERNS)]
    if root.resolve() == Path("/usr"):
        shown = [folder / version for folder in libraries if (folder / version).is_dir()]
    else:
        shown = [path for path in (root / "bin", *libraries) if path.is_dir()]
    return HostPaths(tuple(dict.fromkeys(shown)), tuple(dict.fromkeys(masked)))


def paths_of(spec: SandboxSpec) -> HostPaths:
    """All that a jail of ``spec`` shows, and what it must not, of system and interpreter too: that by its real paths."""
    groups = (system_folders(), base_interpreter(), HostPaths(spec.read_only, spec.masked))
    masked = {path.resolve() for group in groups for path in group.masked}
    return HostPaths(tuple(path for group in groups for path in group.read_only), tuple(sorted(masked)))


def _matching(folder: Path, patterns: Iterable[str]) -> list[Path]:
    return sorted({path for pattern in patterns for path in folder.glob(pattern)})


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


class MountPlan:
    """What a jail shows, and where.

    Real paths are bound and the symbolic links on the way are repeated, so each path
    keeps its name and each file is shown once. Deeper paths come later, masks last
    among equals. The root, ``/dev`` and every mask are read-only, so nothing can be
    written that is not in the tree or the scratch folder (and so counted). With
    ``shared_memory_bytes`` ``/dev/shm`` is a memory of that size; otherwise it is a folder.
    """

    def __init__(
        self, spec: SandboxSpec, scratch: Scratch, *, shared_memory_bytes: int | None = None
    ) -> None:
        self._shared_memory_bytes = shared_memory_bytes
        self._binds: dict[Path, tuple[str, Path]] = {}
        self._links: dict[Path, str] = {}
        tree = spec.tree.resolve()
        known = paths_of(spec)
        for path in known.read_only:
            self._show(path, "--ro-bind", known.masked)
        self._show(spec.tree, "--bind", ())
        for path in scratch.writable:
            self._binds[path] = ("--bind", path)
        for place, name in _FRESH_PLACES.items():
            self._binds[place] = ("--bind", _FRESH_FOLDER / name)
        for name in _ACCOUNT_FILES:
            self._binds[Path("/etc") / name] = ("--ro-bind", scratch.root / name)
        for path in known.masked:
            if path.exists() and is_below(path, self._binds) and not is_below(tree, [path]):
                nothing = scratch.empty_folder if path.is_dir() else scratch.empty_file
                self._binds[path] = ("--ro-bind", nothing)

    def arguments(self, fresh: Path, *, queues: str = "") -> list[str]:
        """Arguments for ``bwrap``: ``fresh`` has ``tmp`` and ``shm`` that no command has touched, ``queues`` shows those of messages."""
        listed = ["--mqueue", queues, "--remount-ro", queues] if queues else []
        proper = ["--remount-ro", "/dev", "--remount-ro", "/"]
        return ["--proc", "/proc", "--dev", "/dev", *listed, *self._in_order(fresh), *proper]

    def _show(self, path: Path, kind: str, masked: Iterable[Path]) -> None:
        real, links = resolve_links(path)
        self._links.update(links)
        if not is_below(real, masked):
            self._binds[real] = (kind, real)

    def _in_order(self, fresh: Path) -> list[str]:
        found: list[str] = []
        made: set[Path] = set()
        if self._shared_memory_bytes is not None:  # before what lies in it
            size = str(self._shared_memory_bytes)
            found += [*self._parents(SHARED_MEMORY, made), "--size", size, "--tmpfs", str(SHARED_MEMORY)]
        for link in sorted(self._links, key=lambda place: len(place.parts)):
            enclosing = self._enclosing(link)
            if enclosing is None or self._is_memory(enclosing):
                found += [*self._parents(link, made), "--symlink", self._links[link], str(link)]
            elif enclosing in _FRESH_PLACES:  # an empty folder is mounted there: put the link into it
                inside = fresh / _FRESH_PLACES[enclosing] / link.relative_to(enclosing)
                inside.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
                if not inside.is_symlink():
                    inside.symlink_to(self._links[link])
        for place in sorted(self._binds, key=lambda place: len(place.parts)):
            kind, source = self._binds[place]
            if not self._is_memory(place) and not self._is_shown_already(place):
                source = fresh / source.name if source.parent == _FRESH_FOLDER else source
                found += [*self._parents(place, made), kind, str(source), str(place)]
        return found

    def _is_memory(self, place: Path) -> bool:
        return place == SHARED_MEMORY and self._shared_memory_bytes is not None

    def _parents(self, place: Path, made: set[Path]) -> list[str]:
        """Make missing parents first: as root, bwrap would close them to other users."""
        missing = [path for path in reversed(place.parents) if path not in made and len(path.parts) > 1]
        made.update(missing)
        found: list[str] = []
        for path in missing:
            enclosing = self._enclosing(path)
            if path not in self._binds and (enclosing is None or self._binds[enclosing][0] == "--bind"):
                found += ["--dir", str(path)]
        return found

    def _enclosing(self, place: Path) -> Path | None:
        return next((parent for parent in place.parents if parent in self._binds), None)

    def _is_shown_already(self, place: Path) -> bool:
        enclosing = self._enclosing(place)
        return enclosing is not None and all(
            self._binds[path] == ("--ro-bind", path) for path in (place, enclosing)
        )
