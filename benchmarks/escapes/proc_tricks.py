"""Around the walls through ``/proc``, through descriptors that were inherited, through variables of the parent."""

from __future__ import annotations

from benchmarks.escapes.attempt import Attempt, Outcome, any_of, family
from benchmarks.escapes.drives import with_inherited
from benchmarks.escapes.judges import changed, secret
from benchmarks.escapes.scene import Scene

_INIT = "the first process there is the machine's own"
_WRITES = "it would write to the kernel of this machine"


def _through_pipe(_: Scene, outcome: Outcome) -> str:
    return "it wrote into a pipe of the parent" if outcome.notes.get("through_pipe") else ""


ATTEMPTS: list[Attempt] = [
    *family(
        "/proc",
        [
            (
                "the root of the first process",
                "read('/proc/1/root' + TOLD['secret'])",
                secret,
                {"not_without_jail": _INIT},
            ),
            ("its own root", "read('/proc/self/root' + TOLD['secret'])", secret),
            ("the root of a thread", "read(f'/proc/thread-self/root' + TOLD['secret'])", secret),
            (
                "the root of an outside process",
                "read(f\"/proc/{TOLD['pid']}/root{TOLD['private']}\")",
                secret,
            ),
            (
                "the working folder of an outside process",
                "read(f\"/proc/{TOLD['pid']}/cwd/secret.txt\")",
                secret,
            ),
            (
                "a descriptor of an outside process",
                "read(f\"/proc/{TOLD['pid']}/fd/{TOLD['held']}\")",
                secret,
            ),
            ("the variables of an outside process", "read(f\"/proc/{TOLD['pid']}/environ\")", secret),
            ("the command line of an outside process", "read(f\"/proc/{TOLD['pid']}/cmdline\")", secret),
            (
                "everybody's command line",
                "for name in os.listdir('/proc'):\n    with suppress(OSError):\n        if name.isdigit():\n            read(f'/proc/{name}/cmdline')",
                secret,
            ),
            (
                "the mapped files of an outside process",
                "for name in os.listdir(f\"/proc/{TOLD['pid']}/map_files\"):\n    show(name)\nread(f\"/proc/{TOLD['pid']}/root{TOLD['secret']}\")",
                secret,
            ),
            (
                "a folder of an outside process, for writing",
                "write(f\"/proc/{TOLD['pid']}/cwd/target.txt\")",
                changed,
            ),
            (
                "the folder above a descriptor",
                (
                    "for number in range(64):\n    with suppress(OSError):\n"
                    "        read(f\"/proc/self/fd/{number}/{'../' * 12}{TOLD['secret']}\")"
                ),
                secret,
                {"not_without_jail": "no folder is among its descriptors there; see inherited descriptors"},
            ),
        ],
        has_victim=True,
    ),
    *family(
        "inherited descriptors",
        [
            ("a file", "show(os.pread(TOLD['file'], 99, 0))", secret),
            (
                "a folder",
                "show(os.read(os.open('secret.txt', os.O_RDONLY, dir_fd=TOLD['folder']), 99))",
                secret,
            ),
            (
                "a folder, for writing",
                "os.write(os.open('target.txt', os.O_WRONLY, dir_fd=TOLD['folder']), b'change')",
                changed,
            ),
            ("a pipe", "os.write(TOLD['pipe'], b'hello')", _through_pipe),
            (
                "all numbers",
                (
                    "for number in range(3, 256):\n    with suppress(OSError):\n        show(os.pread(number, 99, 0))\n"
                    "    with suppress(OSError):\n        show(os.read(os.open('secret.txt', os.O_RDONLY, dir_fd=number), 99))"
                ),
                secret,
            ),
            (
                "out of the first process",
                (
                    "for number in range(64):\n    with suppress(OSError):\n        read(f'/proc/1/fd/{number}/secret.txt')\n"
                    "    with suppress(OSError):\n"
                    "        show(os.read(os.open(f'/proc/{os.getppid()}/fd/{number}', os.O_RDONLY | os.O_NONBLOCK), 99))"
                ),
                secret,
                {"not_without_jail": _INIT},
            ),
        ],
        drive=with_inherited,
    ),
    *family(
        "variables of the parent",
        [
            ("its own", "show(repr(dict(os.environ)))", secret),
            ("as the kernel keeps them", "read('/proc/self/environ')", secret),
            (
                "of the process above",
                "read(f'/proc/{os.getppid()}/environ')\nread('/proc/1/environ')",
                secret,
                {
                    "not_without_jail": "the process above is the benchmark, whose first variables have no secret"
                },
            ),
            ("of the shell", "os.execv('/bin/sh', ['sh', '-c', 'set; export -p'])", secret),
        ],
    ),
    *family(
        "core patterns and kernel settings",
        [
            (
                "the program for core dumps",
                "write('/proc/sys/kernel/core_pattern', TOLD['token'].encode())",
                any_of(lambda scene, _: _setting("core_pattern", scene), changed),
                {"not_without_jail": _WRITES},
            ),
            (
                "the program for modules",
                "write('/proc/sys/kernel/modprobe', TOLD['token'].encode())",
                lambda scene, _: _setting("modprobe", scene),
                {"not_without_jail": _WRITES},
            ),
            (
                "the name of the machine",
                "import socket as s\nwith suppress(OSError):\n    s.sethostname(TOLD['token'])\nwrite('/proc/sys/kernel/hostname', TOLD['token'].encode())",
                lambda scene, _: _setting("hostname", scene),
                {"not_without_jail": _WRITES},
            ),
            (
                "the domain of the machine",
                "write('/proc/sys/kernel/domainname', TOLD['token'].encode())",
                lambda scene, _: _setting("domainname", scene),
                {"not_without_jail": _WRITES},
            ),
            (
                "a core dump over a link",
                (
                    "with suppress(OSError, ValueError):\n    resource.setrlimit(resource.RLIMIT_CORE, (-1, -1))\n"
                    "os.symlink(TOLD['target'], 'core')\nos.kill(os.getpid(), signal.SIGSEGV)"
                ),
                changed,
                {"not_without_jail": "the kernel itself follows no link there"},
            ),
            (
                "a core dump at all",
                (
                    "with suppress(OSError, ValueError):\n    resource.setrlimit(resource.RLIMIT_CORE, (-1, -1))\n"
                    "os.kill(os.getpid(), signal.SIGSEGV)"
                ),
                lambda scene, _: "a core file was written" if list(scene.tree.glob("core*")) else "",
            ),
        ],
    ),
]


def _setting(name: str, scene: Scene) -> str:
    """Was a setting of the kernel changed? It is brought back."""
    from pathlib import Path

    place = Path("/proc/sys/kernel") / name
    if not place.exists() or place.read_text().strip() != scene.token:
        return ""
    place.write_text({"core_pattern": "core", "modprobe": "/sbin/modprobe"}.get(name, "localhost"))
    return f"kernel.{name} was changed"
