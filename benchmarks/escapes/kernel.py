"""More rights: privileges, namespaces, mounts, cgroups, kernel interfaces, keys, devices."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from pathlib import Path

from benchmarks.escapes.attempt import Attempt, Outcome, any_of, family
from benchmarks.escapes.drives import Stage
from benchmarks.escapes.judges import (
    became_root,
    changed,
    descriptor_of,
    has_capabilities,
    in_group_of_root,
    new_namespace,
    secret,
)
from benchmarks.escapes.scene import Scene

_MANY_PLACES = 5000
_MOUNTS = "it would change the mounts of this machine"
_NEW = {"user": 0x10000000, "mount": 0x20000, "network": 0x40000000, "process": 0x20000000, "IPC": 0x8000000,
        "name": 0x4000000, "cgroup": 0x2000000, "time": 0x80}  # fmt: skip


def _setuid_left(_: Scene, outcome: Outcome) -> str:
    found = outcome.notes.get("setuid", [])
    return f"the tree holds {found[0]} of ours with the setuid or setgid bit" if found else ""


def _cgroup_made(scene: Scene, _: Outcome) -> str:
    places = [*Path("/sys/fs/cgroup").glob(scene.token), *Path("/sys/fs/cgroup").glob(f"*/{scene.token}")]
    for place in places:
        place.rmdir()
    return f"it made {places[0]}" if places else ""


def _device_bytes(_: Scene, outcome: Outcome) -> str:
    """The first bytes of a block device came out; hexadecimal."""
    for name in ("vda", "sda", "nvme0n1", "xvda"):
        place = Path("/dev") / name
        with contextlib.suppress(OSError), place.open("rb") as device:  # absent, or closed even to us
            if device.read(4096)[1024:1536].hex().encode() in outcome.text():
                return f"the content of /dev/{name} came out"
    return ""


def _device_made(scene: Scene, _: Outcome) -> str:
    import stat

    found = [
        path
        for path in scene.tree.iterdir()
        if stat.S_ISBLK(path.lstat().st_mode) or stat.S_ISCHR(path.lstat().st_mode)
    ]
    return f"it made the device {found[0].name}" if found else ""


def _places_taken() -> int:
    return int(Path("/proc/sys/fs/aio-nr").read_text())


def _places_looked_at(stage: Stage) -> None:
    """The attempt; how many of the machine's places were taken at most meanwhile."""
    runner = threading.Thread(target=stage.run)
    runner.start()
    most = 0
    while runner.is_alive():
        most = max(most, _places_taken())
        time.sleep(0.01)
    stage.outcome.notes["places"] = most


def _took_places(_: Scene, outcome: Outcome) -> str:
    taken = outcome.notes.get("places", 0)
    return f"{taken} places for asynchronous input were taken" if taken >= _MANY_PLACES else ""


def _in_kernel_log(scene: Scene, _: Outcome) -> str:
    found = any(scene.token.encode() in record for record in _kernel_log())
    return "it wrote into the log of the kernel" if found else ""


def _kernel_log_read(_: Scene, outcome: Outcome) -> str:
    """A long line of the kernel's log came out."""
    lines = [record.partition(b";")[2].split(b"\n")[0] for record in _kernel_log()]
    found = any(len(line) > 30 and line in outcome.text() for line in lines)
    return "the log of the kernel came out" if found else ""


def _kernel_log() -> list[bytes]:
    found: list[bytes] = []
    with contextlib.suppress(OSError):
        descriptor = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)
        try:
            while True:
                with contextlib.suppress(BrokenPipeError):  # a record was overwritten meanwhile
                    found.append(os.read(descriptor, 8192))
        finally:
            os.close(descriptor)
    return found


_SETUID = "import shutil\nshutil.copy('/bin/true', 'mine')\nos.chmod('mine', {mode:#o})"
_HOLD = "\nstay(1)"

ATTEMPTS: list[Attempt] = [
    *family(
        "privileges",
        [
            (
                "user id 0",
                "os.setgid(0)\nos.setuid(0)\nstay(1)",
                any_of(became_root, has_capabilities),
                {"only_for": "root", "is_watched": True},
            ),
            (
                "the saved user id",
                "for numbers in ((0, 0, 0), (-1, 0, -1), (0, -1, -1)):\n    with suppress(OSError):\n        os.setresuid(*numbers)\nstay(1)",
                any_of(became_root, has_capabilities),
                {"only_for": "root", "is_watched": True},
            ),
            (
                "groups",
                "os.setgroups([0])\nstay(1)",
                any_of(has_capabilities, in_group_of_root),
                {"only_for": "root", "is_watched": True},
            ),
            (
                "capabilities again",
                "with suppress(OSError):\n    call(126, (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)(*[0xffffffff] * 6))"
                + _HOLD,
                has_capabilities,
                {"is_watched": True},
            ),
            (
                "capabilities that last",
                "for number in range(41):\n    LIBRARY.prctl(47, 2, number, 0, 0)\nif len(sys.argv) == 3:\n    os.execv(sys.executable, [sys.executable, '-I', '-S', '-c', 'import time; time.sleep(1)', *sys.argv[1:], 'again'])",
                has_capabilities,
                {"is_watched": True, "only_for": "root"},
            ),
            ("a setuid file left behind", _SETUID.format(mode=0o4755), _setuid_left),
            ("a setgid file left behind", _SETUID.format(mode=0o2755), _setuid_left),
            (
                "a program with the setuid bit",
                "for name in ('/bin/su', '/usr/bin/su', '/usr/bin/newgrp', '/usr/bin/passwd', '/bin/mount'):\n"
                "    if os.path.exists(name) and os.fork() == 0:\n        os.close(0)\n        os.execv(name, [name, '--version'])\n"
                + _HOLD.strip(),
                has_capabilities,
                {
                    "is_watched": True,
                    "only_for": "user",
                    "not_without_jail": "such a program has capabilities for a moment there, as it should",
                },
            ),
        ],
    ),
    *family(
        "namespaces",
        [
            *(
                (
                    f"a new {name} namespace",
                    f"call(272, {flag:#x})"
                    + ("\nif os.fork() == 0:\n    stay(1)" if name in {"process", "time"} else "")
                    + _HOLD,
                    any_of(new_namespace, has_capabilities) if name == "user" else new_namespace,
                )
                for name, flag in _NEW.items()
            ),
            (
                "a child in a new user namespace",
                "if call(56, 0x10000000 | 17, 0, 0, 0, 0) == 0:\n    stay(1)\n    os._exit(0)\nstay(1)",
                any_of(new_namespace, has_capabilities),
            ),
            (
                "a child in a new user namespace, by the newer call",
                "room = (ctypes.c_uint64 * 11)(0x10000000, 0, 0, 0, 17)\nif call(435, room, 88) == 0:\n    stay(1)\n    os._exit(0)\nstay(1)",
                any_of(new_namespace, has_capabilities),
            ),
            (
                "those of an outside process",
                (
                    "for name in ('mnt', 'user', 'net', 'pid'):\n    with suppress(OSError):\n"
                    "        call(308, os.open(f\"/proc/{TOLD['pid']}/ns/{name}\", os.O_RDONLY), 0)\nread(TOLD['secret'])"
                ),
                secret,
                {"has_victim": True},
            ),
            (
                "those of an outside process, by a handle",
                "call(308, os.pidfd_open(TOLD['pid']), 0x20000)\nread(TOLD['secret'])",
                secret,
                {"has_victim": True, "only_for": "root"},
            ),
            (
                "a root of its own",
                "os.mkdir('jail')\nos.chroot('jail')\nfor _ in range(20):\n    os.chdir('..')\nos.chroot('.')\nread(TOLD['secret'])",
                secret,
                {"only_for": "root"},
            ),
        ],
        is_watched=True,
    ),
    *family(
        "mounts",
        [
            (
                "the outside over the tree",
                "call(165, text(TOLD['outside']), text('folder'), 0, 4096, 0)\nread('folder/secret.txt')",
                secret,
            ),
            (
                "a new mount, made in steps",
                "held = call(428, -100, text('/'), 1)\nread(f\"/proc/self/fd/{held}{TOLD['secret']}\")",
                secret,
            ),
            (
                "a mount taken along",
                "held = call(428, -100, text(TOLD['shown']), 0x8001)\ncall(429, held, text(''), -100, text('folder'), 4)\nread('folder/inner/masked/deep/hidden.txt')",
                secret,
            ),
            (
                "a file system of its own",
                "held = call(430, text('tmpfs'), 0)\nstay(1)",
                descriptor_of("fscontext"),
                {"is_watched": True},
            ),
            (
                "attributes of a mount",
                "call(442, -100, text(TOLD['shown']), 0, (ctypes.c_uint64 * 4)(0, 1, 0, 0), 32)\nwrite(TOLD['shown'] + '/target.txt')",
                changed,
            ),
            ("the mask taken off", "call(166, text(TOLD['masked_folder']), 2)\nread(TOLD['masked'])", secret),
            (
                "another root",
                "os.mkdir('old')\ncall(155, text('.'), text('old'))\nread('/old' + TOLD['secret'])",
                secret,
            ),
            (
                "the processes of the host",
                "os.mkdir('proc')\ncall(165, text('proc'), text('proc'), text('proc'), 0, 0)\nfor name in os.listdir('proc'):\n    with suppress(OSError):\n        if name.isdigit():\n            read(f'proc/{name}/cmdline')",
                secret,
                {"has_victim": True},
            ),
        ],
        not_without_jail=_MOUNTS,
    ),
    *family(
        "cgroups",
        [
            (
                "a new one",
                "for place in ('/sys/fs/cgroup', *('/sys/fs/cgroup/' + name for name in ('memory', 'pids', 'cpu'))):\n    with suppress(OSError):\n        os.mkdir(f\"{place}/{TOLD['token']}\")",
                _cgroup_made,
            ),
            (
                "another one",
                "for folder, _, names in os.walk('/sys/fs/cgroup'):\n    if 'cgroup.procs' in names and TOLD['token'] in folder:\n        write(folder + '/cgroup.procs', b'0')\nos.mkdir(f\"/sys/fs/cgroup/{TOLD['token']}\")",
                _cgroup_made,
            ),
            (
                "a mount of them",
                "os.mkdir('cgroup')\nfor kind in ('cgroup', 'cgroup2'):\n    with suppress(OSError):\n        call(165, text('none'), text('cgroup'), text(kind), 0, 0)\nos.mkdir(f\"cgroup/{TOLD['token']}\")\nwrite(TOLD['target'])",
                any_of(_cgroup_made, changed),
                {"not_without_jail": _MOUNTS},
            ),
            (
                "the program that is run at their end",
                "write('/sys/fs/cgroup/memory/release_agent', TOLD['token'].encode())",
                lambda scene, _: "the release agent was changed" if _release_agent() == scene.token else "",
                {"not_without_jail": "it would change a setting of this machine"},
            ),
        ],
    ),
    *family(
        "kernel interfaces",
        [
            ("userfaultfd", "held = call(323, 1)" + _HOLD, descriptor_of("userfaultfd")),
            (
                "io_uring",
                "room = ctypes.create_string_buffer(120)\nheld = call(425, 4, room)" + _HOLD,
                descriptor_of("io_uring"),
            ),
            (
                "bpf maps",
                "room = (ctypes.c_uint32 * 32)(2, 4, 4, 1)\nheld = call(321, 0, room, 128)" + _HOLD,
                descriptor_of("bpf"),
            ),
            (
                "perf events",
                "room = (ctypes.c_uint64 * 16)(1 | 120 << 32, 1)\nheld = call(298, room, 0, -1, -1, 0)"
                + _HOLD,
                descriptor_of("perf_event"),
            ),
            ("fanotify", "held = call(300, 0x200, 0)" + _HOLD, descriptor_of("fanotify")),
            (
                "secret memory",
                "held = call(447, 0)\nos.truncate(held, 4096)" + _HOLD,
                descriptor_of("secretmem"),
            ),
            (
                "places for asynchronous input of the whole machine",
                f"call(206, {_MANY_PLACES}, ctypes.byref(ctypes.c_ulong(0)))\nstay(1)",
                _took_places,
                {"drive": _places_looked_at},
            ),
            (
                "the log of the kernel",
                "room = ctypes.create_string_buffer(1 << 16)\ncall(103, 3, room, 1 << 16)\nshow(room.raw.strip(b'\\0'))",
                _kernel_log_read,
                {"only_for": "root"},
            ),
        ],
        is_watched=True,
    ),
    *family(
        "devices",
        [
            (
                "the disk of the machine",
                "for name in ('vda', 'sda', 'nvme0n1', 'xvda'):\n    with suppress(OSError), open(f'/dev/{name}', 'rb') as device:\n        show(device.read(4096)[1024:1536].hex())",
                _device_bytes,
                {"only_for": "root"},
            ),
            (
                "a new block device",
                "os.mknod('device', 0o60666, os.makedev(254, 0))",
                _device_made,
                {"only_for": "root"},
            ),
            (
                "a new character device",
                "os.mknod('device', 0o20666, os.makedev(1, 1))",
                _device_made,
                {"only_for": "root"},
            ),
            (
                "the log of the kernel",
                "write('/dev/kmsg', b'<7>' + TOLD['token'].encode())",
                _in_kernel_log,
                {"not_without_jail": "it would write to the log of this machine"},
            ),
            (
                "a file system in user space",
                "held = os.open('/dev/fuse', os.O_RDWR)\nstay(1)",
                descriptor_of("fuse"),
                {"not_without_jail": "it proves nothing there"},
            ),
            (
                "a virtual machine",
                "held = os.open('/dev/kvm', os.O_RDWR)\nnumber = fcntl.ioctl(held, 0xae01, 0)\nstay(1)",
                descriptor_of("kvm"),
                {"is_watched": True},
            ),
        ],
    ),
]


def _release_agent() -> str:
    place = Path("/sys/fs/cgroup/memory/release_agent")
    return place.read_text().strip() if place.exists() else ""
