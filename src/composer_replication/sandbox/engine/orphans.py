"""Containers whose process is gone: found by their label, and removed by the next one."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from functools import cache
from pathlib import Path

from composer_replication.sandbox.engine.container_request import LABEL, OWNER_LABEL
from composer_replication.sandbox.engine.engine_client import EngineClient, EngineRefusal
from composer_replication.sandbox.jailed_tree import failure


@cache
def owner() -> str:
    """This process: boot, namespace of process ids, process id and when it started. No other has the same."""
    pid = os.getpid()
    return f"{_boot()}:{os.stat('/proc/self/ns/pid').st_ino}:{pid}:{_start_of(pid)}"


def is_dead(name: str) -> bool:
    """Whether an ``owner`` is known to be gone; somebody of another machine or namespace is left alone."""
    with suppress(ValueError):
        boot, namespace, pid, start = name.split(":")
        if (boot, int(namespace)) == (_boot(), os.stat("/proc/self/ns/pid").st_ino):
            return _start_of(int(pid)) != start
    return False


def remove_orphans(client: EngineClient) -> int:
    """Remove, running or not, the containers of dead processes of this machine; how many.

    Raises:
        SandboxFailure: no engine (CR0320), or it does not list its containers (CR0321).
    """
    query = {"all": "1", "filters": json.dumps({"label": [LABEL]})}
    try:
        found = client.ask("GET", "/containers/json", query=query) or []
    except EngineRefusal as error:
        raise failure("CR0321", f"the engine does not list its containers: {error.message}.") from error
    num_removed = 0
    for container in found:
        if is_dead(str((container.get("Labels") or {}).get(OWNER_LABEL, ""))):
            with suppress(EngineRefusal):  # somebody else was quicker
                client.ask("DELETE", f"/containers/{container['Id']}", query={"force": "1", "v": "1"})
                num_removed += 1
    return num_removed


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _start_of(pid: int) -> str:
    with suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[19]
    return ""
