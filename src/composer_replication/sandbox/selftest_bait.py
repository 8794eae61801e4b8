"""Real things outside a jail that a probe must not reach: sockets, files, a process."""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
import socket
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from composer_replication.sandbox.process_folder import BAIT_PREFIX, make_held_folder

_SOME = 3
_MOST = 16
_HEAD_BYTES = 1 << 16
# Kept for documentation: nobody has them.
_NOBODY: dict[int, str] = {socket.AF_INET: "192.0.2.1", socket.AF_INET6: "2001:db8::9"}
_SERVERS, _SERVERS_IPV6 = ("1.1.1.1",), ("2606:4700:4700::1111",)
_LONGEST_TEMPORARY_FOLDER = 60  # a socket's whole path may take 107 bytes


class Bait:
    """Plants everything on entry and removes it on exit. ``word`` is the secret to look for.

    ``absent`` says what this machine lacks, so that nothing of it could be planted. In ``unseen``, folders that no jail
    may show, as a task store and a run folder, nothing is written.
    """

    def __init__(self, unseen: Iterable[Path] = ()) -> None:
        self.word = f"secret-{secrets.token_hex(12)}"
        # Another place than the usual temporary folder where its name leaves no room for a socket's.
        is_long = len(os.path.realpath(tempfile.gettempdir())) > _LONGEST_TEMPORARY_FOLDER
        self.root, self._held = make_held_folder(BAIT_PREFIX, "/tmp" if is_long else None)
        self._unseen = (*unseen, Path("runs"))
        self._sockets: list[socket.socket] = []
        self._datagrams: list[socket.socket] = []
        self.network: list[tuple[str, int, int, Any, str]] = []
        """What a probe tries: how it is called (nothing where we look whether it came), family, kind, address, what is sent."""
        self.absent: list[str] = []

    def _plant_files(self) -> None:
        self.secret = self._file("outside/secret.txt")
        self._planted = [self._file("outside/runs/run.toml"), self._file("outside/tasks/secrets/hidden.py")]
        self.shown = self.root / "shown"
        self.neighbour = self._file("shown/inner/neighbour.txt")
        self.masked = self.root / "shown" / "inner" / "masked"
        self._file("shown/inner/masked/deep/hidden.txt")
        for path in (self.root, *self.root.rglob("*")):
            path.chmod(0o755 if path.is_dir() else 0o644)

    def __enter__(self) -> Bait:
        try:
            self._plant_files()
            self._open_sockets()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _open_sockets(self) -> None:
        unix_path = str(self.root / "outside" / "host.sock")
        abstract = f"\0composer-rl-{secrets.token_hex(8)}"
        self._listen(socket.AF_UNIX, socket.SOCK_STREAM, unix_path, "a unix socket of the host")
        self._listen(socket.AF_UNIX, socket.SOCK_STREAM, abstract, "an abstract unix socket of the host")
        os.chmod(unix_path, 0o777)
        (self.root / "outside").chmod(0o755)
        named = _nameservers()
        servers = (*_SERVERS, *(each for each in named if ":" not in each))
        servers_ipv6 = (*_SERVERS_IPV6, *(each for each in named if ":" in each))
        self._plant_internet(socket.AF_INET, "127.0.0.1", servers, "169.254.169.254")
        self._plant_internet(socket.AF_INET6, "::1", servers_ipv6, "fd00:ec2::254")

    def _plant_internet(self, family: int, loopback: str, servers: Iterable[str], metadata: str) -> None:
        """Listen on the loopback and the address by which others reach us; what this machine lacks of IPv6 is said in ``absent``."""
        by = "IPv6 " if family == socket.AF_INET6 else ""
        try:
            self._listen(family, socket.SOCK_STREAM, (loopback, 0), f"a listener on the host's {by}loopback")
            self._datagrams.append(self._listen(family, socket.SOCK_DGRAM, (loopback, 0), ""))
        except OSError:
            if not by:
                raise
            self.absent.append("no loopback address of IPv6")
        try:
            own = _own_address(family)
        except OSError:  # no route leads out of this machine
            if by:
                self.absent.append("no route of IPv6 that leads out")
                return
        else:
            with suppress(OSError):  # an address that is not ours any more
                self._listen(family, socket.SOCK_STREAM, (own, 0), f"this machine by its {by}address")
        route = f"{'an' if by else 'a'} {by}route to the outside"
        self.network.append((route, family, socket.SOCK_DGRAM, (_NOBODY[family], 9), ""))
        places = [(f"a server outside ({server})", server, 53) for server in servers]
        for what, address, port in (*places, (f"the metadata service of a cloud ({metadata})", metadata, 80)):
            self.network.append((what, family, socket.SOCK_STREAM, (address, port), "probe"))

    def __exit__(self, *error: object) -> None:
        for listener in self._sockets:
            listener.close()
        shutil.rmtree(self.root, ignore_errors=True)
        os.close(self._held)

    def _file(self, name: str) -> Path:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self.word)
        path.chmod(0o644)
        return path

    def _listen(self, family: int, kind: int, address: Any, what: str) -> socket.socket:
        listener = socket.socket(family, kind)
        self._sockets.append(listener)
        listener.bind(address)
        listener.setblocking(False)
        if kind == socket.SOCK_STREAM:
            listener.listen(8)
        place = address if family == socket.AF_UNIX else listener.getsockname()[:2]
        self.network.append((what, family, kind, place, "probe"))
        return listener

    def got_datagram(self) -> bool:
        got = False
        for listener in self._datagrams:
            with suppress(BlockingIOError):
                got = bool(listener.recv(64)) or got
        return got

    def masked_files(self, folders: Iterable[Path]) -> dict[str, str]:
        """Digests of files below our masked folder and of some below each of ``folders``."""
        found = _some_files(self.masked)
        for folder in folders:
            found += _some_files(folder)
        return _digests(found)

    def host_files(self) -> dict[str, str]:
        """Digests of files that we can read and the jail must not.

        Accounts, our home, this package, a run folder and hidden tests: planted ones, and the real ones.
        """
        names = ("/etc/shadow", "/etc/passwd", "/etc/hostname", "/etc/machine-id", __file__)
        found = [Path(name) for name in names]
        with suppress(OSError, RuntimeError):
            found += [path for path in sorted(Path.home().iterdir()) if path.is_file()][:_SOME]
        unseen = [path for folder in self._unseen for path in _one_of_each(folder.resolve())]
        return _digests([*found, *self._planted, *unseen])


def _own_address(family: int) -> str:
    """By which others reach us. Nothing is sent to that address, which is nobody's."""
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((_NOBODY[family], 9))
        return str(probe.getsockname()[0])


def _nameservers() -> list[str]:
    with suppress(OSError):
        lines = Path("/etc/resolv.conf").read_text().splitlines()
        return [line.split()[1] for line in lines if line.startswith("nameserver ")][:1]
    return []


def _some_files(folder: Path, suffixes: tuple[str, ...] = (".py", ".txt", ".whl")) -> list[Path]:
    found: list[Path] = []
    for place, _, names in os.walk(folder):
        paths = (Path(place) / name for name in sorted(names) if name.endswith(suffixes))
        found += [path for path in paths if path.is_file() and path.stat().st_size]  # a pipe would hold us
        if len(found) >= _SOME:
            break
    return found[:_SOME]


def _one_of_each(folder: Path) -> list[Path]:
    """One file of a folder that no jail may show, and of each folder in it."""
    with suppress(OSError):
        folders = (folder, *sorted(path for path in folder.iterdir() if path.is_dir()))
        return [path for place in folders for path in _some_files(place, ("",))[:1]][:_MOST]
    return []


def _digests(paths: Iterable[Path]) -> dict[str, str]:
    """As the probe computes them: of the first 64 KiB, decoded with replacement."""
    found: dict[str, str] = {}
    for path in paths:
        with suppress(OSError), path.open("rb") as handle:
            text = handle.read(_HEAD_BYTES).decode("utf-8", "replace")
            if text:
                found[str(path)] = hashlib.sha256(text.encode()).hexdigest()
    return found
