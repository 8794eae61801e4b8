"""Many lives of sandboxes whose owners are killed at random moments, and what is left afterwards: nothing.

    python benchmarks/sandbox_lives.py [--lives 10000] [--backends bubblewrap,bubblewrap-warm,sandlock] [--at-once 2] [--seed 0]

A life is a sandbox that is opened, runs one or two commands that leave a daemon, files, closed folders, pipes,
sockets and shared memory behind, and is closed. A parent process lives ten of them one after the other;
half of the parents are ended by SIGKILL, each at a moment drawn uniformly over its lives. Nobody cleans
up after a killed one but the kernel and the next process that opens a sandbox.

Then one more process opens one more sandbox, and it is counted what is still there: processes (ten seconds later at the
latest), mounts, control groups, entries of temporary folders, unix sockets and shared memory. Before that, one leak of
each kind is planted, and the count must see it. Exit code 1 when anything is left, or when a sandbox of a parent that
lived did not work (a sweep must never touch what somebody holds).
"""

from __future__ import annotations

import os
import random
import secrets
import select
import signal
import sys
import tempfile
import time
from argparse import Namespace
from dataclasses import dataclass, field
from pathlib import Path

from command_line import options
from lives.leftovers import KINDS, Leftovers, collect, planted

from composer_replication.records import SandboxSpec
from composer_replication.sandbox import base_python, choose_backend, open_sandbox
from composer_replication.sandbox.folders import remove_folder
from composer_replication.sandbox.process_folder import process_folder

DEFAULT_BACKENDS = "bubblewrap,bubblewrap-warm,sandlock"
LIVES_OF_A_PARENT, KILLED_SHARE, PATIENCE_SECONDS, _MOST_FAILURES = 10, 0.5, 10.0, 10
_PAUSE_SECONDS = 0.001
_FIRST_GUESS_SECONDS = 0.1  # of a life, until one is over

TIMEOUT_SECONDS = 120.0
_PROGRAM_SHARE = 0.15  # of the commands: an interpreter takes longer than a shell
_ENDLESS_SHARE, _ENDLESS_SECONDS = 0.1, 0.2  # of those that do not end by themselves
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
        # as an interpreter does at its end, which a forked child does not reach
        remove_folder(process_folder())
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


@dataclass(slots=True)
class Parent:
    """One running parent: its pipe, how many lives are over, and when it is killed (never: after more than it has)."""

    pid: int
    progress: int
    num_lives: int
    dies_after: float
    num_over: int = 0
    last_over: float = field(default_factory=time.monotonic)


@dataclass(slots=True)
class Row:
    """One line of the table."""

    lives: int = 0
    parents: int = 0
    killed: int = 0
    failed: int = 0
    seconds: float = 0.0
    left: dict[str, list[str]] = field(default_factory=dict)


class Run:
    """The lives of one backend, of so many parents at once, whose temporary folder is that of ``leftovers``."""

    def __init__(self, backend: str, leftovers: Leftovers, *, at_once: int, seed: int) -> None:
        self.backend, self.leftovers, self.at_once = backend, leftovers, at_once
        self.random = random.Random(f"{seed} {backend}")
        self.row = Row()
        self._parents: dict[int, Parent] = {}
        self._codes: dict[int, int] = {}  # of all that has died, other parents and orphans too
        self._life_seconds = _FIRST_GUESS_SECONDS

    def live(self, num_lives: int) -> Row:
        """All lives, then the counts."""
        started = time.monotonic()
        while self.row.lives < num_lives and self.row.failed < _MOST_FAILURES:
            planned = self.row.lives + sum(p.num_lives - p.num_over for p in self._parents.values())
            while len(self._parents) < self.at_once and planned < num_lives:
                size = min(LIVES_OF_A_PARENT, num_lives - planned)
                planned += size
                self._start(size, is_doomed=self.random.random() < KILLED_SHARE)
            self._wait()
        while self._parents:
            self._wait()
        self.row.seconds = time.monotonic() - started
        self.leftovers.settled(PATIENCE_SECONDS)
        for folder in self.leftovers.folder.glob("composer-rl-new-*"):
            os.utime(folder, (0, 0))  # a minute passes: so long one without a name is left alone
        self._start(1, is_doomed=False)  # the next process that opens a sandbox
        while self._parents:
            self._wait()
        self.row.left = self.leftovers.settled(PATIENCE_SECONDS)
        return self.row

    def _start(self, num_lives: int, *, is_doomed: bool) -> None:
        read, write = os.pipe()
        seed = self.random.getrandbits(32)
        dies_after = self.random.uniform(0, num_lives) if is_doomed else float("inf")
        pid = os.fork()
        if pid == 0:
            known = {"folder": self.leftovers.folder, "token": self.leftovers.token}
            run_parent(self.backend, num_lives, **known, seed=seed, progress=write)
        os.close(write)
        self._codes.pop(pid, None)  # of a dead one that had this number
        self._parents[read] = Parent(pid, read, num_lives, dies_after)
        self.row.parents += 1

    def _wait(self) -> None:
        """Until something happens: a life is over, a parent has ended or its moment has come."""
        now = time.monotonic()
        moments = [self._moment(parent) - now for parent in self._parents.values()]
        ready, _, _ = select.select(list(self._parents), [], [], max(0.0, min([*moments, 1.0])))
        for progress in ready:
            parent = self._parents[progress]
            dots = os.read(progress, 4096)
            if dots:
                now = time.monotonic()
                self._life_seconds += 0.1 * ((now - parent.last_over) / len(dots) - self._life_seconds)
                parent.num_over, parent.last_over = parent.num_over + len(dots), now
                self.row.lives += len(dots)
            else:
                self._end(parent)
        for parent in list(self._parents.values()):
            if time.monotonic() >= self._moment(parent):
                os.kill(parent.pid, signal.SIGKILL)
                self.row.killed += 1
                self.row.lives += parent.num_over < parent.num_lives  # the one that was cut short
                self._end(parent)

    def _moment(self, parent: Parent) -> float:
        """When a doomed parent dies: so many lives, and the fraction of one, after its start."""
        whole = int(parent.dies_after) if parent.dies_after < parent.num_lives else parent.num_lives
        if parent.num_over < whole or whole == parent.num_lives:
            return float("inf")
        return parent.last_over + (parent.dies_after - whole) * self._life_seconds

    def _end(self, parent: Parent) -> None:
        del self._parents[parent.progress]
        os.close(parent.progress)
        while parent.pid not in self._codes:
            self._codes |= collect()
            time.sleep(_PAUSE_SECONDS)
        self.row.failed += self._codes.pop(parent.pid) not in (0, -signal.SIGKILL)


def prove(leftovers: Leftovers) -> list[str]:
    """Plant one leak of each kind and see that it is counted; which kinds cannot be planted by this user.

    Raises:
        SystemExit: one was not seen, or something was there before.
    """
    unproven = []
    if any(leftovers.found().values()):
        raise SystemExit(f"something is there before the first life: {leftovers.found()}")
    for kind in KINDS:
        try:
            with planted(kind, leftovers.token, leftovers.folder):
                if not leftovers.found()[kind]:
                    raise SystemExit(f"the count does not see a planted leak among the {kind}")
        except OSError:
            unproven.append(kind)
        if leftovers.settled(PATIENCE_SECONDS)[kind]:
            raise SystemExit(f"the planted leak among the {kind} cannot be taken away")
    return unproven


def report(rows: dict[str, Row]) -> None:
    """Print the table, and what is left."""
    print(f"{'':<17}{'lives':>7}{'parents':>9}{'killed':>8}{'failed':>8}{'a second':>10}")
    for name, row in rows.items():
        speed = row.lives / row.seconds
        print(f"{name:<17}{row.lives:>7}{row.parents:>9}{row.killed:>8}{row.failed:>8}{speed:>10.1f}")
    print(f"\n{'left in the end':<17}" + "".join(f"{kind:>15}" for kind in KINDS))
    for name, row in rows.items():
        print(f"{name:<17}" + "".join(f"{len(row.left[kind]):>15}" for kind in KINDS))
        for kind in KINDS:
            for what in row.left[kind][:5]:
                print(f"  {kind}: {what}")


def measured(args: Namespace) -> dict[str, Row]:
    """Every backend that works here."""
    names = [name for name in args.backends.split(",") if name]
    checks = {name: choose_backend(name).is_available() for name in names}
    usable = [name for name in names if checks[name].ok]
    for name in set(names) - set(usable):
        print(f"{name}: not measured, {checks[name].detail}")
    if not usable:
        raise SystemExit("no backend works here")
    token = f"lives{secrets.token_hex(6)}"
    rows: dict[str, Row] = {}
    with tempfile.TemporaryDirectory(prefix=f"{token}-", ignore_cleanup_errors=True) as text:
        Path(text).chmod(0o755)
        leftovers = Leftovers(token, Path(text))
        unproven = prove(leftovers)
        print(f"planted and seen: {', '.join(kind for kind in KINDS if kind not in unproven)}")
        if unproven:
            print(f"this user cannot plant: {', '.join(unproven)}")
        for number, name in enumerate(usable):
            share = args.lives // len(usable) + (number < args.lives % len(usable))
            rows[name] = Run(name, leftovers, at_once=args.at_once, seed=args.seed).live(share)
            print(f"{name}: {rows[name].lives} lives", file=sys.stderr, flush=True)
    return rows


def main() -> None:
    """Live, count, print; exit code 1 for a leak."""
    rows = measured(options(__doc__, lives=10_000, backends=DEFAULT_BACKENDS, at_once=2, seed=0))
    report(rows)
    sys.exit(any(row.failed or any(row.left.values()) for row in rows.values()))


if __name__ == "__main__":
    main()
