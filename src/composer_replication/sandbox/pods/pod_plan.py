"""What a pod shows, and where from: files that we send, claims of the cluster, and empty folders."""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from composer_replication.records import SandboxSpec
from composer_replication.sandbox.host_paths import (
    base_interpreter,
    is_below,
    resolve_links,
    system_folders,
)
from composer_replication.sandbox.private_folders import Scratch

_ACCOUNT_FILES = ("passwd", "group", "hosts", "nsswitch.conf")
_EMPTY_FILE = "empty"


@dataclass(frozen=True, slots=True)
class Shown:
    """One path of the spec: a part of the volume that we fill, or of a claim."""

    place: Path
    volume: str
    part: str
    source: Path | None = None
    """What to send; None where it is on a claim already."""


class PodPlan:
    """The mounts of one pod.

    Args:
        spec: what is to be seen.
        scratch: its account files are sent, its ``home`` and ``tmp`` are places in the pod.
        claims: host path and the persistent volume claim that holds the same files.
    """

    def __init__(
        self, spec: SandboxSpec, scratch: Scratch, claims: tuple[tuple[Path, str], ...] = ()
    ) -> None:
        self.tree = spec.tree.resolve()
        self.home, self.tmp = scratch.home, scratch.tmp
        self.claims = claims
        known = (system_folders(), base_interpreter())
        masked = {path.resolve() for group in known for path in group.masked}
        masked |= {path.resolve() for path in spec.masked}
        self._masked = sorted(path for path in masked if path.exists() and not is_below(self.tree, [path]))
        self.shown = list(self._shown(spec))
        self._accounts = [(f"etc-{name}", scratch.root / name, f"/etc/{name}") for name in _ACCOUNT_FILES]
        self._empty = scratch.empty_file

    def _shown(self, spec: SandboxSpec) -> Iterator[Shown]:
        real = {path: resolve_links(path)[0] for path in spec.read_only}
        for number, (path, source) in enumerate(sorted(real.items())):
            others = [other for place, other in real.items() if other != source]
            is_repeated = is_below(source, others) and path == source
            if is_repeated or is_below(source, self._masked):
                continue
            claim = next((entry for entry in self.claims if is_below(source, [entry[0].resolve()])), None)
            for place in sorted({path, source}):
                if claim is None:
                    yield Shown(place, "shown", f"path-{number}", source)
                else:
                    part = str(source.relative_to(claim[0].resolve()))
                    yield Shown(place, f"claim-{self.claims.index(claim)}", "" if part == "." else part)

    def mounts(self) -> list[dict[str, Any]]:
        """The ``volumeMounts`` of the container that runs commands."""
        found: dict[str, dict[str, Any]] = {}

        def mount(volume: str, place: Path | str, part: str = "", *, is_read_only: bool = True) -> None:
            entry: dict[str, Any] = {"name": volume, "mountPath": str(place)}
            if is_read_only:
                entry["readOnly"] = True
            if part:
                entry["subPath"] = part
            found[str(place)] = entry

        for shown in self.shown:
            mount(shown.volume, shown.place, shown.part)
        for path in self._masked_mounts():
            if path.is_dir():
                mount("nothing", path)
            else:
                mount("shown", path, _EMPTY_FILE)
        for part, _, name in self._accounts:
            mount("shown", name, part)
        for volume, place in self.writable():
            mount(volume, place, is_read_only=False)
        return sorted(
            found.values(), key=lambda entry: (str(entry["mountPath"]).count("/"), entry["mountPath"])
        )

    def _masked_mounts(self) -> list[Path]:
        """Of what we send, masked files are left out; elsewhere something empty lies over them."""
        sent = [shown.source for shown in self.shown if shown.source is not None]
        return [path for path in self._masked if not is_below(path, sent)]

    def writable(self) -> list[tuple[str, Path]]:
        """Volumes that commands may write, and their places.

        ``/tmp`` only where none of the others lies below it: whoever may write there could rename the folder
        that leads to the tree.
        """
        places = [
            ("tree", self.tree),
            ("home", self.home),
            ("tmpdir", self.tmp),
            ("orders", Path("/run/composer")),
        ]
        shared = Path("/tmp")
        if not any(is_below(place, [shared]) for _, place in places):
            places.append(("tmp", shared))
        return places

    def write_stage(self, target: BinaryIO) -> None:
        """What the volume ``shown`` holds, as a tar file."""
        with tarfile.open(fileobj=target, mode="w", format=tarfile.PAX_FORMAT) as archive:
            done: set[str] = set()
            for part, file, _ in [*self._accounts, (_EMPTY_FILE, self._empty, "")]:
                archive.add(file, part, filter=nobodys)
            for shown in self.shown:
                if shown.source is not None and shown.part not in done:
                    done.add(shown.part)
                    self._add(archive, shown.source, shown.part)

    def _add(self, archive: tarfile.TarFile, source: Path, part: str) -> None:
        if is_below(source, self._masked):
            return
        archive.add(source, part, recursive=False, filter=nobodys)
        if source.is_dir() and not source.is_symlink() and source != self.tree:
            for child in sorted(source.iterdir()):
                self._add(archive, child, f"{part}/{child.name}")


def nobodys(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    """Without a name: it belongs to whoever unpacks it."""
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    return entry
