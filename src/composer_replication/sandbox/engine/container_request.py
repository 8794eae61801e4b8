"""What one container is allowed, as the body of ``POST /containers/create``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from composer_replication.records import Limits

LABEL = "composer-rl.sandbox"
OWNER_LABEL = "composer-rl.owner"
_NUM_INIT_PROCESSES = 1


@dataclass(frozen=True, slots=True)
class Inside:
    """Who runs the command and in what.

    Args:
        image: by name.
        user: ``UID:GID`` inside.
        runtime: of the engine, ``runsc`` for gVisor; empty for its default.
        user_namespace: ``UsernsMode``; empty for the engine's default.
        security_options: beyond ``no-new-privileges``; ``label=disable`` where SELinux closes mounted folders.
        owner: who may be dead when the container is found later.
    """

    image: str
    user: str
    runtime: str = ""
    user_namespace: str = ""
    security_options: tuple[str, ...] = ()
    owner: str = ""


def container_request(
    inside: Inside,
    argv: Sequence[str],
    *,
    env: Mapping[str, str],
    working_directory: Path,
    mounts: Iterable[tuple[Path, Path, bool]],
    limits: Limits,
) -> dict[str, Any]:
    """A container without network, capabilities, writable root or anything of the engine's comfort.

    There is no tmpfs: what is written lies in mounted folders of ours, where it counts towards
    ``disk_bytes`` whatever the place. ``AutoRemove`` is off, because how the container ended (out of
    memory, say) is asked after its end; it is removed then, and by label if we are gone.
    """
    host: dict[str, Any] = {
        "NetworkMode": "none",
        "ReadonlyRootfs": True,
        "Privileged": False,
        "CapDrop": ["ALL"],
        "SecurityOpt": ["no-new-privileges", *inside.security_options],
        "PidsLimit": limits.num_processes + _NUM_INIT_PROCESSES,
        "Memory": limits.memory_bytes,
        "MemorySwap": limits.memory_bytes,
        "IpcMode": "private",
        "CgroupnsMode": "private",
        "Init": True,
        "AutoRemove": False,
        "RestartPolicy": {"Name": "no"},
        "LogConfig": {"Type": "none", "Config": {}},
        "Ulimits": [
            {"Name": "core", "Soft": 0, "Hard": 0},
            {"Name": "data", "Soft": limits.memory_bytes, "Hard": limits.memory_bytes},
            {"Name": "fsize", "Soft": limits.disk_bytes, "Hard": limits.disk_bytes},
            {"Name": "nofile", "Soft": limits.num_open_files, "Hard": limits.num_open_files},
        ],
        "Mounts": [
            {
                "Type": "bind",
                "Source": str(source),
                "Target": str(place),
                "ReadOnly": is_read_only,
                "BindOptions": {"Propagation": "rprivate"},
            }
            for source, place, is_read_only in mounts
        ],
    }
    if inside.runtime:
        host["Runtime"] = inside.runtime
    if inside.user_namespace:
        host["UsernsMode"] = inside.user_namespace
    return {
        "Image": inside.image,
        "Entrypoint": list(argv),
        "Cmd": [],
        "Env": [f"{name}={value}" for name, value in env.items()],
        "WorkingDir": str(working_directory),
        "User": inside.user,
        "Hostname": "sandbox",
        "Labels": {LABEL: "1", OWNER_LABEL: inside.owner},
        "Tty": False,
        "OpenStdin": True,
        "StdinOnce": True,
        "AttachStdin": True,
        "AttachStdout": True,
        "AttachStderr": True,
        "NetworkDisabled": True,
        "StopSignal": "SIGKILL",
        "Healthcheck": {"Test": ["NONE"]},
        "HostConfig": host,
    }
