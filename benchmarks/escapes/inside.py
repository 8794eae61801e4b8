"""What every attempt has at hand inside: this text stands before it.

Arguments: a token by which its processes are found from outside, and what it is told, as JSON.
"""

import ctypes
import errno
import fcntl
import json
import mmap
import os
import resource
import signal
import socket
import struct
import sys
import threading
import time
from contextlib import suppress

TOLD = json.loads(sys.argv[2]) if len(sys.argv) > 2 else {}
LIBRARY = ctypes.CDLL(None, use_errno=True)
MIB = 1 << 20
REFUSED = 3
__all__ = ["errno", "fcntl", "mmap", "resource", "signal", "struct", "suppress", "threading", "time"]


def call(number, *arguments):
    """A system call by its number."""
    return checked(LIBRARY.syscall(number, *arguments))


def checked(result):
    """What a function of the C library gave back; its failure as an exception."""
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


def text(path):
    """A path for a system call."""
    return ctypes.c_char_p(os.fsencode(path))


def show(data):
    """Write to the output."""
    os.write(1, data if isinstance(data, bytes) else str(data).encode("utf-8", "surrogateescape"))


def read(path):
    """Show a file."""
    with open(path, "rb") as handle:
        show(handle.read(1 << 16))


def write(path, data=b"changed", mode="wb"):
    """Write a file."""
    with open(path, mode) as handle:
        handle.write(data)


def connect(family, kind, address, protocol=0):
    """Reach a listener and say a word."""
    with socket.socket(family, kind, protocol) as ours:
        ours.settimeout(0.5)
        ours.connect(address)
        ours.send(b"hello")


def touch(size):
    """Memory that is really used."""
    block = bytearray(size)
    block[::4096] = b"x" * len(block[::4096])
    return block


def stay(seconds=6.0):
    """Be there long enough to be looked at."""
    time.sleep(seconds)


def detach():
    """Leave session, group and parent behind; only the daemon comes back from here."""
    if os.fork():
        os.wait()
        return False
    os.setsid()
    if os.fork():
        os._exit(0)
    return True


def beat():
    """The heartbeat of a process that should not live any more; it outlasts the time-out."""
    end = time.monotonic() + TOLD["timeout"] + 8
    descriptor = os.open("beat", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    while time.monotonic() < end:
        os.write(descriptor, b".")
        time.sleep(0.01)
    os._exit(0)


def await_beat():
    """Wait until the daemon is up."""
    end = time.monotonic() + 10
    while not os.path.exists("beat") and time.monotonic() < end:
        time.sleep(0.01)


def run(attempt):
    """Try it; a refusal is no crash. The file says that it came so far."""
    os.close(os.open("began", os.O_CREAT | os.O_WRONLY))
    try:
        attempt()
    except (OSError, MemoryError, EOFError) as refusal:
        sys.stderr.write(f"refused: {refusal}\n")
        sys.stderr.flush()
        os._exit(REFUSED)
