"""A process that opens sandboxes one after the other, makes a mess in each and closes it, until it ends or is killed."""

from __future__ import annotations

import os
import random
import sys
import tempfile
from pathlib import Path

from composer_replication.records import SandboxSpec
from composer_replication.sandbox import base_python, open_sandbox
from composer_replication.sandbox.folders import remove_folder
from composer_replication.sandbox.process_folder import process_folder

TIMEOUT_SECONDS = 120.0
_PROGRAM_SHARE = 0.15  # of the commands: an interpreter takes longer than a shell
_ENDLESS_SHARE, _ENDLESS_SECONDS = (
    0.1,
    0.2,
)  # those that do not end by themselves: they would outlive a parent
_DAEMON = "setsid sh -c ': {token}; sleep 600' </dev/null >/dev/null 2>&1 & "
_FILES = (
    'for place in . "$HOME" "$TMPDIR" /tmp /var/tmp /dev/shm; do '
    "(echo x > $place/{token}-left; head -c 100000 /dev/zero > $place/{token}-more) 2>/dev/null; done; "
    "mkdir -p deep/er && echo x > deep/er/file && chmod 0 deep/er deep; ln -sf / out; mkfifo pipe; "
)
_PROGRAM = """
import contextlib, ctypes, os, socket, sys, time
library = ctypes.CDLL(None)
library.shmget(0, 65536, 0o1600); library.msgget(0, 0o1600); library.semget(0, 1, 0o1600)
held = []
for address in ("\\0{token}", "{token}.sock", "/tmp/{token}.sock"):
    with contextlib.suppress(OSError):
        held.append(socket.socket(socket.AF_UNIX)); held[-1].bind(address); held[-1].listen()
with contextlib.suppress(OSError):
    open("/dev/shm/{token}", "wb").write(bytes(65536))
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        for number in range(3):
            os.close(number)
        time.sleep(600)
    os._exit(0)
"""


def run_parent(backend: str, num_lives: int, *, folder: Path, token: str, seed: int, progress: int) -> None:
    """Live ``num_lives`` lives, one byte to ``progress`` after each; call in a forked child, which it ends."""
    code = 1
    try:
        os.environ["TMPDIR"] = tempfile.tempdir = str(folder)
        generator = random.Random(seed)
        for _ in range(num_lives):
            _live(backend, token, generator)
            os.write(progress, b".")
        remove_folder(
            process_folder()
        )  # as an interpreter does at its end, which a forked child does not reach
        code = 0
    except BaseException as error:  # noqa: BLE001  nothing of the child may go on in its parent's code
        print(f"{backend}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
    finally:
        os._exit(code)


def _live(backend: str, token: str, generator: random.Random) -> None:
    """Open, make a mess once or twice, close; the second command of a warm one runs in the same jail."""
    with tempfile.TemporaryDirectory(dir=process_folder(), ignore_cleanup_errors=True) as text:
        tree = Path(text) / "tree"
        tree.mkdir()
        with open_sandbox(SandboxSpec(tree), backend) as sandbox:
            for _ in range(generator.choice((1, 1, 2))):
                script = _FILES + _DAEMON + f"sleep {generator.choice((0, 0, 0.01, 0.05))}"
                command: list[str] | str = script.format(token=token)
                if generator.random() < _PROGRAM_SHARE:
                    command = [str(base_python()), "-I", "-S", "-c", _PROGRAM.format(token=token)]
                seconds = TIMEOUT_SECONDS
                if generator.random() < _ENDLESS_SHARE:
                    command, seconds = _DAEMON.format(token=token) + "sleep 600", _ENDLESS_SECONDS
                done = sandbox.exec(command, timeout_seconds=seconds)
                if done.exit_code != 0 and not (done.timed_out and seconds == _ENDLESS_SECONDS):
                    raise RuntimeError(f"a life went wrong: {done}")
