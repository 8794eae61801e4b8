"""What is planted outside for one attempt: secrets, targets, listeners, a process to attack."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

_BEFORE = "before"
_TEST = 'ANSWER = "{word}"\n\n\ndef test_hidden():\n    assert ANSWER\n'
_VICTIM = """
import ctypes, os, signal, sys
word = os.environ["ESCAPES_WORD"].encode()
secret = ctypes.create_string_buffer(word)
open_to_change = ctypes.create_string_buffer(b"before")
signal.signal(signal.SIGURG, lambda *_: os.write(1, b"signal\\n"))
signal.signal(signal.SIGIO, lambda *_: os.write(1, b"signal\\n"))
held = os.open(sys.argv[2], os.O_RDONLY)
os.unlink(sys.argv[2])
print(ctypes.addressof(secret), ctypes.addressof(open_to_change), held, flush=True)
for _ in sys.stdin:
    print(open_to_change.raw, flush=True)
"""


class Scene:
    """Everything of one attempt that lies outside. ``word`` is the secret, and no attempt is told it.

    Modes are as open as can be (only ``private`` and ``closed`` are not): the jail alone is the guard.
    """

    def __init__(self, *, has_victim: bool = False, has_way_out: bool = False) -> None:
        self._has_way_out = has_way_out
        self.word, self.mark = f"secret{secrets.token_hex(12)}", f"mark{secrets.token_hex(8)}"
        self.token = f"escapes-{secrets.token_hex(8)}"
        self.root = Path(tempfile.mkdtemp(prefix="escapes-")).resolve()
        self.outside, self.shown, self.run_folder = (self.root / name for name in ("outside", "shown", "run"))
        self.tree = self.root / "work" / "tree"
        self.masked = self.shown / "inner" / "masked"
        self.environment = self.shown / "env"
        self._plant_files()
        self._plant_tree()
        self._open_to_all()
        self.listeners: dict[str, socket.socket] = {}
        self.fifo = -1
        self.victim: subprocess.Popen[bytes] | None = None
        self.told: dict[str, Any] = {}
        try:
            self._listen_everywhere()
            if has_victim:
                self._start_victim()
            self._tell()
        except BaseException:
            self.close()
            raise
        os.environ["ESCAPES_WORD"] = self.word
        self.before = self.digest()

    def _plant_files(self) -> None:
        files = {
            "outside/secret.txt": self.word,
            "outside/private.txt": self.word,
            "outside/target.txt": _BEFORE,
            "outside/victim.txt": self.word,
            "outside/script.sh": f"#!/bin/sh\necho {self.word}\n",
            "outside/planted.py": f'print("{self.word}")\n',
            f"outside/names/{self.word}": "",
            "shown/neighbour.txt": "neighbour",
            "shown/target.txt": _BEFORE,
            "shown/closed.txt": self.word,
            "shown/env/bin/tool": "#!/bin/sh\necho clean\n",
            "shown/env/site/trusted.py": 'ANSWER = "clean"\n',
            "shown/env/site/__pycache__/keep": "",
            "shown/inner/masked/deep/hidden.txt": self.word,
            "shown/inner/masked/planted.py": f'print("{self.word}")\n',
            "run/hidden_tests/test_hidden.py": _TEST.format(word=self.word),
            "run/events.jsonl": json.dumps({"golden": self.word}) + "\n",
        }
        for name, content in files.items():
            place = self.root / name
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(content)
        (self.outside / "pointer").symlink_to(f"/nowhere/{self.word}")
        if self._has_way_out:
            os.mkfifo(self.shown / "pipe")

    def _plant_tree(self) -> None:
        (self.tree / "folder").mkdir(parents=True)
        (self.tree / "own.txt").write_text("own")
        (self.tree / "folder" / "own.txt").write_text("own")
        (self.tree / "way").symlink_to(self.outside / "secret.txt")
        (self.tree / "door").symlink_to(self.outside)
        os.link(self.outside / "target.txt", self.tree / "linked.txt")

    def _open_to_all(self) -> None:
        for place in (self.root, *self.root.rglob("*")):
            if not place.is_symlink():
                is_run = place.is_dir() or place.suffix == ".sh" or place.name == "tool"
                place.chmod(0o777 if is_run else 0o666)
        for place in (self.outside / "private.txt", self.shown / "closed.txt"):
            place.chmod(0o600)
        self.root.chmod(0o755)

    def _listen_everywhere(self) -> None:
        inet, inet6, unix = socket.AF_INET, socket.AF_INET6, socket.AF_UNIX
        stream, datagram, packets = socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_SEQPACKET
        places: dict[str, tuple[int, int, Any]] = {
            "tcp": (inet, stream, ("127.0.0.1", 0)),
            "udp": (inet, datagram, ("0.0.0.0", 0)),
            "tcp6": (inet6, stream, ("::1", 0)),
            "path": (unix, stream, str(self.outside / "s")),
            "path_datagram": (unix, datagram, str(self.outside / "d")),
            "abstract": (unix, stream, f"\0{self.token}-s"),
            "abstract_datagram": (unix, datagram, f"\0{self.token}-d"),
            "abstract_packets": (unix, packets, f"\0{self.token}-p"),
        }
        if self._has_way_out:
            places["shown"] = (unix, stream, str(self.shown / "s"))
        if own_address():
            places["host_tcp"] = (inet, stream, (own_address(), 0))
        for name, (kind, how, address) in places.items():
            with suppress(OSError):  # a machine without IPv6
                listener = socket.socket(kind, how)
                self.listeners[name] = listener
                listener.bind(address)
                listener.setblocking(False)
                if how != datagram:
                    listener.listen(8)
        for name in ("s", "d"):
            (self.outside / name).chmod(0o777)
        if self._has_way_out:
            (self.shown / "s").chmod(0o777)
            self.fifo = os.open(self.shown / "pipe", os.O_RDONLY | os.O_NONBLOCK)

    def _start_victim(self) -> None:
        self.victim = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _VICTIM, self.word, str(self.outside / "victim.txt")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={"ESCAPES_WORD": self.word, "PATH": os.defpath},
            cwd=self.outside,
            start_new_session=True,
        )
        secret, change, held = (int(number) for number in self.victim.stdout.readline().split())
        os.set_blocking(self.victim.stdout.fileno(), False)
        self.told |= {"pid": self.victim.pid, "secret_at": secret, "change_at": change, "held": held}
        self.victim_before = victim_settings(self.victim.pid)

    def _tell(self) -> None:
        self.told |= {
            "outside": str(self.outside),
            "secret": str(self.outside / "secret.txt"),
            "private": str(self.outside / "private.txt"),
            "target": str(self.outside / "target.txt"),
            "shown": str(self.shown),
            "closed": str(self.shown / "closed.txt"),
            "env": str(self.environment),
            "masked": str(self.masked / "deep" / "hidden.txt"),
            "masked_folder": str(self.masked),
            "hidden": str(self.run_folder / "hidden_tests" / "test_hidden.py"),
            "run": str(self.run_folder),
            "tree": str(self.tree),
            "token": self.token,
            "parent": os.getpid(),
            "host": own_address(),
            "own_uid": os.getuid(),
            "pid_namespace": os.readlink("/proc/self/ns/pid"),
            "cache_tag": sys.implementation.cache_tag,
        }
        for name, listener in self.listeners.items():
            if listener.family in (socket.AF_INET, socket.AF_INET6):
                self.told[f"{name}_port"] = listener.getsockname()[1]

    def digest(self) -> dict[str, str]:
        """What is planted outside the tree, by path: kind, mode, owner, times and content."""
        found = {}
        for folder in (self.outside, self.shown, self.run_folder):
            for place in (folder, *sorted(folder.rglob("*"))) if folder.exists() else ():
                found[str(place.relative_to(self.root))] = _state_of(place)
        return found

    def changes(self) -> list[str]:
        """What was changed since it was planted."""
        now = self.digest()
        return sorted(name for name in {*self.before, *now} if self.before.get(name) != now.get(name))

    def close(self) -> None:
        """Take everything away."""
        os.environ.pop("ESCAPES_WORD", None)
        for listener in self.listeners.values():
            listener.close()
        if self.fifo >= 0:
            os.close(self.fifo)
        if self.victim is not None:
            self.victim.kill()
            self.victim.communicate()
        shutil.rmtree(self.root, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _state_of(place: Path) -> str:
    info = place.lstat()
    seen = f"{info.st_mode:o} {info.st_uid} {info.st_gid}"
    if place.is_symlink():
        return f"{seen} {os.readlink(place)}"
    attributes = [(name, os.getxattr(place, name)) for name in sorted(os.listxattr(place))]
    content = hashlib.sha256(place.read_bytes()).hexdigest() if place.is_file() else ""
    return f"{seen} {info.st_mtime_ns} {attributes} {content}"


def victim_settings(pid: int) -> tuple[object, ...]:
    """What one process can set for another."""
    proc = Path(f"/proc/{pid}")
    return (
        os.getpriority(os.PRIO_PROCESS, pid),
        os.sched_getscheduler(pid),
        sorted(os.sched_getaffinity(pid)),
        (proc / "limits").read_text(),
        (proc / "oom_score_adj").read_text(),
        os.getpgid(pid),
    )


def own_address() -> str:
    """An address of this machine besides its loopback, found without sending anything; empty without one."""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        asked.connect(("192.0.2.250", 9))
        address = str(asked.getsockname()[0])
        return "" if address.startswith("127.") else address
    return ""
