"""What one command leaves for the next, and one rollout for another: memory, queues, keys, start-up files, code."""

from __future__ import annotations

from pathlib import Path

from benchmarks.escapes.attempt import Attempt, Drive, Outcome, family
from benchmarks.escapes.drives import Stage, next_command, next_rollout, next_with
from benchmarks.escapes.judges import mark_in_last, ran_with_privileges
from benchmarks.escapes.scene import Scene

_KEY = "key = int(TOLD['token'][-6:], 16)\n"
_SITE = "site = os.environ['HOME'] + '/.local/lib/python%d.%d/site-packages' % sys.version_info[:2]\nos.makedirs(site)\n"
_CODE = "code = 'import sys; sys.stderr.write(%r)\\n' % TOLD['mark']\n"
_FAKE = _CODE + "program = '#!/bin/sh\\necho ' + TOLD['mark'] + '\\n'\n"
_TELLING = (
    "os.makedirs('bin', exist_ok=True)\n"
    'program = \'#!/bin/sh\\nPATH=/usr/bin:/bin\\ngrep CapEff /proc/self/status >> "${0%/*}/../said"\\nexec "/usr/bin/${0##*/}" "$@"\\n\'\n'
)
_MACHINE = "it would change this machine's own files"
_CLEAN = "print('clean')"


def _after_restore(script: str, *, is_module: bool = False) -> Drive:
    """The tree is brought back to what it was, and a trusted command runs in it."""

    def drive(stage: Stage) -> None:
        stage.sandbox.write_file("trusted.py", b"ANSWER = 'clean'\n")
        name = stage.sandbox.snapshot()
        stage.run(stage.command(mark=stage.scene.mark))
        stage.sandbox.restore(name)
        python = stage.command()[0]
        stage.run([python, "-m", script] if is_module else [python, "-c", script])

    return drive


def _loader_changed(scene: Scene, _: Outcome) -> str:
    for name in ("/etc/ld.so.preload", "/etc/ld.so.conf.d/poison.conf"):
        place = Path(name)
        if place.exists() and scene.token in place.read_text(errors="replace"):
            place.unlink()
            return f"{name} was written"
    return ""


_PLACES = {
    "System V shared memory": (
        _KEY + "number = call(29, key, 4096, 0o1666)\nLIBRARY.shmat.restype = ctypes.c_void_p\n"
        "at = LIBRARY.shmat(number, None, 0)\nctypes.memmove(at, TOLD['mark'].encode(), 20)",
        _KEY + "number = call(29, key, 4096, 0)\nLIBRARY.shmat.restype = ctypes.c_void_p\n"
        "at = LIBRARY.shmat(number, None, 0)\nshow(ctypes.string_at(at, 20))\ncall(31, number, 0, 0)",
    ),
    "a System V queue": (
        _KEY + "number = call(68, key, 0o1666)\ncall(69, number, struct.pack('q', 1) + TOLD['mark'].encode(), 20, 0)",
        _KEY + "number = call(68, key, 0)\nroom = ctypes.create_string_buffer(64)\ncall(70, number, room, 40, 0, 0o4000)\n"
        "show(room.raw)\ncall(71, number, 0, 0)",
    ),
    "a System V semaphore": (
        _KEY + "mark = TOLD['mark'].encode()\nnumber = call(64, key, len(mark), 0o1666)\n"
        "for place, value in enumerate(mark):\n    call(66, number, place, 16, value)",
        _KEY + "number = call(64, key, 0, 0)\nshow(bytes(call(66, number, place, 12, 0) for place in range(20)))\ncall(66, number, 0, 0, 0)",
    ),
    "a POSIX queue": (
        ("room = struct.pack('qqqqqqqq', 0, 4, 64, 0, 0, 0, 0, 0)\n"
        "held = call(240, text(TOLD['token']), 0o102, 0o666, room)\ncall(242, held, TOLD['mark'].encode(), 20, 0, None)"),
        ("held = call(240, text(TOLD['token']), 0o4002, 0, None)\nroom = ctypes.create_string_buffer(64)\n"
        "call(243, held, room, 64, None, None)\nshow(room.raw)\ncall(241, text(TOLD['token']))"),
    ),
    "a file in /dev/shm": (
        "write('/dev/shm/' + TOLD['token'], TOLD['mark'].encode())",
        "read('/dev/shm/' + TOLD['token'])\nos.unlink('/dev/shm/' + TOLD['token'])",
    ),
    "a file in /tmp": (
        "write('/tmp/' + TOLD['token'], TOLD['mark'].encode())",
        "read('/tmp/' + TOLD['token'])\nos.unlink('/tmp/' + TOLD['token'])",
    ),
    "a file in a folder of /tmp that is deep and closed": (
        ("os.chdir('/tmp')\nfor _ in range(230):\n    os.mkdir('aa')\n    os.chdir('aa')\n"
        "write(TOLD['token'], TOLD['mark'].encode())\nos.chmod('.', 0o500)"),
        "os.chdir('/tmp')\nfor _ in range(230):\n    os.chdir('aa')\nread(TOLD['token'])",
    ),
    "a file in /var/tmp": (
        "write('/var/tmp/' + TOLD['token'], TOLD['mark'].encode())",
        "read('/var/tmp/' + TOLD['token'])\nos.unlink('/var/tmp/' + TOLD['token'])",
    ),
    "an abstract socket of a daemon": (
        ("ours = socket.socket(socket.AF_UNIX)\nours.bind('\\0' + TOLD['token'] + '-k')\nours.listen()\n"
        "if detach():\n    ours.settimeout(8)\n    ours.accept()[0].send(TOLD['mark'].encode())\n    os._exit(0)"),
        "ours = socket.socket(socket.AF_UNIX)\nours.connect('\\0' + TOLD['token'] + '-k')\nshow(ours.recv(99))",
    ),
    "a name of a process": (
        ("if detach():\n    LIBRARY.prctl(15, TOLD['mark'][-15:].encode(), 0, 0, 0)\n    write('mark', TOLD['mark'].encode())\n    stay(4)\n    os._exit(0)\n"
        "while not os.path.exists('mark'):\n    time.sleep(0.01)\nos.unlink('mark')"),
        ("for name in os.listdir('/proc'):\n    with suppress(OSError):\n        if name.isdigit() and TOLD['token'] in open(f'/proc/{name}/cmdline').read():\n"
        "            show(open(f'/proc/{name}/cmdline').read())"),
    ),
}  # fmt: skip

_KEYS = {
    "the session": ("-3", "-3"),
    "the user": ("-4", "-4"),
    "the user's session": ("-5", "-5"),
    "the process above": ("-2", "-2"),
}  # fmt: skip

ATTEMPTS: list[Attempt] = [
    *family(
        "left for the next command",
        [
            (name, first, mark_in_last, {"drive": next_command(second)})
            for name, (first, second) in _PLACES.items()
        ],
    ),
    *family(
        "keyrings",
        [
            *(
                (
                    f"a key for the next command in the keyring of {name}",
                    f"call(248, text('user'), text(TOLD['token']), TOLD['mark'].encode(), 20, {first})",
                    mark_in_last,
                    {
                        "drive": next_command(
                            f"number = call(250, 10, {second}, text('user'), text(TOLD['token']), 0)\n"
                            "room = ctypes.create_string_buffer(64)\ncall(250, 11, number, room, 64)\nshow(room.raw)\n"
                            f"call(250, 9, number, {second})"
                        ),
                        "not_without_jail": ""
                        if name in {"the user", "the session"}
                        else "it is gone with its process there",
                    },
                )
                for name, (first, second) in _KEYS.items()
            ),
        ],
    ),
    *family(
        "left for the next rollout",
        [
            (
                "a file in HOME",
                "write(os.environ['HOME'] + '/left', TOLD['mark'].encode())",
                mark_in_last,
                {"drive": next_rollout("read(os.environ['HOME'] + '/left')")},
            ),
            (
                "a file in TMPDIR",
                "write(os.environ['TMPDIR'] + '/left', TOLD['mark'].encode())",
                mark_in_last,
                {"drive": next_rollout("read(os.environ['TMPDIR'] + '/left')")},
            ),
            (
                "a file beside the tree",
                "write('../left', TOLD['mark'].encode())",
                mark_in_last,
                {"drive": next_rollout("read('../left')")},
            ),
            (
                "an attribute of the folder above",
                "os.setxattr('..', 'user.left', TOLD['mark'].encode())",
                mark_in_last,
                {"drive": next_rollout("show(os.getxattr('..', 'user.left'))")},
            ),
            (
                "a file in /tmp",
                _PLACES["a file in /tmp"][0],
                mark_in_last,
                {"drive": next_rollout(_PLACES["a file in /tmp"][1])},
            ),
            (
                "in the counters of the loopback device",
                (
                    "sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\nsock.bind(('127.0.0.1', 0))\n"
                    "for _ in range(100):\n    sock.sendto(bytes(60000), sock.getsockname())\n    sock.recv(60000)"
                ),
                lambda _, outcome: (
                    "the second life knows that the first one used the network"
                    if len(outcome.results) > 1 and "many bytes" in outcome.results[-1].stdout
                    else ""
                ),
                {
                    "drive": next_rollout(
                        "counted = open('/proc/net/dev').read().rpartition('lo:')[2].split()\n"
                        "if int(counted[0]) > 6_000_000: show('many bytes')"
                    )
                },
            ),
            (
                "in the size of HOME",
                "for number in range(40):\n    write(os.environ['HOME'] + '/' + 'n' * 240 + str(number))",
                lambda _, outcome: (
                    "the second life knows that the first one had many files"
                    if len(outcome.results) > 1 and "it grew" in outcome.results[-1].stdout
                    else ""
                ),
                {
                    "drive": next_rollout("if os.stat(os.environ['HOME']).st_size > 8192: show('it grew')"),
                    "not_without_jail": "HOME is this machine's own there",
                },
            ),
            (
                "a .pth file",
                _SITE + _CODE + "write(site + '/poison.pth', code.encode())",
                mark_in_last,
                {"drive": next_rollout(_CLEAN, isolated=False)},
            ),
            (
                "a program in HOME",
                _FAKE
                + "os.makedirs(os.environ['HOME'] + '/bin')\nname = os.environ['HOME'] + '/bin/ls'\nwrite(name, program.encode())\nos.chmod(name, 0o755)",
                mark_in_last,
                {"drive": next_rollout("", command="ls")},
            ),
        ],
    ),
    *family(
        "start-up files of the interpreter",
        [
            (
                "a .pth file of the user",
                _SITE + _CODE + "write(site + '/poison.pth', code.encode())",
                mark_in_last,
                {"drive": next_command(_CLEAN, isolated=False)},
            ),
            (
                "a usercustomize",
                _SITE + _CODE + "write(site + '/usercustomize.py', code.encode())",
                mark_in_last,
                {"drive": next_command(_CLEAN, isolated=False)},
            ),
            (
                "a sitecustomize of the user",
                _SITE + _CODE + "write(site + '/sitecustomize.py', code.encode())",
                mark_in_last,
                {"drive": next_command(_CLEAN, isolated=False)},
            ),
            (
                "a module of the standard library in the tree, after a restore",
                _CODE + "write('json.py', code.encode())",
                mark_in_last,
                {"drive": _after_restore("import json")},
            ),
            (
                "a module in the tree under the name of a program, after a restore",
                _CODE
                + "os.makedirs('this')\nwrite('this/__main__.py', code.encode())\nwrite('this/__init__.py')",
                mark_in_last,
                {"drive": _after_restore("this", is_module=True)},
            ),
        ],
    ),
    *family(
        "poisoned compiled code",
        [
            (
                "unchecked, after a restore",
                _CODE + "import importlib.util\nimport marshal\n"
                "body = marshal.dumps(compile(code, 'trusted.py', 'exec'))\nos.makedirs('__pycache__', exist_ok=True)\n"
                "write(f\"__pycache__/trusted.{TOLD['cache_tag']}.pyc\", importlib.util.MAGIC_NUMBER + struct.pack('<I', 1) + bytes(8) + body)",
                mark_in_last,
                {"drive": _after_restore("import trusted")},
            ),
            (
                "with the time and size of the source, after a restore",
                _CODE + "import importlib.util\nimport marshal\ninfo = os.stat('trusted.py')\n"
                "body = marshal.dumps(compile(code, 'trusted.py', 'exec'))\nos.makedirs('__pycache__', exist_ok=True)\n"
                "write(f\"__pycache__/trusted.{TOLD['cache_tag']}.pyc\", importlib.util.MAGIC_NUMBER + struct.pack('<III', 0, int(info.st_mtime), info.st_size) + body)",
                mark_in_last,
                {"drive": _after_restore("import trusted")},
            ),
            (
                "without a source, after a restore",
                _CODE + "import importlib.util\nimport marshal\n"
                "write('colorsys.pyc', importlib.util.MAGIC_NUMBER + bytes(12) + marshal.dumps(compile(code, 'x', 'exec')))",
                mark_in_last,
                {"drive": _after_restore("import colorsys")},
            ),
        ],
    ),
    *family(
        "poisoned PATH",
        [
            (
                "a program in the tree",
                _FAKE + "write('ls', program.encode())\nos.chmod('ls', 0o755)",
                mark_in_last,
                {"drive": next_command("", command="ls")},
            ),
            (
                "a program in HOME",
                _FAKE
                + "os.makedirs(os.environ['HOME'] + '/bin')\nname = os.environ['HOME'] + '/bin/ls'\nwrite(name, program.encode())\nos.chmod(name, 0o755)",
                mark_in_last,
                {"drive": next_command("", command="ls")},
            ),
            (
                "an interpreter in the tree",
                _FAKE + "write('python3', program.encode())\nos.chmod('python3', 0o755)",
                mark_in_last,
                {"drive": next_command("", command="python3 -c 'print(1)'")},
            ),
            (
                "a program in a folder of PATH",
                _FAKE
                + "for folder in os.environ['PATH'].split(':'):\n    with suppress(OSError):\n        write(folder + '/' + TOLD['token'], program.encode())\n        os.chmod(folder + '/' + TOLD['token'], 0o755)",
                mark_in_last,
                {
                    "drive": next_rollout("os.execvp(TOLD['token'], [TOLD['token']])"),
                    "not_without_jail": _MACHINE,
                },
            ),
            (
                "a program that starts the jail, by the variables of a command",
                _TELLING + "for name in ('setpriv', 'env', 'sh', 'bwrap', 'python3', 'mount'):\n"
                "    write('bin/' + name, program.encode())\n    os.chmod('bin/' + name, 0o755)",
                ran_with_privileges,
                {
                    "drive": next_with(lambda stage: {"PATH": f"{stage.scene.tree}/bin:/usr/bin:/bin"}),
                    "only_for": "root",
                },
            ),
        ],
    ),
    *family(
        "LD_PRELOAD",
        [
            (
                "for every program",
                "write('/etc/ld.so.preload', b'/' + TOLD['token'].encode())",
                _loader_changed,
                {"not_without_jail": _MACHINE},
            ),
            (
                "a folder for every program",
                "write('/etc/ld.so.conf.d/poison.conf', b'/' + TOLD['token'].encode())",
                _loader_changed,
                {"not_without_jail": _MACHINE},
            ),
            (
                "a variable for the next command",
                "os.environ['LD_PRELOAD'] = '/' + TOLD['mark']\nwith open('/proc/self/environ', 'r+b') as own:\n    own.write(b'x')",
                mark_in_last,
                {
                    "drive": next_command("", command="true"),
                    "not_without_jail": "it has no effect there either",
                },
            ),
            (
                "a file of variables that shells and logins read",
                (
                    "for name in ('.bashrc', '.profile', '.bash_profile', '.pam_environment', '.environment'):\n"
                    "    write(os.environ['HOME'] + '/' + name, b'export LD_PRELOAD=/' + TOLD['mark'].encode() + b'\\n')"
                ),
                mark_in_last,
                {
                    "drive": next_command("", command="true"),
                    "not_without_jail": "it has no effect there either",
                },
            ),
        ],
    ),
]
