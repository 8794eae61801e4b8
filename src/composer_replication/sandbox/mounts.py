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
from composer_replication.sandbox.private_folders import Scratch

_ACCOUNT_FILES = ("passwd", "group", "hosts", "nsswitch.conf")


def mount_arguments(spec: SandboxSpec, scratch: Scratch) -> list[str]:
    """Arguments for ``bwrap``: an empty root, then only what the spec and the system show.

    Real paths are bound and the symbolic links on the way are repeated, so each path
    keeps its name and each file is shown once. Deeper paths come later, masks last
    among equals. The root, ``/dev`` and every mask are read-only, so nothing can be
    written that is not in the tree or the scratch folder (and so counted).
    """
    plan = _Plan()
    tree = spec.tree.resolve()
    known = (system_folders(), base_interpreter())
    masked = {path.resolve() for group in known for path in group.masked}
    masked |= {path.resolve() for path in spec.masked}
    for path in (*known[0].read_only, *known[1].read_only, *spec.read_only):
        plan.show(path, "--ro-bind", masked)
    plan.show(spec.tree, "--bind", ())
    for path in scratch.writable:
        plan.bind(path, path, "--bind")
    for place in ("/tmp", "/var/tmp"):
        plan.bind(scratch.tmp, Path(place), "--bind")
    for name in _ACCOUNT_FILES:
        plan.bind(scratch.root / name, Path("/etc") / name, "--ro-bind")
    for path in sorted(masked):
        if path.exists() and plan.shows(path) and not is_below(tree, [path]):
            plan.bind(scratch.empty_folder if path.is_dir() else scratch.empty_file, path, "--ro-bind")
    plan.bind(scratch.shm, Path("/dev/shm"), "--bind")
    return [
        "--proc",
        "/proc",
        "--dev",
        "/dev",
        *plan.arguments(),
        "--remount-ro",
        "/dev",
        "--remount-ro",
        "/",
    ]


class _Plan:
    """Binds by destination (a later one of the same place wins) and the links around them."""

    def __init__(self) -> None:
        self._binds: dict[Path, tuple[str, Path]] = {}
        self._links: dict[Path, str] = {}

    def show(self, path: Path, kind: str, masked: Iterable[Path]) -> None:
        real, links = resolve_links(path)
        self._links.update(links)
        if not is_below(real, masked):
            self.bind(real, real, kind)

    def bind(self, source: Path, place: Path, kind: str) -> None:
        self._binds[place] = (kind, source)

    def shows(self, path: Path) -> bool:
        return is_below(path, self._binds)

    def arguments(self) -> list[str]:
        found: list[str] = []
        made: set[Path] = set()
        by_depth = sorted(self._binds, key=lambda place: len(place.parts))
        for link in sorted(self._links, key=lambda place: len(place.parts)):
            enclosing = self._enclosing(link)
            if enclosing is None:
                found += [*self._parents(link, made), "--symlink", self._links[link], str(link)]
            elif (
                self._binds[enclosing][1] != enclosing
            ):  # a folder of ours in that place: no link is there yet
                _make_link(self._binds[enclosing][1] / link.relative_to(enclosing), self._links[link])
        for place in by_depth:
            kind, source = self._binds[place]
            if not self._is_shown_already(place):
                found += [*self._parents(place, made), kind, str(source), str(place)]
        return found

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
