"""Changes of modes, times and owners, made for a command whose jail would let it make them anywhere.

Landlock guards contents: it has no hook for ``chmod``, ``utime``, ``chown`` and ``readlink``. The process
around the command makes these calls in its place (of those that set times the one that C libraries use; the filter
of system calls refuses the others). The path is read once from the command's memory and
opened once (``O_PATH``: no device is opened and nothing is waited for); what was opened is judged by where
it really lies, and that very thing is changed. So nothing can be swapped between the look and the change.

Reference: Linux ``Documentation/userspace-api/seccomp_filter.rst`` (user notification), ``openat2(2)``.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import stat
import struct
from collections.abc import Callable, Iterable
from typing import Any

_HERE = -100  # AT_FDCWD
_NO_FOLLOW, _EMPTY_PATH = 0x100, 0x1000
_OPENAT2, _FCHMODAT2 = 437, 452  # one number everywhere
_RESOLVE_NO_MAGICLINKS = 2
_PATH_BYTES = _PAGE_BYTES = 4096
_WORD = 0xFFFFFFFF
_TWO_TIMES_BYTES = 32  # seconds and nanoseconds of each
# What a process calls its own; the C library changes what it has opened by /proc/self/fd/N.
_OWN_NAMES = re.compile(rb"^/(?:proc/(?:self|thread-self)(?=/)|dev(?=/fd/))")
_OF_DESCRIPTOR = re.compile(rb"/proc/(\d{1,9})/fd/(\d{1,9})")

# By name: its number on x86-64 and arm64 (0: it has none); which argument is the folder, the path and the flags (None: there
# is none), and which is the first of what to do.
_CALLS: dict[str, tuple[tuple[int, int], tuple[int | None, int | None, int | None], int]] = {
    "chmod": ((90, 0), (None, 0, None), 1),
    "fchmod": ((91, 52), (0, None, None), 1),
    "fchmodat": ((268, 53), (0, 1, None), 2),
    "fchmodat2": ((_FCHMODAT2, _FCHMODAT2), (0, 1, 3), 2),
    "utimensat": ((280, 88), (0, 1, 3), 2),
    "chown": ((92, 0), (None, 0, None), 1),
    "fchown": ((93, 55), (0, None, None), 1),
    "lchown": ((94, 0), (None, 0, None), 1),
    "fchownat": ((260, 54), (0, 1, 4), 2),
    "readlink": ((89, 0), (None, 0, None), 1),
    "readlinkat": ((267, 78), (0, 1, None), 2),
}
_MACHINES = ("x86_64", "aarch64")


Call = Any  # sandlock's, which has no types: the calling thread (pid), six arguments, and how to read and write its memory


def call_numbers(machine: str | None = None) -> dict[int, str]:
    """Number and name of each call that ``FileChanges`` answers; empty for a machine that we do not know."""
    name = machine or os.uname().machine
    if name not in _MACHINES:
        return {}
    at = _MACHINES.index(name)
    return {numbers[at]: call for call, (numbers, _, _) in _CALLS.items() if numbers[at]}


class FileChanges:
    """Answers the calls of ``call_numbers`` for one command; from several threads if need be.

    Of the real paths that it is given: what lies below ``writable`` may be changed. Of a link that lies below those or
    below ``readable``, or that ends there, it may be told where it points to, which a look at its end would tell as well.
    What lies below ``masked`` counts as outside.
    """

    def __init__(self, writable: Iterable[str], readable: Iterable[str], masked: Iterable[str]) -> None:
        self._writable = tuple(os.fsencode(path) for path in writable)
        self._shown = (*self._writable, *(os.fsencode(path) for path in readable))
        self._masked = tuple(os.fsencode(path) for path in masked)
        self._library = ctypes.CDLL(None, use_errno=True)

    def answer(self, name: str, call: Call) -> int:
        """Make the call ``name`` and return what it returns."""
        _, (of_folder, of_path, of_flags), of_rest = _CALLS[name]
        folder = _HERE if of_folder is None else _signed(call.args[of_folder])
        address = None if of_path is None else call.args[of_path]
        flags = 0 if of_flags is None else call.args[of_flags] & _WORD
        first, second = call.args[of_rest : of_rest + 2]
        if name.startswith("readlink"):
            return self._tell_link(call, (folder, address, _NO_FOLLOW | _EMPTY_PATH), first, second)
        if name == "utimensat" and not address:  # no path: the descriptor is meant
            if folder == _HERE or flags:
                raise _error(errno.EFAULT if folder == _HERE else errno.EINVAL)
            address = None
        change = self._change(name, call, first, second)
        descriptor = self._open(call, folder, address, _NO_FOLLOW if name == "lchown" else flags)
        try:
            if not self._is_below(_place(descriptor), self._writable):
                raise _error(errno.EPERM)
            return change(descriptor)
        finally:
            os.close(descriptor)

    def _change(self, name: str, call: Call, first: int, second: int) -> Callable[[int], int]:
        """What to do with the opened file, whose path is empty as it is open."""
        at = _MACHINES.index(os.uname().machine)
        if "mod" in name:
            return lambda opened: self._call(_FCHMODAT2, opened, b"", first & _WORD, _EMPTY_PATH)
        if "own" in name:
            ids = (first & _WORD, second & _WORD)
            return lambda opened: self._call(_CALLS["fchownat"][0][at], opened, b"", *ids, _EMPTY_PATH)
        times = _read(call, first, _TWO_TIMES_BYTES) if first else None  # None is now
        return lambda opened: self._call(_CALLS["utimensat"][0][at], opened, b"", times, _EMPTY_PATH)

    def _tell_link(self, call: Call, place: tuple[int, int | None, int], buffer: int, size: int) -> int:
        if (room := _signed(size)) <= 0:
            raise _error(errno.EINVAL)
        descriptor = self._open(call, *place)
        try:
            if not stat.S_ISLNK(os.fstat(descriptor).st_mode):
                raise _error(errno.EINVAL)
            if not self._may_be_told(call, descriptor):
                raise _error(errno.EACCES)
            target = os.readlink(b"", dir_fd=descriptor)[:room]
        finally:
            os.close(descriptor)
        if not call.write(buffer, target):
            raise _error(errno.EFAULT)
        return len(target)

    def _may_be_told(self, call: Call, link: int) -> bool:
        place = _place(link)
        if self._is_below(place, (*self._shown, b"/proc/%d" % call.pid)):
            return True
        try:
            end = self._open_path(os.open(os.path.dirname(place), os.O_PATH), os.path.basename(place), 0)
        except OSError:
            return False
        try:
            return self._is_below(_place(end), self._shown)
        finally:
            os.close(end)

    def _open(self, call: Call, folder: int, address: int | None, flags: int) -> int:
        """What the call is about, opened by us; it says nothing yet of whether that may be touched."""
        if flags & ~(_NO_FOLLOW | _EMPTY_PATH):
            raise _error(errno.EINVAL)
        if address is None:
            return _descriptor(call.pid, folder)
        path = _OWN_NAMES.sub(b"/proc/%d" % call.pid, _path(call, address))
        named = None if flags & _NO_FOLLOW else _OF_DESCRIPTOR.fullmatch(path)
        if named and int(named[1]) == call.pid:
            return _descriptor(call.pid, int(named[2]))
        if not path and flags & _EMPTY_PATH:
            return _descriptor(call.pid, folder)
        base = os.open("/", os.O_PATH) if path.startswith(b"/") else _descriptor(call.pid, folder)
        return self._open_path(base, path, os.O_NOFOLLOW if flags & _NO_FOLLOW else 0)

    def _open_path(self, folder: int, path: bytes, flag: int) -> int:
        """Open without opening, and close ``folder``; no link of ``/proc`` is followed, for they are ours here."""
        how = struct.pack("=QQQ", os.O_PATH | os.O_CLOEXEC | flag, 0, _RESOLVE_NO_MAGICLINKS)
        try:
            return self._call(_OPENAT2, folder, path, how, len(how))
        finally:
            os.close(folder)

    def _is_below(self, place: bytes, folders: Iterable[bytes]) -> bool:
        def lies_in(folder: bytes) -> bool:
            return place == folder or place.startswith(folder + b"/")

        return any(map(lies_in, folders)) and not any(map(lies_in, self._masked))

    def _call(self, number: int, *arguments: int | bytes | None) -> int:
        words = [ctypes.c_long(word) if isinstance(word, int) else word for word in arguments]
        result = int(self._library.syscall(ctypes.c_long(number), *words))
        if result < 0:
            raise _error(ctypes.get_errno())
        return result


def _error(number: int) -> OSError:
    return OSError(number, os.strerror(number))


def _signed(word: int) -> int:
    return ctypes.c_int32(word & _WORD).value


def _descriptor(pid: int, number: int) -> int:
    """What the thread ``pid`` has opened as ``number``, or its working folder, opened by us (``O_PATH``)."""
    if number < 0 and number != _HERE:
        raise _error(errno.EBADF)
    try:
        return os.open(f"/proc/{pid}/cwd" if number == _HERE else f"/proc/{pid}/fd/{number}", os.O_PATH)
    except FileNotFoundError as error:
        raise _error(errno.EBADF) from error


def _place(descriptor: int) -> bytes:
    """Where an opened file really lies; of a removed one, where it lay."""
    return os.readlink(b"/proc/self/fd/%d" % descriptor)


def _read(call: Call, address: int, size: int) -> bytes:
    found: bytes | None = call.read(address, size)
    if found is None:
        raise _error(errno.EFAULT)
    return found


def _path(call: Call, address: int) -> bytes:
    """A path out of the command's memory, page by page: the next page may not be there."""
    found = b""
    while len(found) < _PATH_BYTES:
        place = address + len(found)
        part = _read(call, place, _PAGE_BYTES - place % _PAGE_BYTES)
        path, end, _ = (found + part).partition(b"\0")
        if end and len(path) < _PATH_BYTES:
            return path
        found += part
    raise _error(errno.ENAMETOOLONG)
