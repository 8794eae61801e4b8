"""Reading what lies outside: files of the host, the run folder, hidden tests, masked paths, neighbours."""

from __future__ import annotations

from benchmarks.escapes.attempt import Attempt, Outcome, any_of, family
from benchmarks.escapes.drives import beside_neighbour
from benchmarks.escapes.judges import contacted, secret
from benchmarks.escapes.scene import Scene

_HOLD = """
with open('ready', 'w') as ready:
    ready.write('1')
end = time.monotonic() + TOLD['timeout'] + 20
while not os.path.exists('end') and time.monotonic() < end:
    time.sleep(0.02)
"""
_LISTEN = """
ours = socket.socket()
with suppress(OSError):  # where there is no loopback at all
    ours.bind(('127.0.0.1', 0))
    ours.listen()
with open('ready', 'w') as ready:
    ready.write(str(ours.getsockname()[1]))
ours.settimeout(0.2)
end = time.monotonic() + TOLD['timeout'] + 20
while not os.path.exists('end') and time.monotonic() < end:
    time.sleep(0.02)
    with suppress(OSError):
        ours.accept()
        with open('hurt', 'w') as hurt:
            hurt.write('reached')
"""
_ABSTRACT = """
ours = socket.socket(socket.AF_UNIX)
with suppress(OSError):
    ours.bind('\\0' + TOLD['token'] + '-n')
    ours.listen()
with open('ready', 'w') as ready:
    ready.write('1')
ours.settimeout(0.2)
end = time.monotonic() + TOLD['timeout'] + 20
while not os.path.exists('end') and time.monotonic() < end:
    time.sleep(0.02)
    with suppress(OSError):
        ours.accept()
        with open('hurt', 'w') as hurt:
            hurt.write('reached')
"""


def _neighbour_hurt(scene: Scene, outcome: Outcome) -> str:
    note = outcome.notes.get("neighbour_note", b"")
    if note != scene.word.encode():
        return "a file of a neighbour was changed"
    if not outcome.notes.get("neighbour_was_alive", True):
        return "a process of a neighbour died"
    return "a neighbour was reached" if outcome.notes.get("neighbour_hurt") else ""


ATTEMPTS: list[Attempt] = [
    *family(
        "host files",
        [
            ("by path", "read(TOLD['secret'])", secret),
            ("of the user outside alone", "read(TOLD['private'])", secret),
            ("by a relative path", "read(os.path.relpath(TOLD['secret'], TOLD['tree']))", secret),
            ("through a link to a file in the tree", "read('way')", secret),
            ("through a link to a folder in the tree", "read('door/secret.txt')", secret),
            ("through a new link", "os.symlink(TOLD['secret'], 'new')\nread('new')", secret),
            ("a hard link to it", "os.link(TOLD['secret'], 'new')\nread('new')", secret),
            ("renamed into the tree", "os.rename(TOLD['secret'], 'new')\nread('new')", secret),
            (
                "a handle without reading, opened again",
                "held = os.open(TOLD['secret'], os.O_PATH)\nread(f'/proc/self/fd/{held}')",
                secret,
            ),
            (
                "by its file handle",
                (
                    "handle = ctypes.create_string_buffer(struct.pack('Ii', 128, 0) + bytes(128))\n"
                    "number = ctypes.c_int()\n"
                    "call(303, -100, text(TOLD['secret']), handle, ctypes.byref(number), 0)\n"
                    "held = call(304, os.open('.', os.O_RDONLY), handle, 0)\nshow(os.read(held, 100))"
                ),
                secret,
            ),
            ("by running it", "os.execv(TOLD['outside'] + '/script.sh', ['script.sh'])", secret),
            (
                "as a script for the shell",
                "os.execv('/bin/sh', ['sh', '-c', '. ' + TOLD['outside'] + '/script.sh 2>&1'])",
                secret,
            ),
            (
                "by importing it",
                "sys.path.insert(0, TOLD['outside'])\nwith suppress(ImportError):\n    import planted",
                secret,
            ),
            ("a name in a folder", "show(' '.join(os.listdir(TOLD['outside'] + '/names')))", secret),
            ("the target of a link", "show(os.readlink(TOLD['outside'] + '/pointer'))", secret),
            (
                "by changing the working folder",
                "os.chdir('door')\nread('secret.txt')",
                secret,
            ),
            (
                "by a file for core dumps of shared memory (mmap)",
                "held = os.open(TOLD['secret'], os.O_RDONLY)\nshow(mmap.mmap(held, 0, prot=mmap.PROT_READ)[:])",
                secret,
            ),
        ],
    ),
    *family(
        "run folder and hidden tests",
        [
            ("a hidden test by path", "read(TOLD['hidden'])", secret),
            ("the list of events", "read(TOLD['run'] + '/events.jsonl')", secret),
            (
                "everything above the tree",
                (
                    "for place in (os.pardir, os.pardir + '/' + os.pardir):\n"
                    "    for folder, _, names in os.walk(place + '/run'):\n"
                    "        for name in names:\n"
                    "            read(folder + '/' + name)"
                ),
                secret,
            ),
            (
                "the working folder of the first process",
                "read('/proc/1/cwd/run/events.jsonl')",
                secret,
                {"not_without_jail": "the first process there is the machine's own"},
            ),
            (
                "the working folder of the parent",
                "read(f\"/proc/{TOLD['parent']}/root{TOLD['hidden']}\")",
                secret,
            ),
            (
                "through a link",
                "os.symlink(TOLD['run'], 'runs')\nread('runs/hidden_tests/test_hidden.py')",
                secret,
            ),
        ],
    ),
    *family(
        "masked paths",
        [
            ("by path", "read(TOLD['masked'])", secret),
            (
                "from the folder above, opened first",
                "held = os.open(TOLD['shown'], os.O_PATH)\nshow(os.read(os.open('inner/masked/deep/hidden.txt', os.O_RDONLY, dir_fd=held), 99))",
                secret,
            ),
            ("through a link", "os.symlink(TOLD['masked_folder'], 'm')\nread('m/deep/hidden.txt')", secret),
            (
                "with dots in between",
                "read(TOLD['shown'] + '/inner/./masked/../masked/deep/../deep/hidden.txt')",
                secret,
            ),
            (
                "renamed",
                "os.rename(TOLD['shown'] + '/inner', TOLD['shown'] + '/other')\nread(TOLD['shown'] + '/other/masked/deep/hidden.txt')",
                secret,
            ),
            ("a hard link to it", "os.link(TOLD['masked'], 'new')\nread('new')", secret),
            (
                "by importing it",
                "sys.path.insert(0, TOLD['masked_folder'])\nwith suppress(ImportError):\n    import planted",
                secret,
            ),
            (
                "by unmounting the mask",
                "call(166, text(TOLD['masked_folder']), 2)\nread(TOLD['masked'])",
                secret,
                {"not_without_jail": "there is no mask to unmount"},
            ),
            ("through the interpreter's own folder", "read('/proc/self/root' + TOLD['masked'])", secret),
        ],
    ),
    *family(
        "neighbours",
        [
            (
                "a file of another sandbox",
                "read(TOLD['neighbour'] + '/note.txt')",
                secret,
                {"drive": beside_neighbour(_HOLD)},
            ),
            (
                "changing a file of another sandbox",
                "write(TOLD['neighbour'] + '/note.txt')",
                _neighbour_hurt,
                {"drive": beside_neighbour(_HOLD)},
            ),
            (
                "the loopback of another sandbox",
                "connect(socket.AF_INET, socket.SOCK_STREAM, ('127.0.0.1', TOLD['neighbour_port']))\ntime.sleep(0.5)",
                any_of(_neighbour_hurt, contacted("tcp")),
                {"drive": beside_neighbour(_LISTEN)},
            ),
            (
                "an abstract socket of another sandbox",
                "connect(socket.AF_UNIX, socket.SOCK_STREAM, '\\0' + TOLD['token'] + '-n')\ntime.sleep(0.5)",
                _neighbour_hurt,
                {"drive": beside_neighbour(_ABSTRACT)},
            ),
            (
                "ending the processes of another sandbox",
                (
                    "for name in os.listdir('/proc'):\n"
                    "    if name.isdigit() and int(name) not in (1, os.getpid(), os.getppid(), TOLD['parent']):\n"
                    "        with suppress(OSError):\n"
                    "            line = open(f'/proc/{name}/cmdline').read()\n"
                    "            if 'neighbour_hold' in line and TOLD['token'] in line:\n"
                    "                os.kill(int(name), signal.SIGKILL)\ntime.sleep(0.5)"
                ),
                _neighbour_hurt,
                {"drive": beside_neighbour("neighbour_hold = 1\n" + _HOLD)},
            ),
        ],
    ),
]
