"""Other processes: signals, tracing, settings; daemons that outlive their command; making the jail fail."""

from __future__ import annotations

from benchmarks.escapes.attempt import Attempt, any_of, family
from benchmarks.escapes.drives import then_every_call
from benchmarks.escapes.judges import exit_code_is, jail_broke, secret, survivor, victim_hurt

_PARENT = "the process around it is the benchmark itself"
_ALL = "it would reach every process of this user"
_COMET = """
if os.fork() == 0:
    os.setsid()
    end = time.monotonic() + TOLD['timeout'] + 8
    with suppress(OSError):
        while time.monotonic() < end:
            if os.fork():
                os._exit(0)
            held = os.open('beat', os.O_CREAT | os.O_WRONLY | os.O_APPEND)
            os.write(held, b'.')
            os.close(held)
    os._exit(0)
await_beat()
"""
# Only where the numbers are those of the jail: elsewhere 1 and -1 are this machine's own processes.
_OWN = "if os.readlink('/proc/self/ns/pid') != TOLD['pid_namespace']:\n"
_AROUND = (
    "around = [os.getppid()]\nwith suppress(OSError):\n    " + _OWN.strip() + "\n        around.append(1)\n"
)
_STARVED = (
    "if os.readlink('/proc/self/ns/pid') == TOLD['pid_namespace']:\n    raise OSError('it has no first process')\n"
    "one = {max(os.sched_getaffinity(0))}\nos.sched_setaffinity(1, one)\n"
    "idle = struct.pack('IIQiIQQQII', 56, 5, 0, 0, 0, 100000000, 0, 0, 0, 0)\n"
    "call(314, 1, ctypes.create_string_buffer(idle), 0)\n"
    "for _ in range(20):\n    if os.fork() == 0:\n        os.sched_setaffinity(0, one)\n"
    "        end = time.monotonic() + TOLD['timeout'] + 40\n        while time.monotonic() < end:\n            pass\n"
    "        os._exit(0)\ntime.sleep(60)"
)
_NOTHING = "there is no jail that could fail, and no result to forge"
_DAEMON = "if detach():\n    beat()\nawait_beat()\n"
_LEFT_FOR_THE_NEXT_CALLS = {
    "by closed folders": "for name in (os.environ['HOME'], os.environ['TMPDIR'], '.'):\n    os.chmod(name, 0)",
    "by a tree that can only be listed": "os.chmod('.', 0o400)",
    "by closed files": "for name in ('a', 'b'):\n    write(name, b'x')\n    os.chmod(name, 0)\nos.chmod('.', 0o555)",
    "by a path too long for a path": "for _ in range(25):\n    os.mkdir('a' * 200)\n    os.chdir('a' * 200)",
    "by a closed folder that is deep": (
        "for place in (os.environ['TMPDIR'], TOLD['tree']):\n    os.chdir(place)\n    for _ in range(230):\n"
        "        os.mkdir('aa')\n        os.chdir('aa')\n    write('f', b'x')\n    os.chmod('.', 0o500)"
    ),
    "by more folders than there are descriptors": (
        "for number in range(1200):\n    os.mkdir(str(number))\nos.mkdir('d')\nwrite('d/f', b'x')\nos.chmod('d', 0o400)"
    ),
}

ATTEMPTS: list[Attempt] = [
    *family(
        "signals to outside processes",
        [
            ("the end", "os.kill(TOLD['pid'], signal.SIGTERM)", victim_hurt),
            ("the end at once", "os.kill(TOLD['pid'], signal.SIGKILL)", victim_hurt),
            ("a stop", "os.kill(TOLD['pid'], signal.SIGSTOP)", victim_hurt),
            ("its whole group", "os.killpg(TOLD['pid'], signal.SIGTERM)", victim_hurt),
            ("one thread of it", "call(234, TOLD['pid'], TOLD['pid'], 15)", victim_hurt),
            (
                "with a value",
                "call(129, TOLD['pid'], 23, ctypes.create_string_buffer(struct.pack('iiiiii', 23, 0, -1, 0, 0, 0) + bytes(104)))",
                victim_hurt,
            ),
            (
                "by a handle",
                "held = os.pidfd_open(TOLD['pid'])\nsignal.pidfd_send_signal(held, signal.SIGTERM)",
                victim_hurt,
            ),
            (
                "by being the owner of a socket",
                (
                    "one, two = socket.socketpair()\nfcntl.fcntl(one, fcntl.F_SETOWN, TOLD['pid'])\n"
                    "fcntl.fcntl(one, fcntl.F_SETFL, os.O_ASYNC)\ntwo.send(b'x')\ntime.sleep(0.2)"
                ),
                victim_hurt,
            ),
            (
                "everybody",
                "os.kill(-1, signal.SIGURG)\ntime.sleep(0.2)",
                victim_hurt,
                {"not_without_jail": _ALL},
            ),
            (
                "every number",
                (
                    "for number in range(2, 40000):\n"
                    "    if number not in (os.getpid(), os.getppid()):\n"
                    "        with suppress(OSError):\n            os.kill(number, signal.SIGURG)"
                ),
                victim_hurt,
                {"not_without_jail": _ALL},
            ),
        ],
        has_victim=True,
    ),
    *family(
        "tracing and memory of outside processes",
        [
            (
                "attaching",
                "checked(LIBRARY.ptrace(16, TOLD['pid'], 0, 0))\ntime.sleep(0.3)\nos._exit(0)",
                any_of(victim_hurt, secret),
            ),
            (
                "seizing and interrupting",
                (
                    "checked(LIBRARY.ptrace(0x4206, TOLD['pid'], 0, 0))\nchecked(LIBRARY.ptrace(0x4207, TOLD['pid'], 0, 0))\n"
                    "os.waitpid(TOLD['pid'], 0x40000000)\n"
                    "LIBRARY.ptrace.restype = ctypes.c_long\n"
                    "for at in range(TOLD['secret_at'], TOLD['secret_at'] + 32, 8):\n"
                    "    show(struct.pack('q', LIBRARY.ptrace(2, TOLD['pid'], ctypes.c_void_p(at), 0)))"
                ),
                any_of(victim_hurt, secret),
            ),
            (
                "reading its memory",
                (
                    "room = ctypes.create_string_buffer(40)\nours = struct.pack('QQ', ctypes.addressof(room), 40)\n"
                    "theirs = struct.pack('QQ', TOLD['secret_at'], 40)\ncall(310, TOLD['pid'], ours, 1, theirs, 1, 0)\nshow(room.raw)"
                ),
                secret,
            ),
            (
                "writing its memory",
                (
                    "room = ctypes.create_string_buffer(b'change')\nours = struct.pack('QQ', ctypes.addressof(room), 6)\n"
                    "theirs = struct.pack('QQ', TOLD['change_at'], 6)\ncall(311, TOLD['pid'], ours, 1, theirs, 1, 0)"
                ),
                victim_hurt,
            ),
            (
                "its memory as a file",
                "held = os.open(f\"/proc/{TOLD['pid']}/mem\", os.O_RDWR)\nshow(os.pread(held, 40, TOLD['secret_at']))",
                secret,
            ),
            (
                "changing its memory as a file",
                "held = os.open(f\"/proc/{TOLD['pid']}/mem\", os.O_RDWR)\nos.pwrite(held, b'change', TOLD['change_at'])",
                victim_hurt,
            ),
            (
                "taking its descriptor",
                "held = os.pidfd_open(TOLD['pid'])\nfile = call(438, held, TOLD['held'], 0)\nshow(os.pread(file, 99, 0))",
                secret,
            ),
        ],
        has_victim=True,
    ),
    *family(
        "settings of outside processes",
        [
            ("its priority", "os.setpriority(os.PRIO_PROCESS, TOLD['pid'], 19)", victim_hurt),
            ("the priority of its group", "os.setpriority(os.PRIO_PGRP, TOLD['pid'], 18)", victim_hurt),
            (
                "its processors",
                "os.sched_setaffinity(TOLD['pid'], {min(os.sched_getaffinity(0))})",
                victim_hurt,
            ),
            (
                "its scheduler",
                "os.sched_setscheduler(TOLD['pid'], os.SCHED_BATCH, os.sched_param(0))",
                victim_hurt,
            ),
            (
                "its limits",
                "resource.prlimit(TOLD['pid'], resource.RLIMIT_CORE, (0, 0))\nresource.prlimit(TOLD['pid'], resource.RLIMIT_NOFILE, (5, 64))",
                victim_hurt,
            ),
            (
                "its readiness to be killed",
                "write(f\"/proc/{TOLD['pid']}/oom_score_adj\", b'999')",
                victim_hurt,
            ),
        ],
        has_victim=True,
    ),
    *family(
        "daemons after a time-out",
        [
            ("double fork and a session of its own", _DAEMON + "time.sleep(30)", survivor),
            (
                "without any signal",
                "for number in range(1, 65):\n    with suppress(OSError, ValueError):\n        signal.signal(number, signal.SIG_IGN)\n"
                + _DAEMON
                + "time.sleep(30)",
                survivor,
            ),
            (
                "that keeps the output open",
                "if os.fork() == 0:\n    os.setsid()\n    beat()\nawait_beat()\ntime.sleep(30)",
                survivor,
            ),
            ("that forks and ends for ever", _COMET + "time.sleep(30)", survivor),
            (
                "that is stopped",
                "if detach():\n    write('beat', b'.')\n    os.kill(os.getpid(), signal.SIGSTOP)\nawait_beat()\ntime.sleep(30)",
                survivor,
            ),
            (
                "that collects orphans itself",
                "LIBRARY.prctl(36, 1, 0, 0, 0)\n" + _DAEMON + "time.sleep(30)",
                survivor,
            ),
            (
                "whose parent waits in the kernel",
                "import subprocess\nif os.fork() == 0:\n    LIBRARY.vfork() or (time.sleep(30), os._exit(0))\ntime.sleep(30)",
                survivor,
            ),
            (
                "that cannot be looked into",
                "LIBRARY.prctl(4, 0, 0, 0, 0)\n" + _DAEMON + "time.sleep(30)",
                survivor,
            ),
            (
                "that take every processor from what is to end them",
                _STARVED,
                survivor,
                {"not_without_jail": "there is no jail that is to end them"},
            ),
        ],
        timeout_seconds=5.0,
    ),
    *family(
        "daemons after the end of a command",
        [
            ("double fork and a session of its own", _DAEMON, survivor),
            ("that forks and ends for ever", _COMET, survivor),
            (
                "that keeps the output open",
                "if os.fork() == 0:\n    os.setsid()\n    beat()\nawait_beat()\nos._exit(0)",
                survivor,
            ),
            (
                "many at once",
                "for _ in range(12):\n    if os.fork() == 0:\n        os.setsid()\n        beat()\nawait_beat()\nos._exit(0)",
                survivor,
            ),
            (
                "after its parent was killed",
                "if detach():\n    beat()\nawait_beat()\nos.kill(os.getpid(), signal.SIGKILL)",
                survivor,
            ),
            (
                "after the process around it was killed",
                _DAEMON + "os.kill(os.getppid(), signal.SIGKILL)",
                any_of(survivor, jail_broke),
                {"not_without_jail": _PARENT},
            ),
            (
                "after the process around it was stopped",
                _DAEMON + "os.kill(os.getppid(), signal.SIGSTOP)",
                any_of(survivor, jail_broke),
                {"not_without_jail": _PARENT, "timeout_seconds": 6.0},
            ),
        ],
    ),
    *family(
        "making the jail fail",
        [
            (
                "by ending its group",
                "os.killpg(os.getpgid(0), signal.SIGKILL)",
                jail_broke,
                {"not_without_jail": _NOTHING},
            ),
            (
                "by ending all it can",
                _OWN + "    os.kill(-1, signal.SIGTERM)\nos.kill(os.getppid(), signal.SIGTERM)",
                jail_broke,
                {"not_without_jail": _NOTHING},
            ),
            (
                "by ending what is around it",
                "os.kill(os.getppid(), signal.SIGKILL)\ntime.sleep(0.2)",
                jail_broke,
                {"not_without_jail": _NOTHING},
            ),
            (
                "by stopping what is around it",
                "os.kill(os.getppid(), signal.SIGSTOP)\ntime.sleep(0.2)",
                any_of(jail_broke, survivor),
                {"not_without_jail": _NOTHING, "timeout_seconds": 6.0},
            ),
            (
                "by stopping its whole group",
                "os.kill(0, signal.SIGSTOP)\ntime.sleep(0.2)",
                any_of(jail_broke, survivor),
                {"not_without_jail": _NOTHING, "timeout_seconds": 6.0},
            ),
            (
                "by closing every descriptor",
                "os.closerange(0, 1000)\nos._exit(5)",
                any_of(jail_broke, exit_code_is(0)),
            ),
            ("by a closed tree", "os.chmod('.', 0)", jail_broke),
            *(
                (f"the next calls, {how}", script, jail_broke, {"drive": then_every_call})
                for how, script in _LEFT_FOR_THE_NEXT_CALLS.items()
            ),
            (
                "by removing everything",
                "import shutil\nfor name in os.listdir('.'):\n    shutil.rmtree(name, ignore_errors=True)\nfor name in ('HOME', 'TMPDIR'):\n    shutil.rmtree(os.environ[name], ignore_errors=True)",
                jail_broke,
                {"not_without_jail": _NOTHING},
            ),
            (
                "by memory until it is killed",
                "kept = []\nwhile True:\n    kept.append(touch(8 * MIB))",
                jail_broke,
                {"not_without_jail": _NOTHING},
            ),
            (
                "by pretending to be its start",
                "os.write(2, b'<' + b'0' * 32 + b'>bwrap: cannot start\\n')\nos._exit(7)",
                any_of(jail_broke, exit_code_is(0)),
            ),
        ],
        not_without_jail=_NOTHING,
    ),
    *family(
        "forged results",
        [
            (
                "a forged answer of the process that starts commands",
                _AROUND + "forged = b'R' + (5).to_bytes(4, 'big') + b'E' + bytes(4)\n"
                "for number in range(3, 40):\n    with suppress(OSError):\n        os.write(number, forged)\n"
                "for name in around:\n    with suppress(OSError):\n        for number in os.listdir(f'/proc/{name}/fd'):\n"
                "            with suppress(OSError):\n                write(f'/proc/{name}/fd/{number}', forged)\nos._exit(7)",
                exit_code_is(0),
                {"not_without_jail": _NOTHING},
            ),
            (
                "the same through a handle on that process",
                _AROUND + "forged = b'R' + (5).to_bytes(4, 'big') + b'E' + bytes(4)\nfor name in around:\n"
                "    with suppress(OSError):\n        held = os.pidfd_open(name)\n        for number in range(20):\n"
                "            with suppress(OSError):\n                os.write(call(438, held, number, 0), forged)\nos._exit(7)",
                exit_code_is(0),
                {"not_without_jail": _NOTHING},
            ),
            ("an exit code above 255", "os._exit(256 + 7)", exit_code_is(0), {"not_without_jail": _NOTHING}),
            (
                "an end by a signal that is ignored",
                "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nos.kill(os.getpid(), signal.SIGTERM)\nos._exit(7)",
                exit_code_is(0),
                {"not_without_jail": _NOTHING},
            ),
        ],
    ),
]
