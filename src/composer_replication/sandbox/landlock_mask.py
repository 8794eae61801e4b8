"""Take files away from this process and all its later children, with Landlock.

Landlock can only allow. "Everything but X" is therefore a rule for every neighbour of
X and of each folder above it; layers intersect, so this one takes X out of whatever a
further layer allows. Names below X stay listable, contents are not readable.

Reference: Linux ``Documentation/userspace-api/landlock.rst``.
"""

from __future__ import annotations

import ctypes
import os
import stat
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_ACCESS_EXECUTE, _ACCESS_READ_FILE = 1 << 0, 1 << 2
_ACCESS = _ACCESS_EXECUTE | _ACCESS_READ_FILE
_RULE_PATH_BENEATH = 1
_PR_SET_NO_NEW_PRIVS = 38


def hide(masked: Iterable[Path]) -> None:
    """Make ``masked`` (resolved paths) unreadable for this thread and its children, for good.

    Raises:
        OSError: the kernel has no Landlock.
    """
    hidden = {path for path in masked if path.exists()}
    if not hidden:
        return
    library = ctypes.CDLL(None, use_errno=True)
    attributes = ctypes.create_string_buffer(struct.pack("=Q", _ACCESS))
    ruleset = _checked(library.syscall(_CREATE_RULESET, attributes, 8, 0))
    try:
        for path in _neighbours(hidden):
            _allow(library, ruleset, path)
        _checked(library.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
        _checked(library.syscall(_RESTRICT_SELF, ruleset, 0))
    finally:
        os.close(ruleset)


def _neighbours(hidden: set[Path]) -> Iterator[Path]:
    """All that lies beside a hidden path or beside a folder above one."""
    above = {parent for path in hidden for parent in path.parents}
    for folder in above - hidden:
        if hidden.isdisjoint(folder.parents):
            for name in os.listdir(folder):
                path = folder / name
                if path not in above and path not in hidden:
                    yield path


def _allow(library: ctypes.CDLL, ruleset: int, path: Path) -> None:
    try:
        descriptor = os.open(path, os.O_PATH | os.O_NOFOLLOW)
    except OSError:
        return  # not there any more, or not ours to see: not readable either
    try:
        if stat.S_ISLNK(os.fstat(descriptor).st_mode):
            return  # its target has its own rule
        rule = ctypes.create_string_buffer(struct.pack("=Qi", _ACCESS, descriptor))
        _checked(library.syscall(_ADD_RULE, ruleset, _RULE_PATH_BENEATH, rule, 0))
    finally:
        os.close(descriptor)


def _checked(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result
