"""The process between us and one command under sandlock: confines it, waits, leaves nothing.

It runs alone, from the command line, with its orders as JSON in the file descriptor
that its argument names. It is a subreaper, so that a daemon of the command becomes its
child and can be found and killed; it kills all of them before it ends, and at once
when the process that started it dies.

Reference: Linux ``Documentation/userspace-api/landlock.rst``.
"""

from __future__ import annotations

import ctypes
import os
import resource
import shutil
import stat
import struct
import sys
import threading
import time
import types
from collections.abc import Iterable, Iterator
from collections.abc import Set as AbstractSet
from contextlib import suppress
from pathlib import Path
from typing import Any

from composer_replication.sandbox import child_process
from composer_replication.sandbox.file_changes import FileChanges, call_numbers
from composer_replication.sandbox.process_tree import descendants
from composer_replication.sandbox.syscall_filter import filter_among_equals

_SECONDS_BETWEEN_WAITS, _SECONDS_BETWEEN_LOOKS = 0.05, 0.002
_PRIORITY = 10
_CAPABILITY_VERSION = 0x20080522
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_ACCESS_EXECUTE, _ACCESS_READ_FILE = 1 << 0, 1 << 2
_ACCESS = _ACCESS_EXECUTE | _ACCESS_READ_FILE
_RULE_PATH_BENEATH = 1


def main() -> None:
    """Exit as the command did (128 + N for signal N)."""
    child_process.keep(_run)


def _wait_for_orphans() -> None:
    """For ever: what lost its parent comes to us, and would count as a process after its end."""
    own: AbstractSet[int] = frozenset()
    while not own:  # the command itself, for which sandlock waits
        time.sleep(_SECONDS_BETWEEN_LOOKS)
        own = frozenset(descendants(os.getpid()))
    while True:
        time.sleep(_SECONDS_BETWEEN_WAITS)
        for pid in descendants(os.getpid()):
            if pid not in own:
                with suppress(ChildProcessError):  # another one's child
                    os.waitpid(pid, os.WNOHANG)


def _run(orders: dict[str, Any]) -> int:
    child_process.limit(orders["limits"])
    sys.path.append(orders["sandlock_path"])
    import sandlock

    orders["argv"] = [*_ahead_of_the_command(), *orders["argv"]]
    hide(Path(path) for path in orders["masked"])
    if os.geteuid() == 0:
        _drop_capabilities()
    child_process.refuse_calls(filter_among_equals())
    threading.Thread(target=_wait_for_orphans, daemon=True).start()
    result = _run_supervised(orders, sandlock)
    if result.reason == sandlock.ExitReason.SIGNALED and result.signal > 0:
        return 128 + int(result.signal)
    return int(result.exit_code) if result.reason == sandlock.ExitReason.EXITED else child_process.EXIT_KILLED


def _ahead_of_the_command() -> list[str]:
    """Have ourselves scheduled first, where we may; what puts the command back, to stand before it.

    A fork fails (EINTR) if a signal comes before sandlock has seen the call: in dash, of a pipeline's second program.
    """
    program = shutil.which("nice", path=os.defpath)  # not by the command's own PATH
    if program is None:
        return []
    before = os.getpriority(os.PRIO_PROCESS, 0)
    try:
        os.setpriority(os.PRIO_PROCESS, 0, before - _PRIORITY)
    except PermissionError:
        return []
    resource.setrlimit(resource.RLIMIT_NICE, (0, 0))  # the command does not raise itself again
    return [program, "-n", str(before - os.getpriority(os.PRIO_PROCESS, 0))]


def _run_supervised(orders: dict[str, Any], sandlock: Any) -> Any:
    """Run the command with the calls that ``FileChanges`` makes for it; what sandlock says of its end."""
    # Only answers that are coroutines need it, and it would take a third of the whole start.
    sys.modules.setdefault("asyncio", types.ModuleType("asyncio"))
    from sandlock import _sdk, handler

    policy = orders["policy"]
    changes = FileChanges(policy["fs_writable"], policy["fs_readable"], orders["masked"])
    names = call_numbers()

    class Answers(handler.Handler):  # type: ignore[misc]  # it has no types
        """A call whose answer fails is refused."""

        on_exception = handler.ExceptionPolicy.DENY_EPERM

        def handle(self, ctx: Any) -> Any:
            try:
                return handler.NotifAction.returns(changes.answer(names[ctx.syscall_nr], ctx))
            except OSError as error:
                return handler.NotifAction.errno(error.errno)

    # The one method that takes handlers keeps the output for itself; the library can leave it to the command.
    library: Any = getattr(_sdk, "_lib", None)
    if not hasattr(library, "sandlock_run_interactive_with_handlers"):
        raise OSError("this version of sandlock has no such call any more: pip install 'sandlock>=0.9,<0.10'")
    library.sandlock_run_with_handlers = library.sandlock_run_interactive_with_handlers
    result = sandlock.Sandbox(**policy).run_with_handlers(orders["argv"], [(n, Answers()) for n in names])
    if result.error:
        raise OSError(result.error)
    return result


def _drop_capabilities() -> None:
    """Root without a single capability is an ordinary user that owns root's files."""
    with suppress(PermissionError):  # a container's root may be such a one already, and keeps its groups
        os.setgroups([])
    child_process.drop_bounding_set()
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0)
    nothing = (ctypes.c_uint32 * 6)()
    child_process.checked(
        ctypes.CDLL(None, use_errno=True).capset(header, nothing), "capabilities cannot be dropped"
    )


def hide(masked: Iterable[Path]) -> None:
    """Make ``masked`` (resolved paths) unreadable for this thread and its children, for good.

    Landlock can only allow. "Everything but X" is therefore a rule for every neighbour of X and of each folder above it;
    layers intersect, so this one takes X out of whatever a further layer allows. Names below X stay listable.
    """
    hidden = {path for path in masked if path.exists()}
    if not hidden:
        return
    library = ctypes.CDLL(None, use_errno=True)
    attributes = ctypes.create_string_buffer(struct.pack("=Q", _ACCESS))
    ruleset = child_process.checked(library.syscall(_CREATE_RULESET, attributes, 8, 0))
    try:
        for path in _neighbours(hidden):
            try:
                descriptor = os.open(path, os.O_PATH | os.O_NOFOLLOW)
            except OSError:
                continue  # not there any more, or not ours to see: not readable either
            try:
                if not stat.S_ISLNK(os.fstat(descriptor).st_mode):  # its target has its own rule
                    rule = ctypes.create_string_buffer(struct.pack("=Qi", _ACCESS, descriptor))
                    child_process.checked(library.syscall(_ADD_RULE, ruleset, _RULE_PATH_BENEATH, rule, 0))
            finally:
                os.close(descriptor)
        child_process.checked(library.prctl(child_process.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
        child_process.checked(library.syscall(_RESTRICT_SELF, ruleset, 0))
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
