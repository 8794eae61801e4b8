"""The part of the self-test that runs inside: tries to get out and prints what it reached.

Started with the base interpreter alone, so it uses the standard library only and
imports nothing of ours. On standard input is ``{"word": …, "do": NAME, …}``, where ``_NAME`` is a function of this
file. The word goes to standard error before it is tried, as evidence that it was; the answer is one JSON object.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

_CHUNK = b"x" * (1 << 20)
_PR_GET_NO_NEW_PRIVS = 39
_PTRACE_SEIZE = 0x4206
_CLONE_NEWUSER = 0x10000000


def read_head(path: str) -> str:
    """The first 64 KiB of a file; nothing where it cannot be read."""
    try:
        with open(path, "rb") as handle:
            return handle.read(1 << 16).decode("utf-8", "replace")
    except OSError:
        return ""


def digest(text: str) -> str:
    """By which two texts are compared."""
    return hashlib.sha256(text.encode()).hexdigest()


def _connect(family: int, kind: int, address: Any, send: bytes) -> bool:
    try:
        with socket.socket(family, kind) as probe:
            probe.settimeout(0.3)
            probe.connect(address)
            probe.send(send)
    except (OSError, ValueError):
        return False
    return True


def _network(given: dict[str, Any]) -> dict[str, Any]:
    reached: list[str] = []
    for what, family, kind, address, word in given["targets"]:
        place = address if isinstance(address, str) else tuple(address)
        is_reached = _connect(family, kind, place, word.encode())
        if is_reached and what:  # of the others the host looks whether it came
            reached.append(what)
    with suppress(OSError):
        socket.getaddrinfo("example.com", 80)
        reached.append("name resolution")
    return {"reached": reached}


def _files(given: dict[str, Any]) -> dict[str, Any]:
    digests = {path: digest(read_head(path)) for path in given["paths"]}
    return {"digests": digests, "text": "".join(read_head(path) for path in given["secrets"])}


def _environment(_: dict[str, Any]) -> dict[str, Any]:
    seen = [f"{name}={value}" for name, value in os.environ.items()]
    seen += [read_head(f"/proc/{who}/environ") for who in ("1", "self", str(os.getppid()))]
    return {"text": "\n".join(seen)}


def _writes(given: dict[str, Any]) -> dict[str, Any]:
    written: list[str] = []
    for folder in given["folders"]:
        path = os.path.join(folder, given["name"])
        with suppress(OSError):
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY))  # the host looks, and removes it
    for path in given["files"]:
        with suppress(OSError):
            os.close(os.open(path, os.O_WRONLY | os.O_APPEND))
            written.append(path)
    with open("own", "w") as handle:
        handle.write("x")
    return {"written": written}


def _signals(given: dict[str, Any]) -> dict[str, Any]:
    library = ctypes.CDLL(None, use_errno=True)
    victim = int(given["pid"])
    reached: list[str] = []
    if victim not in (1, os.getpid(), os.getppid()):
        if library.ptrace(_PTRACE_SEIZE, victim, 0, 0) == 0:
            reached.append("traced a process of the host")
        with suppress(OSError):
            os.kill(victim, signal.SIGTERM)  # the host looks whether it came
    names: list[str] = []
    with suppress(OSError):
        names = [name for name in os.listdir("/proc") if name.isdigit()]
    text = "".join(read_head(f"/proc/{name}/cmdline") for name in {*names, str(victim)})
    return {"reached": reached, "text": text}


def _privilege(_: dict[str, Any]) -> dict[str, Any]:
    library = ctypes.CDLL(None, use_errno=True)
    gained: list[str] = []
    if library.prctl(_PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0) != 1:
        gained.append("no_new_privs is not set")
    with suppress(OSError):
        os.setgid(0)
        os.setuid(0)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    sets = (ctypes.c_uint32 * 6)()
    if library.capget(header, sets) == 0 and (sets[0] or sets[1] or sets[3] or sets[4]):
        gained.append("it has capabilities")
    child = os.fork()
    if child == 0:
        os._exit(0 if library.unshare(_CLONE_NEWUSER) == 0 else 1)
    if os.waitpid(child, 0)[1] == 0:
        gained.append("it can make a user namespace")
    return {"gained": gained}


def _name_of(error: OSError) -> str:
    return errno.errorcode.get(error.errno or 0, str(error))


def _start_sleeper() -> None:
    if os.fork() == 0:
        time.sleep(1)
        os._exit(0)


_STEPS: dict[str, tuple[int, Callable[[], object]]] = {
    "open_files": (3, lambda: os.open("/dev/null", os.O_RDONLY)),
    "processes": (1, _start_sleeper),
}


def _use_up(given: dict[str, Any]) -> dict[str, Any]:
    """Take ``most``, or as many as there are to be had; how many there were before counts, too."""
    before, take = _STEPS[given["what"]]
    taken, ended_by = 0, ""
    try:
        while taken < given["most"]:
            take()
            taken += 1
    except OSError as error:
        ended_by = _name_of(error)
    return {"count": before + taken, "taken": taken, "ended_by": ended_by}


def _touch(size: int) -> bytearray:
    block = bytearray(size)
    block[::4096] = b"x" * len(block[::4096])
    return block


def _memory(given: dict[str, Any]) -> dict[str, Any]:
    with suppress(MemoryError):
        return {"held": len(_touch(given["bytes"]))}
    return {"held": 0}


def _memory_of_many(given: dict[str, Any]) -> dict[str, Any]:
    children = []
    for _ in range(given["num"]):
        child = os.fork()
        if child == 0:
            with suppress(MemoryError):
                held = _touch(given["bytes"])
                time.sleep(given["seconds"])
                os._exit(0 if held else 1)
            os._exit(1)
        children.append(child)
    return {"held": sum(os.waitpid(child, 0)[1] == 0 for child in children)}


def _can_write(folder: str, name: str) -> bool:
    try:
        os.close(os.open(f"{folder}/{name}", os.O_CREAT | os.O_WRONLY))
        os.unlink(f"{folder}/{name}")
    except OSError:
        return False
    return True


def _disk(given: dict[str, Any]) -> dict[str, Any]:
    """Write past the limit: one file, many files wherever it can, files that are deleted but open, or only mapped."""
    kind = given["kind"]
    is_mapped = "mapped" in kind
    folders = {
        "many files": [".", os.environ.get("TMPDIR", "."), "/tmp", "/dev/shm"],
        "mapped files in shared memory": ["/dev/shm"],
    }.get(kind, ["."])
    folders = [folder for folder in folders if _can_write(folder, given["name"])]
    written = 0
    held: list[int] = []
    names: list[str] = []
    ended_by = ""
    try:
        while folders and written < given["bytes"]:
            if not held or kind != "one file":
                names.append(f"{folders[len(held) % len(folders)]}/{given['name']}-{len(held)}")
                held.append(os.open(names[-1], os.O_CREAT | os.O_RDWR))
                if is_mapped or kind == "deleted files":
                    os.unlink(names[-1])
            size = os.write(held[-1], _CHUNK)
            if is_mapped:
                _map_first_page(held[-1])
                os.close(held[-1])
            written += size
    except OSError as error:
        ended_by = _name_of(error)
    if kind != "one file" and not (is_mapped and written < given["bytes"]):
        time.sleep(given["seconds"])
    for name in names:
        with suppress(OSError):
            os.unlink(name)
    return {"written": written, "is_nowhere": not folders, "ended_by": ended_by}


def _map_first_page(descriptor: int) -> None:
    """As Python's own ``mmap`` does, but without a descriptor that is kept."""
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    page = library.mmap(None, ctypes.c_size_t(4096), 1, 1, descriptor, ctypes.c_long(0))
    if page == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), "it cannot be mapped")


def _output(given: dict[str, Any]) -> dict[str, Any]:
    for _ in range(given["bytes"] >> 20):
        os.write(1, _CHUNK)
    return {}


def _daemon(given: dict[str, Any]) -> dict[str, Any]:
    """A heartbeat from a process that left session, group and parent behind."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            end = time.monotonic() + given["lives_seconds"]
            with open(given["file"], "ab", buffering=0) as beat:
                while time.monotonic() < end:
                    beat.write(b".")
                    time.sleep(0.01)
        os._exit(0)
    os.wait()
    while not (os.path.exists(given["file"]) and os.path.getsize(given["file"])):  # it may start late
        time.sleep(0.005)
    time.sleep(given["seconds"])
    return {}


def _beats(given: dict[str, Any]) -> dict[str, Any]:
    """Does a daemon of an earlier command still write here?"""
    before = os.path.getsize(given["file"])
    time.sleep(given["seconds"])
    return {"before": before, "beats": os.path.getsize(given["file"]) - before}


if __name__ == "__main__":
    given = json.load(sys.stdin)
    os.write(2, f"{given['word']}\n".encode())
    print(json.dumps(globals()[f"_{given['do']}"](given)))
