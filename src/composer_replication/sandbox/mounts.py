"""The view of the file system that ``bwrap`` builds, as its arguments."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from composer_replication.records import SandboxSpec
from composer_replication.sandbox.host_paths import (
    base_interpreter,
    is_below,
    resolve_links,
    system_folders,
)
from composer_replication.sandbox.memory_folder import PLACE
from composer_replication.sandbox.private_folders import Scratch

_ACCOUNT_FILES = ("passwd", "group", "hosts", "nsswitch.conf")
# Writable places of the jail that other paths may lie below: a folder of their own for each command.
_FRESH_PLACES = {Path("/tmp"): "tmp", Path("/var/tmp"): "tmp", Path("/dev/shm"): "shm"}
_FRESH_FOLDER = Path("<fresh>")


class MountPlan:
    """What a jail shows, and where.

    Real paths are bound and the symbolic links on the way are repeated, so each path
    keeps its name and each file is shown once. Deeper paths come later, masks last
    among equals. The root, ``/dev`` and every mask are read-only, so nothing can be
    written that is not in the tree or the scratch folder (and so counted).

    Args:
        spec: names what is shown.
        scratch: the sandbox's own folder.
        shared_memory_bytes: ``bwrap`` mounts a memory of this size as ``/dev/shm``; by default it is a folder.
    """

    def __init__(
        self, spec: SandboxSpec, scratch: Scratch, *, shared_memory_bytes: int | None = None
    ) -> None:
        self._shared_memory_bytes = shared_memory_bytes
        self._binds: dict[Path, tuple[str, Path]] = {}
        self._links: dict[Path, str] = {}
        tree = spec.tree.resolve()
        known = (system_folders(), base_interpreter())
        masked = {path.resolve() for group in known for path in group.masked}
        masked |= {path.resolve() for path in spec.masked}
        for path in (*(path for group in known for path in group.read_only), *spec.read_only):
            self._show(path, "--ro-bind", masked)
        self._show(spec.tree, "--bind", ())
        for path in scratch.writable:
            self._bind(path, path, "--bind")
        for place, name in _FRESH_PLACES.items():
            self._bind(_FRESH_FOLDER / name, place, "--bind")
        for name in _ACCOUNT_FILES:
            self._bind(scratch.root / name, Path("/etc") / name, "--ro-bind")
        for path in sorted(masked):
            if path.exists() and is_below(path, self._binds) and not is_below(tree, [path]):
                self._bind(scratch.empty_folder if path.is_dir() else scratch.empty_file, path, "--ro-bind")

    def arguments(self, fresh: Path, *, queues: str = "") -> list[str]:
        """Arguments for ``bwrap``.

        Args:
            fresh: has ``tmp`` and ``shm`` that no command has touched.
            queues: where the message queues of the jail are listed; by default nowhere.
        """
        listed = ["--mqueue", queues, "--remount-ro", queues] if queues else []
        proper = ["--remount-ro", "/dev", "--remount-ro", "/"]
        return [
            "--proc",
            "/proc",
            "--dev",
            "/dev",
            *listed,
            *self._in_order(fresh),
            *proper,
        ]

    def _show(self, path: Path, kind: str, masked: Iterable[Path]) -> None:
        real, links = resolve_links(path)
        self._links.update(links)
        if not is_below(real, masked):
            self._bind(real, real, kind)

    def _bind(self, source: Path, place: Path, kind: str) -> None:
        self._binds[place] = (kind, source)

    def _in_order(self, fresh: Path) -> list[str]:
        found: list[str] = []
        made: set[Path] = set()
        by_depth = sorted(self._binds, key=lambda place: len(place.parts))
        in_memory: list[Path] = []
        for link in sorted(self._links, key=lambda place: len(place.parts)):
            enclosing = self._enclosing(link)
            if self._is_memory(enclosing):
                in_memory.append(link)
            elif enclosing is None:
                found += [*self._parents(link, made), "--symlink", self._links[link], str(link)]
            elif enclosing in _FRESH_PLACES:  # an empty folder is mounted there: put the link into it
                _make_link(fresh / _FRESH_PLACES[enclosing] / link.relative_to(enclosing), self._links[link])
        for place in by_depth:
            kind, source = self._binds[place]
            if self._is_memory(place):
                bound = ["--size", str(self._shared_memory_bytes)]
                found += [*self._parents(place, made), *bound, "--tmpfs", str(place)]
            elif not self._is_shown_already(place):
                source = fresh / source.name if source.parent == _FRESH_FOLDER else source
                found += [*self._parents(place, made), kind, str(source), str(place)]
        for link in in_memory:
            found += [*self._parents(link, made), "--symlink", self._links[link], str(link)]
        return found

    def _is_memory(self, place: Path | None) -> bool:
        return place == PLACE and self._shared_memory_bytes is not None

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


def _make_link(place: Path, target: str) -> None:
    place.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    if not place.is_symlink():
        place.symlink_to(target)
