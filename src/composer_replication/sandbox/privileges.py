"""What this process may do as root: change the user id of a jail, for which the program ``setpriv`` is needed."""

from __future__ import annotations

import os
import resource
import shutil
from functools import cache
from pathlib import Path

from composer_replication.errors import SandboxFailure
from composer_replication.records import Limits
from composer_replication.sandbox.user_ids import are_mapped

_SYSTEM_PATH = "/usr/bin:/bin:/usr/sbin:/sbin"
_NEEDED = sum(1 << bit for bit in (0, 6, 7, 21))  # chown, setgid, setuid, sys_admin
_FLAGS = {
    resource.RLIMIT_DATA: ("memory_bytes", "-d"),
    resource.RLIMIT_FSIZE: ("disk_bytes", "-f"),
    resource.RLIMIT_NOFILE: ("num_open_files", "-n"),
}
"""By kind: the name in ``Limits``, and the flag of ``ulimit``."""


def drops_uid() -> bool:
    """As root with its capabilities we change the user id; without them, or other ids, a user namespace must do."""
    if os.geteuid() != 0 or not are_mapped():
        return False
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("CapEff:"):
            return int(line.split()[1], 16) & _NEEDED == _NEEDED
    return False


@cache
def setpriv() -> str | None:
    """The program by its whole path: what a command is given as ``PATH`` must not choose it."""
    return shutil.which("setpriv", path=_SYSTEM_PATH) or shutil.which("setpriv")


def check_own_limits(limits: Limits) -> None:
    """May this process give its children these limits? Only root raises what it was allowed itself.

    Raises:
        SandboxFailure: it was allowed less (CR0302).
    """
    if os.geteuid() == 0:
        return
    for kind, (name, flag) in _FLAGS.items():
        hard = resource.getrlimit(kind)[1]
        if hard != resource.RLIM_INFINITY and getattr(limits, name) > hard:
            raise SandboxFailure(
                "CR0302",
                f"a sandbox asks for {name}={getattr(limits, name)} and this process may have {hard} (ulimit -H{flag[1]}).",
                fix=f"raise that limit of this shell, or ask for less: Limits({name}={hard}).",
            )
