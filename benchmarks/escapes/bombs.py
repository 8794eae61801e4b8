"""Using more than is allowed: memory, processes, disk, descriptors, output. Every bomb is bounded by itself."""

from __future__ import annotations

from benchmarks.escapes.attempt import Attempt, Judge, Outcome, any_of, family
from benchmarks.escapes.judges import (
    jail_broke,
    too_many_descriptors,
    too_many_processes,
    too_many_threads,
    too_much_disk,
    too_much_hidden_memory,
    too_much_memory,
    too_much_output,
)
from benchmarks.escapes.scene import Scene

_CHILDREN = """
for _ in range({num}):
    if os.fork() == 0:
        {body}
        stay()
        os._exit(0)
for _ in range({num}):
    os.wait()
"""
_IN_FLIGHT = """
def hide(descriptor):
    pair = socket.socketpair()
    socket.send_fds(pair[0], [b'x'], [descriptor])
    os.close(descriptor)
    return pair
kept = []
with suppress(OSError):
    for number in range({num}):
        {make}
        done = 0
        with suppress(OSError):
            while done < 14 * MIB:
                done += os.write(held, bytes(MIB))
        kept.append(hide(held))
stay()
"""
_WAITING = """
import fcntl
full = os.pipe()
failed = []
def wait(held, at):
    try:
        if {call} == -1:
            failed.append(1)
    except OSError:
        failed.append(1)
for number in range(6):
    first = os.open('bomb', os.O_CREAT | os.O_RDWR)
    second = os.open('bomb', os.O_RDWR)
    os.unlink('bomb')
    os.write(first, bytes(12 * MIB))
    for at, held in enumerate((first, second)):
        fcntl.fcntl(held, 37, struct.pack('hhqqi', 1, 0, at, 1, 0))
    for at, held in enumerate((first, second)):
        threading.Thread(target=wait, args=(held, at), daemon=True).start()
    time.sleep(0.2)
    os.close(first)
    os.close(second)
if failed:
    raise OSError('refused')
time.sleep(6)
show('whole')
os._exit(0)
"""
_MAPPED = """
LIBRARY.mmap.restype = ctypes.c_void_p
for number in range(40):
    held = os.open('{name}', os.O_CREAT | os.O_RDWR)
    os.unlink('{name}')
    os.write(held, bytes(MIB))
    if LIBRARY.mmap(None, ctypes.c_size_t(4096), 1, 1, held, ctypes.c_long(0)) == ctypes.c_void_p(-1).value:
        raise OSError('it cannot be mapped')
    os.close(held)
time.sleep(6)
show('whole')
"""
_HUGE = """
LIBRARY.send.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
def huge():
    room = mmap.mmap(-1, 4 * MIB, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):
        room.madvise(14)
    first = ctypes.addressof(ctypes.c_char.from_buffer(room))
    start = (first + 2 * MIB - 1) // (2 * MIB) * (2 * MIB)
    room[start - first] = 1
    return room, start
"""
_HUGE_IN_PIPES = """
kept = []
for _ in range(160):
    room, start = huge()
    if len(kept) % 16 == 0:
        pipe = os.pipe()
    call(278, pipe[1], struct.pack('QQ', start, 4096), 1, 2)
    kept.append(pipe)
    room.close()
stay()
show('whole')
"""
_HUGE_IN_SOCKETS = """
server = socket.socket()
server.bind(('127.0.0.1', 0))
server.listen()
kept = []
for _ in range(10):
    ours = socket.socket()
    ours.setsockopt(socket.SOL_SOCKET, 60, 1)
    ours.connect(server.getsockname())
    for _ in range(16):
        room, start = huge()
        checked(LIBRARY.send(ours.fileno(), start, 4096, 0x4000000))
        room.close()
    kept.append(ours)
stay()
show('whole')
"""
_MAPPINGS = """
LIBRARY.mmap.restype = ctypes.c_void_p
at = LIBRARY.mmap(None, ctypes.c_size_t(65000 * 4096), 0, 0x4022, -1, ctypes.c_long(0))
for number in range(0, 64000, 2):
    checked(LIBRARY.mprotect(ctypes.c_void_p(at + number * 4096), ctypes.c_size_t(4096), 1))
"""
_BUFFERS_OF_A_THREAD = """
def hold():
    kept = []
    for number in range(28):
        pair = socket.socketpair()
        pair[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8 * MIB)
        pair[0].setblocking(False)
        with suppress(BlockingIOError):
            while True:
                sent.append(pair[0].send(bytes(65536)))
        kept.append(pair)
    stay()
    show('whole' if sum(sent) > 200 * MIB else 'little')
    os._exit(0)
sent = []
threading.Thread(target=hold).start()
LIBRARY.pthread_exit(None)
"""
_BUFFERS = """
sent = []
def fill():
    pair = socket.socketpair()
    pair[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8 * MIB)
    pair[0].setblocking(False)
    with suppress(BlockingIOError):
        while True:
            sent.append(pair[0].send(bytes(65536)))
    {close}
    return pair
kept = []
with suppress(OSError):
    while sum(sent) < 600 * MIB:
        kept.append(fill())
stay()
if sum(sent) > 200 * MIB:
    show('whole')
"""


def _children(num: int, body: str) -> str:
    return _CHILDREN.format(num=num, body=body)


def _file_bomb(folder: str) -> str:
    return (
        f"folder = {folder}\nfor number in range(48):\n"
        "    write(f'{folder}/bomb-{number}', bytes(MIB))\nstay()"
    )


def _held_to_the_end(what: str) -> Judge:
    """For what no look from outside can see: the program itself came to its end with all that it held."""

    def judge(_: Scene, outcome: Outcome) -> str:
        was_held = any(result.exit_code == 0 and "whole" in result.stdout for result in outcome.results)
        return f"it held {what} to its end, uncounted" if was_held else ""

    return judge


ATTEMPTS: list[Attempt] = [
    *family(
        "memory bombs",
        [
            ("one process", "held = touch(600 * MIB)\nstay()", too_much_memory),
            ("many processes", _children(6, "held = touch(100 * MIB)"), too_much_memory),
            (
                "shared memory",
                "held = mmap.mmap(-1, 600 * MIB)\nheld[::4096] = b'x' * len(held[::4096])\nstay()",
                too_much_memory,
            ),
            (
                "shared memory of many processes",
                _children(6, "held = mmap.mmap(-1, 100 * MIB); held[::4096] = b'x' * len(held[::4096])"),
                too_much_memory,
            ),
            (
                "memory files, mapped",
                _children(
                    6,
                    "held = os.memfd_create('m'); os.truncate(held, 100 * MIB); seen = mmap.mmap(held, 100 * MIB); seen[::4096] = b'x' * len(seen[::4096])",
                ),
                too_much_memory,
            ),
            (
                "memory files, written",
                (
                    "held = [os.memfd_create('m') for _ in range(6)]\n"
                    "for descriptor in held:\n"
                    "    for _ in range(100):\n"
                    "        os.write(descriptor, bytes(MIB))\nstay()"
                ),
                any_of(too_much_memory, too_much_hidden_memory),
            ),
            (
                "memory files on their way in sockets",
                _IN_FLIGHT.format(num=28, make="held = os.memfd_create('m')"),
                too_much_hidden_memory,
            ),
            (
                "shared memory that is not touched at the moment",
                (
                    "held = mmap.mmap(-1, 600 * MIB)\nheld[::4096] = b'x' * len(held[::4096])\n"
                    "held.madvise(mmap.MADV_DONTNEED)\nstay()\nshow('whole')"
                ),
                _held_to_the_end("600 MiB of memory"),
            ),
            (
                "processes whose names tell of memory given back",
                "LIBRARY.prctl(15, b'\\x0cVmPTE:-999999', 0, 0, 0)\n"
                + _children(6, "held = touch(100 * MIB)")
                + "show('whole')",
                _held_to_the_end("600 MiB of memory"),
            ),
            (
                "processes whose names tell of memory given back after a return",
                "LIBRARY.prctl(15, b'\\rVmPTE:-9999999', 0, 0, 0)\n"
                + _children(6, "held = touch(100 * MIB)")
                + "show('whole')",
                _held_to_the_end("600 MiB of memory"),
            ),
            (
                "mappings of many processes",
                _MAPPINGS + _children(21, "stay(9)") + "show('whole')",
                _held_to_the_end("a million mappings"),
            ),
            (
                "processes whose first thread has ended",
                _children(
                    6,
                    "threading.Thread(target=lambda: (touch(100 * MIB), stay(), os._exit(7))).start(); LIBRARY.pthread_exit(None)",
                )
                + "show('whole')",
                _held_to_the_end("600 MiB of memory"),
            ),
            (
                "buffers of sockets",
                _BUFFERS.format(close="pass"),
                _held_to_the_end("several times the memory limit in sockets"),
            ),
            (
                "buffers of sockets whose senders are closed",
                _BUFFERS.format(close="pair[0].close()"),
                _held_to_the_end("several times the memory limit in sockets"),
            ),
            (
                "huge pages lent to pipes",
                _HUGE + _HUGE_IN_PIPES,
                _held_to_the_end("320 MiB of memory in pipes"),
            ),
            (
                "huge pages lent to sockets",
                _HUGE + _HUGE_IN_SOCKETS,
                _held_to_the_end("320 MiB of memory in sockets"),
            ),
            (
                "buffers of sockets of a process whose first thread has ended",
                _BUFFERS_OF_A_THREAD,
                _held_to_the_end("more than the memory limit in sockets"),
            ),
            (
                "pages of a private file",
                "write('big', bytes(14 * MIB))\nheld = os.open('big', os.O_RDWR)\nkept = []\nfor _ in range(40):\n    kept.append(mmap.mmap(held, 14 * MIB, mmap.MAP_PRIVATE))\n    kept[-1][::4096] = b'x' * len(kept[-1][::4096])\nstay()",
                too_much_memory,
            ),
        ],
        is_watched=True,
    ),
    *family(
        "process bombs",
        [
            ("forks", _children(72, "pass"), too_many_processes),
            (
                "a chain of forks",
                "for _ in range(72):\n    if os.fork():\n        os.wait()\n        os._exit(0)\nstay()",
                too_many_processes,
            ),
            (
                "daemons",
                "for _ in range(72):\n    if os.fork() == 0:\n        os.setsid()\n        stay()\n        os._exit(0)\nstay()",
                too_many_processes,
            ),
            (
                "with the limit raised first",
                "with suppress(OSError, ValueError):\n    resource.setrlimit(resource.RLIMIT_NPROC, (-1, -1))\n"
                + _children(72, "pass"),
                too_many_processes,
            ),
            (
                "threads",
                "threading.stack_size(64 * 1024)\nwith suppress(RuntimeError):\n    for _ in range(300):\n        threading.Thread(target=stay, daemon=True).start()\nstay()",
                too_many_threads,
            ),
            (
                "forks by the raw system call",
                "for _ in range(72):\n    if call(56, 17, 0, 0, 0, 0) == 0:\n        stay()\n        os._exit(0)\nstay()",
                too_many_processes,
            ),
        ],
        is_watched=True,
    ),
    *family(
        "disk bombs",
        [
            ("one file", "for _ in range(48):\n    write('bomb', bytes(MIB), 'ab')\nstay()", too_much_disk),
            ("many files", _file_bomb("'.'"), too_much_disk),
            (
                "files without content",
                "for number in range(5200):\n    os.symlink('x' * 3000, f'n{number}')\nstay()",
                any_of(too_much_disk, jail_broke),
            ),
            (
                "deleted, open files",
                (
                    "kept = []\nfor number in range(40):\n    kept.append(os.open('bomb', os.O_CREAT | os.O_WRONLY))\n"
                    "    os.unlink('bomb')\n    os.write(kept[-1], bytes(MIB))\nstay()"
                ),
                too_much_disk,
            ),
            (
                "deleted, open files of a process that cannot be looked into",
                (
                    "LIBRARY.prctl(4, 0, 0, 0, 0)\nkept = []\nfor number in range(40):\n    kept.append(os.open('bomb', os.O_CREAT | os.O_WRONLY))\n"
                    "    os.unlink('bomb')\n    os.write(kept[-1], bytes(MIB))\n"
                    "time.sleep(6)\nos.write(1, f'bytes {sum(os.fstat(held).st_blocks * 512 for held in kept)}'.encode())"
                ),
                lambda _, outcome: (
                    "it held 40 MiB of deleted files to its end, uncounted"
                    if any(
                        f"bytes {40 << 20}" in result.stdout and result.exit_code == 0
                        for result in outcome.results
                    )
                    else ""
                ),
            ),
            (
                "deleted, open files of a thread with a table of its own",
                (
                    "def hold():\n    call(436, 1000, 1001, 2)\n    kept = []\n    for number in range(40):\n"
                    "        kept.append(os.open('bomb', os.O_CREAT | os.O_WRONLY))\n"
                    "        os.unlink('bomb')\n        os.write(kept[-1], bytes(MIB))\n    stay()\n    show('whole')\n"
                    "threading.Thread(target=hold).start()"
                ),
                _held_to_the_end("40 MiB of deleted files"),
            ),
            *(
                (
                    name,
                    _MAPPED.format(name=file),
                    _held_to_the_end("40 MiB of deleted, mapped files"),
                )
                for name, file in (
                    ("deleted, mapped files", "bomb"),
                    ("deleted, mapped files in shared memory", "/dev/shm/bomb"),
                    (
                        "deleted, mapped files whose names look like ends of lines",
                        "a\\x0c\\x1c\\nb (deleted)",
                    ),
                )
            ),
            (
                "deleted, mapped files beside open ones of the same name",
                _MAPPED.format(name="bomb").replace(
                    "os.close(held)",
                    "os.close(held)\n    kept = os.open('bomb', os.O_CREAT | os.O_RDWR)\n    os.unlink('bomb')",
                ),
                _held_to_the_end("40 MiB of deleted, mapped files"),
            ),
            *(
                (
                    f"deleted files of calls that wait: {name}",
                    _WAITING.format(call=call),
                    _held_to_the_end("72 MiB of deleted files"),
                )
                for name, call in (
                    ("sendfile", "os.sendfile(full[1], held, 0, MIB)"),
                    ("splice", "call(275, held, 0, full[1], 0, MIB, 0)"),
                    (
                        "locks for each other",
                        "fcntl.fcntl(held, 38, struct.pack('hhqqi', 1, 0, 1 - at, 1, 0))",
                    ),
                )
            ),
            (
                "deleted files in rules of Landlock",
                (
                    "rules = call(444, ctypes.create_string_buffer(struct.pack('Q', 4), 8), 8, 0)\n"
                    "if rules < 0:\n    raise OSError('no rules')\n"
                    "for number in range(6):\n    held = os.open('bomb', os.O_CREAT | os.O_RDWR)\n"
                    "    os.write(held, bytes(12 * MIB))\n"
                    "    call(445, rules, 1, ctypes.create_string_buffer(struct.pack('=Qi', 4, held), 12), 0)\n"
                    "    os.unlink('bomb')\n    os.close(held)\n"
                    "time.sleep(6)\nshow('whole')"
                ),
                _held_to_the_end("72 MiB of deleted files"),
            ),
            (
                "deleted files on their way in sockets",
                _IN_FLIGHT.format(
                    num=8, make="held = os.open('bomb', os.O_CREAT | os.O_WRONLY); os.unlink('bomb')"
                ),
                lambda _, outcome: (
                    "it held 112 MiB of deleted files in sockets to its end, uncounted"
                    if any(result.exit_code == 0 for result in outcome.results)
                    else ""
                ),
            ),
            (
                "in a folder that is closed",
                (
                    "os.mkdir('closed')\nos.chdir('closed')\nos.chmod('.', 0)\nfor number in range(48):\n    os.chmod('.', 0o700)\n"
                    "    write(f'bomb-{number}', bytes(MIB))\n    os.chmod('.', 0)\nstay()"
                ),
                too_much_disk,
            ),
            (
                "in a folder too deep for a path",
                (
                    "for number in range(60):\n    os.mkdir('d' * 200)\n    os.chdir('d' * 200)\n"
                    "for number in range(48):\n    write(f'bomb-{number}', bytes(MIB))\nstay()"
                ),
                any_of(too_much_disk, jail_broke),
            ),
            (
                "reserved space",
                "held = os.open('bomb', os.O_CREAT | os.O_RDWR)\nLIBRARY.fallocate(held, 1, ctypes.c_long(0), ctypes.c_long(48 * MIB))\nfor number in range(4):\n    other = os.open(f'bomb-{number}', os.O_CREAT | os.O_RDWR)\n    LIBRARY.fallocate(other, 1, ctypes.c_long(0), ctypes.c_long(14 * MIB))\nstay()",
                too_much_disk,
            ),
            (
                "behind moving folders",
                (
                    "os.makedirs('a/x')\nos.makedirs('b')\n"
                    "if os.fork() == 0:\n    end = time.monotonic() + 3\n    while time.monotonic() < end:\n"
                    "        os.rename('a/x', 'b/x')\n        os.rename('b/x', 'a/x')\n    os._exit(0)\n"
                    "held = os.open('a', os.O_RDONLY)\n"
                    "where = [None]\nfor number in range(48):\n    while True:\n"
                    "        with suppress(OSError):\n            write(f'a/x/bomb-{number}', bytes(MIB))\n            break\nstay()"
                ),
                too_much_disk,
            ),
        ],
        is_watched=True,
    ),
    *family(
        "descriptor bombs",
        [
            (
                "opening",
                "kept = []\nwith suppress(OSError):\n    while len(kept) < 300:\n        kept.append(os.open('/dev/null', os.O_RDONLY))\nstay(1)",
                too_many_descriptors,
            ),
            (
                "with the limit raised first",
                (
                    "with suppress(OSError, ValueError):\n    resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))\n"
                    "kept = []\nwith suppress(OSError):\n    while len(kept) < 300:\n        kept.append(os.open('/dev/null', os.O_RDONLY))\nstay(1)"
                ),
                too_many_descriptors,
            ),
            (
                "by pipes",
                "kept = []\nwith suppress(OSError):\n    while len(kept) < 150:\n        kept.append(os.pipe())\nstay(1)",
                too_many_descriptors,
            ),
            (
                "with the limit of another process raised",
                (
                    "child = os.fork()\nif child == 0:\n    time.sleep(0.3)\n    kept = []\n    with suppress(OSError):\n"
                    "        while len(kept) < 300:\n            kept.append(os.open('/dev/null', os.O_RDONLY))\n    stay(1)\n    os._exit(0)\n"
                    "with suppress(OSError, ValueError):\n    resource.prlimit(child, resource.RLIMIT_NOFILE, (4096, 4096))\nos.wait()"
                ),
                too_many_descriptors,
            ),
        ],
        is_watched=True,
    ),
    *family(
        "output bombs",
        [
            ("64 MiB of output", "for _ in range(64):\n    show(b'x' * MIB)", too_much_output),
            ("64 MiB of errors", "for _ in range(64):\n    os.write(2, b'x' * MIB)", too_much_output),
            ("64 MiB of NUL bytes", "for _ in range(64):\n    show(bytes(MIB))", too_much_output),
            (
                "by the name of the stream",
                "with open('/dev/stdout', 'wb') as out:\n    for _ in range(64):\n        out.write(b'x' * MIB)",
                too_much_output,
            ),
            (
                "from many processes",
                "for _ in range(8):\n    if os.fork() == 0:\n        for _ in range(8):\n            show(b'x' * MIB)\n        os._exit(0)\nfor _ in range(8):\n    os.wait()",
                too_much_output,
            ),
        ],
    ),
]
