"""A process of ours around one command: started with its orders, ended with all that the command left."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from composer_replication.sandbox.process_tree import descendants, kill_descendants

# The packages are named to the child without running their __init__: half of its start-up time.
_LAUNCH = """
import sys, types
for name, folder in {folders!r}.items():
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [folder]
from composer_replication.sandbox.{module} import main
main()
"""


def start_keeper(
    module: str, orders: Mapping[str, Any], environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """Run ``main`` of a module of this folder, with its orders as JSON in the descriptor that its argument names.

    Raises:
        OSError: no process can be started.
    """
    descriptor = os.memfd_create("orders")
    try:
        with os.fdopen(os.dup(descriptor), "w") as handle:
            json.dump(orders, handle)
        os.lseek(descriptor, 0, os.SEEK_SET)
        program = launch_program(_package_folders(), module)
        return subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", program, str(descriptor)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=dict(environment),
            pass_fds=[descriptor],
            start_new_session=True,
        )
    finally:
        os.close(descriptor)


def launch_program(folders: Mapping[str, str], module: str) -> str:
    """The text of a program that runs ``main`` of a module of this folder; ``folders`` has the packages by name."""
    return _LAUNCH.format(folders=dict(folders), module=module)


def end_keeper(process: subprocess.Popen[bytes]) -> bool:
    """Kill what the command left, then the process around it, which collects orphans.

    False if something lives, or may: a keeper that was killed itself has left its orphans to others.
    """
    if process.poll() is not None:
        return process.returncode >= 0
    is_clean = kill_descendants(process.pid)
    dead = descendants(process.pid)
    process.kill()
    process.wait()
    for pid in dead:  # process 1 collects them now; in a container that may be us
        with suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)
    return is_clean


def _package_folders() -> dict[str, str]:
    here = Path(__file__).resolve().parent
    return {"composer_replication": str(here.parent), "composer_replication.sandbox": str(here)}
