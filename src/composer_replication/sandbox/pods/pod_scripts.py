"""The shell inside a pod: POSIX ``sh`` with ``tar``, ``head``, ``find``, ``du``, ``env``; no Python of ours.

``kill -9 -1`` is how nothing is left: it reaches every process of the user except the shell that
says it and process 1, and the kernel lets no fork slip through. So commands of one pod run one at a time.
"""

from __future__ import annotations

import io
import shlex
import tarfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from composer_replication.records import Limits

FIRST_PROCESS = "trap 'exit 0' TERM; while :; do sleep 1; done"
STAGE_WAIT = "while [ ! -e /composer-stage/.complete ]; do sleep 0.2; done"
_MOST_MAPPED = 10000
_MAPPED = r"/ (deleted)$/s/^[^ ]* *[^ ]* *[^ ]* *[^ ]* *\([0-9]*\) *\(.*\)$/mapped \1 \2/p"  # number and name
_NUM_OWN_PROCESSES = 3  # process 1, its sleep, and the shell around the command

UNPACK_STAGE = 'head -c "$1" | tar -xf - -C /composer-stage && chmod -R a-w /composer-stage/* && : > /composer-stage/.complete'
"""Argument: how many bytes come."""

UNPACK_TREE = (
    'if [ -n "$3" ] && ! tar --version 2>/dev/null | grep -q GNU; then '
    'echo "a file has holes, which only GNU tar understands, and that of the image is another" >&2; exit 1; fi; '
    'cd "$2" && find . -mindepth 1 -maxdepth 1 -exec rm -rf -- {} + ; cd "$2" && head -c "$1" | tar -xpf -'
)
"""Arguments: how many bytes come, the tree, and a word where a file has holes."""

PACK_TREE = (
    'holes=; tar --version 2>/dev/null | grep -q GNU && holes=--sparse; exec tar $holes -cf - -C "$1" .'
)
"""Argument: the tree."""

RUN_ORDERS = 'd=$(mktemp -d /run/composer/orders-XXXXXX) && head -c "$1" | tar -xf - -C "$d" && cd "$d" && exec sh ./script'
"""Argument: how many bytes come. The orders are ``script`` and ``stdin``."""


def orders(
    argv: Sequence[str],
    env: Mapping[str, str],
    *,
    tree: Path,
    stdin: bytes,
    marker: str,
    limits: Limits,
) -> bytes:
    """What ``RUN_ORDERS`` unpacks and runs, as a tar file.

    Limits that a process may set itself are set here: memory and size of one file, open files, and
    processes of the user, which is the pod's alone.
    """
    words = ["env", "-i", *(f"{name}={value}" for name, value in env.items()), *argv]
    processes = limits.num_processes + _NUM_OWN_PROCESSES
    lines = [
        "exec 9<./stdin",
        'rm -rf -- "$PWD"',
        f"cd {shlex.quote(str(tree))} || exit 1",
        "ulimit -c 0",
        f"ulimit -d {limits.memory_bytes // 1024}",
        f"ulimit -f {limits.disk_bytes // 512}",
        f"ulimit -n {limits.num_open_files}",
        f"if (ulimit -u {processes}) 2>/dev/null; then ulimit -u {processes}; else ulimit -p {processes}; fi",
        f"printf %s {shlex.quote(marker)} >&2",
        f"{shlex.join(words)} <&9 9<&-",
        "code=$?",
        "kill -9 -1 2>/dev/null",
        "exit $code",
    ]
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name, data in (("script", "\n".join([*lines, ""]).encode()), ("stdin", stdin)):
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(data), 0o600
            archive.addfile(entry, io.BytesIO(data))
    return buffer.getvalue()


def kill_and_open(folders: Iterable[Path]) -> str:
    """Kill everything, then make what the command closed to its own user readable again."""
    places = " ".join(shlex.quote(str(folder)) for folder in folders)
    return (
        "kill -9 -1 2>/dev/null; kill -9 -1 2>/dev/null; "
        f"find {places} -type d ! -perm -700 -exec chmod u+rwx {{}} \\; 2>/dev/null; "
        f"find {places} -type f ! -perm -400 -exec chmod u+r {{}} + 2>/dev/null; true"
    )


def measure(folders: Iterable[Path]) -> str:
    """Lines of ``KIB PATH``; ``deleted BLOCKS DEVICE:FILE KIND`` for open files without a name; ``mapped FILE NAME``
    for mapped ones; ``shm DEVICE BLOCKS FREE BYTES`` where ``/dev/shm`` is a memory; ``oom NUMBER`` where the
    kernel says how many processes of the pod it killed for their memory.
    """
    places = " ".join(shlex.quote(str(folder)) for folder in folders)
    return (
        f"du -sk -- {places} 2>/dev/null; "
        'if [ "$(stat -f -c %T /dev/shm 2>/dev/null)" = tmpfs ]; '
        "then echo shm $(stat -c %d /dev/shm) $(stat -f -c '%b %f %S' /dev/shm); "
        "else du -sk -- /dev/shm 2>/dev/null; fi; "
        "find /proc/[0-9]*/fd -lname '* (deleted)' -exec stat -L -c 'deleted %b %d:%i %F' {} + 2>/dev/null; "
        f"sed -n '{_MAPPED}' /proc/[0-9]*/maps 2>/dev/null | sort -u | head -n {_MOST_MAPPED}; "
        "sed -n 's/^oom_kill /oom /p' /sys/fs/cgroup/memory.events 2>/dev/null; true"
    )


@dataclass(frozen=True, slots=True)
class Measured:
    """What ``measure`` printed; a file that several processes hold counts once.

    ``are_files_hidden``: one is deleted and mapped, and nobody has it open, who could tell its size.
    """

    used_bytes: int
    num_oom_kills: int
    are_files_hidden: bool = False

    @classmethod
    def of(cls, text: str) -> Measured:
        used, kills = 0, 0
        deleted: dict[str, int] = {}
        mapped: list[tuple[str, str]] = []
        memory = ""
        for line in text.split("\n"):
            words = line.split(None, 3)
            if len(words) == 4 and words[0] == "deleted" and words[1].isdigit():
                if words[3].startswith("regular"):
                    deleted[words[2]] = int(words[1]) * 512
            elif len(words) == 2 and words[0] == "oom" and words[1].isdigit():
                kills = int(words[1])
            elif len(words) == 4 and words[0] == "shm":
                memory = words[1]
                blocks, free, size = (int(word) for word in (words[2], *words[3].split()))
                used += (blocks - free) * size
            elif len(words) > 2 and words[0] == "mapped":
                mapped.append((words[1], words[2]))
            elif words and words[0].isdigit():
                used += int(words[0]) * 1024
        on_disk = {place: size for place, size in deleted.items() if place.partition(":")[0] != memory}
        opened = {place.partition(":")[2] for place in deleted}
        outside = ("/dev/zero", "/memfd:", "/SYSV", *(["/dev/shm/"] if memory else []))
        hidden = [file for file, name in mapped if file not in opened and not name.startswith(outside)]
        return cls(used + sum(on_disk.values()), kills, bool(hidden))
