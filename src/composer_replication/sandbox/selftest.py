"""Does the jail hold? Try to get out, and say which guard is not effective.

Every check plants something real outside (a listener, a secret file, a variable, a
process) and runs ``selftest_probe`` inside, which tries to reach it. Every limit is
tried by exceeding it. A backend that forgets one guard is named for that guard; no
reward may depend on it (``require_selftest``).

Nothing is believed that was not tried: each probe writes a word of this very run to its
standard error before it begins. Without that word, or without a first step that succeeded (one
process, one open file, one block on the disk), the guard "could not be tried" and does not hold.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from composer_replication.errors import ComposerError, SandboxFailure
from composer_replication.records import Check, ExecResult, Limits, SandboxSpec
from composer_replication.sandbox import acceptance
from composer_replication.sandbox.acceptance import WITHOUT_ISOLATION
from composer_replication.sandbox.choice import SandboxBackend, name_of
from composer_replication.sandbox.host_paths import base_interpreter, base_python
from composer_replication.sandbox.local_sandbox import LocalSandbox
from composer_replication.sandbox.process_folder import BAIT_PREFIX, make_held_folder
from composer_replication.sandbox.selftest_probe import digest, read_head

_MIB = 1 << 20
_LIMITS = Limits(
    memory_bytes=192 * _MIB, num_processes=24, disk_bytes=16 * _MIB, output_bytes=_MIB, num_open_files=64
)
_PATIENCE_SECONDS = 20.0
_HOLD_SECONDS = 1.5
_HIDING_SECONDS = 10.0  # what cannot be measured is ended after some looks; a busy machine looks seldom
_DISK_KINDS = {
    "one file": _HOLD_SECONDS,
    "many files": _HOLD_SECONDS,
    "deleted files": _HOLD_SECONDS,
    "mapped files": _HIDING_SECONDS,
    "mapped files in shared memory": _HIDING_SECONDS,
}
"""What is tried, and how long it is held."""
_ELSEWHERE = "mapped files in shared memory"  # not every jail has that folder; the tree each has
_EXIT_KILLED = 137
_PUSH_SECONDS = 60.0  # to come past a limit; a probe that is slow has not shown that it could not
_LOOK_SECONDS = 0.15
_SOME = 3
_MOST = 16
# Kept for documentation: nobody has them.
_NOBODY: dict[int, str] = {socket.AF_INET: "192.0.2.1", socket.AF_INET6: "2001:db8::9"}
_SERVERS, _SERVERS_IPV6 = ("1.1.1.1",), ("2606:4700:4700::1111",)
_LONGEST_TEMPORARY_FOLDER = 60  # a socket's whole path may take 107 bytes
_PROBE = Path(__file__).with_name("selftest_probe.py")

_passed: dict[str, dict[str, str]] = {}
"""Backends that were let through, and what they do not hold."""
_closed: set[tuple[str, Path]] = set()
"""Backends, and folders that they do not show."""
_lock = threading.Lock()


@dataclass(frozen=True, slots=True)
class _Trial:
    """One backend under test and what was planted for it."""

    backend: SandboxBackend
    bait: Bait

    @contextmanager
    def open(self) -> Iterator[tuple[LocalSandbox, Path]]:
        with TemporaryDirectory(dir=self.bait.root, ignore_cleanup_errors=True) as folder:
            tree = Path(folder) / "tree"
            tree.mkdir()
            spec = SandboxSpec(tree, (self.bait.shown,), (self.bait.masked,), _LIMITS)
            with self.backend.open(spec) as sandbox:
                yield sandbox, tree

    def ask(self, do: str, **order: Any) -> dict[str, Any]:
        """Run a probe that must come to an answer."""
        with self.open() as (sandbox, _):
            return _answer(_probe(sandbox, do, _PATIENCE_SECONDS, **order))

    def push(self, do: str, **order: Any) -> dict[str, Any] | None:
        """Run a probe that may be killed for what it does: the answer is None then."""
        with self.open() as (sandbox, _):
            result = _probe(sandbox, do, _PUSH_SECONDS, **order)
        if result.timed_out:
            raise _NoAnswerError(f"the probe did not come to an end within {_PUSH_SECONDS:g} seconds")
        return None if result.exit_code == _EXIT_KILLED else _answer(result)

    def daemon_dies(self, timeout_seconds: float, hold_seconds: float) -> bool:
        """Does the heartbeat of a daemon stop with the command (or its time-out) that started it?

        Looked at from outside and from inside: where the tree is a copy, the heart beats in the other one.
        """
        lives_seconds = min(timeout_seconds, hold_seconds) + 4.0
        times = {"seconds": hold_seconds, "lives_seconds": lives_seconds}
        with self.open() as (sandbox, tree):
            result = _probe(sandbox, "daemon", timeout_seconds, file="beat", **times)
            beat = tree / "beat"
            if not beat.exists() or beat.stat().st_size == 0:
                raise _NoAnswerError("no heartbeat of the daemon was seen")
            if result.timed_out != (hold_seconds > timeout_seconds):
                how = "with its time-out" if result.timed_out else "before its time-out"
                raise _NoAnswerError(f"the command ended {how}")
            before = beat.stat().st_size
            inside = _answer(_probe(sandbox, "beats", _PATIENCE_SECONDS, file="beat", seconds=_LOOK_SECONDS))
            return before == beat.stat().st_size and bool(inside["before"]) and not inside["beats"]


class _NoAnswerError(Exception):
    """The probe could not run inside, or nothing shows that it did."""


def _probe(sandbox: LocalSandbox, do: str, timeout_seconds: float, **order: Any) -> ExecResult:
    """Run a probe; what it wrote, without the word that shows that it began."""
    word = f"began-{secrets.token_hex(8)}"
    result = sandbox.exec(
        [str(base_python()), "-I", "-S", "-c", _PROBE.read_text()],
        timeout_seconds=timeout_seconds,
        stdin=json.dumps({"word": word, "do": do, **order}).encode(),
    )
    if word not in result.stderr:
        raise _NoAnswerError(f"the probe did not begin ({_last_line(result)})")
    return replace(result, stderr=result.stderr.replace(f"{word}\n", ""))


def _answer(result: ExecResult) -> dict[str, Any]:
    """What a probe answered that ended by itself."""
    if result.exit_code != 0:
        raise _NoAnswerError(_last_line(result))
    with suppress(ValueError):  # cut, or mixed with what else was printed
        found = json.loads(result.stdout)
        if isinstance(found, dict):
            return found
    raise _NoAnswerError("the probe began and gave no answer")


def _last_line(result: ExecResult) -> str:
    return (result.stderr.strip().splitlines() or [f"exit code {result.exit_code}"])[-1]


def _require_first_step(count: int, ended_by: str, what: str) -> None:
    """A limit is not shown by somebody who could not even begin to use it up."""
    if count < 1:
        raise _NoAnswerError(f"{what}{f' ({ended_by})' if ended_by else ''}")


def _said(how: str, found: Iterable[str]) -> str:
    """What a guard did not hold; nothing when it held."""
    what = ", ".join(found)
    return f"{how} {what}" if what else ""


def _network(trial: _Trial) -> str:
    reached = list(trial.ask("network", targets=trial.bait.network)["reached"])
    reached += ["a datagram socket of the host"] if trial.bait.got_datagram() else []
    return _said("reached", reached)


def _read(trial: _Trial, files: Mapping[str, str], secret: Path) -> tuple[list[str], bool]:
    """Which of these files it could read, by their digests, and whether it could read the word of the secret."""
    answer = trial.ask("files", paths=list(files), secrets=[str(secret)])
    readable = [path for path, digest in files.items() if answer["digests"][path] == digest]
    return readable, trial.bait.word in answer["text"]


def _host_files(trial: _Trial) -> str:
    readable, has_secret = _read(trial, trial.bait.host_files(), trial.bait.secret)
    return _said("could read", [*readable, *(["a planted secret"] if has_secret else [])])


def _masked(trial: _Trial) -> str:
    files = trial.bait.masked_files(base_interpreter().masked)
    readable, has_neighbour = _read(trial, files, trial.bait.neighbour)
    return _said("could read", readable) if has_neighbour else "a file beside a masked path cannot be read"


def _environment(trial: _Trial) -> str:
    name = f"COMPOSER_RL_BAIT_{secrets.token_hex(4)}"
    os.environ[name] = trial.bait.word
    try:
        text = trial.ask("environment")["text"]
    finally:
        del os.environ[name]
    return "saw a variable of the parent" if trial.bait.word in text else ""


def _writes(trial: _Trial) -> str:
    bait, name, written = trial.bait, f"probe-{secrets.token_hex(8)}", []
    folders = [bait.root / "outside", bait.root, bait.shown, Path("/"), Path("/etc"), Path("/usr/bin")]
    with suppress(RuntimeError):  # a user id without an account
        folders.append(Path.home())
    files = [str(bait.secret), str(bait.neighbour)]
    try:
        answer = trial.ask("writes", name=name, folders=[str(folder) for folder in folders], files=files)
    finally:  # looked for on the host: a file of that name in its private folders is no breach
        for folder in folders:
            with suppress(OSError):
                (folder / name).unlink()
                written.append(str(folder))
    return _said("could write", [*written, *answer["written"]])


def _signals(trial: _Trial) -> str:
    command = ["/bin/sh", "-c", "read line", trial.bait.word]  # which it must not find in a command line
    with subprocess.Popen(command, stdin=subprocess.PIPE) as victim:
        try:
            answer = trial.ask("signals", pid=victim.pid)
            time.sleep(0.05)
            was_ended = victim.poll() is not None
        finally:
            victim.kill()
    reached = [*answer["reached"], *(["ended a process of the host"] if was_ended else [])]
    reached += ["saw a process of the host"] if trial.bait.word in answer["text"] else []
    return ", ".join(reached)


def _privilege(trial: _Trial) -> str:
    return ", ".join([*trial.ask("privilege")["gained"], *_chosen_starters(trial)])


def _chosen_starters(trial: _Trial) -> list[str]:
    """What runs with capabilities when the variables of a command lead to programs in its tree."""
    with trial.open() as (sandbox, tree):
        for name in _STARTERS:
            sandbox.write_file(f"bin/{name}", _TELLING, is_executable=True)
        path = {"PATH": f"{tree}/bin:/usr/bin:/bin"}
        sandbox.exec("env true", timeout_seconds=_PATIENCE_SECONDS, env=path)
        told = sandbox.read_file("told").decode().split("ran ")[1:]
    if not told:
        raise _NoAnswerError("no program of the tree ran")
    with_some = {one.split()[0] for one in told if re.search(r"CapEff:\s*0*[1-9a-f]", one)}
    return [f"{name} of its tree ran with capabilities" for name in sorted(with_some)]


def _open_files(trial: _Trial) -> str:
    most = _LIMITS.num_open_files
    answer = trial.ask("use_up", what="open_files", most=4 * most)
    _require_first_step(answer["taken"], answer["ended_by"], "/dev/null cannot be opened")
    return f"opened {answer['count']} files; the limit is {most}" if answer["count"] > most else ""


def _processes(trial: _Trial) -> str:
    most = _LIMITS.num_processes
    answer = trial.push("use_up", what="processes", most=2 * most - 1)
    if answer is None:
        return ""
    _require_first_step(answer["taken"], answer["ended_by"], "no process can be started")
    return f"ran {answer['count']} processes; the limit is {most}" if answer["count"] > most else ""


def _memory(trial: _Trial) -> str:
    answer = trial.push("memory", bytes=2 * _LIMITS.memory_bytes)
    if answer is not None and answer["held"]:
        return f"one process used {answer['held'] // _MIB} MiB; the limit is {_LIMITS.memory_bytes // _MIB}"
    share = _LIMITS.memory_bytes // 3
    answer = trial.push("memory_of_many", num=5, bytes=share, seconds=_HOLD_SECONDS)
    if answer is None:
        return ""
    held = answer["held"]
    _require_first_step(held, "", "no process got a third of the memory")
    return f"{held} processes together used {held * share // _MIB} MiB" if held > 3 else ""


def _disk(trial: _Trial) -> str:
    problems: list[str] = []
    for kind, seconds in _DISK_KINDS.items():
        name = f"probe-{trial.bait.word[-12:]}"
        answer = trial.push("disk", kind=kind, bytes=2 * _LIMITS.disk_bytes, name=name, seconds=seconds)
        if answer is None or (answer["is_nowhere"] and kind == _ELSEWHERE):
            continue
        _require_first_step(answer["written"], answer["ended_by"], f"{kind}: they cannot be written")
        if answer["written"] > _LIMITS.disk_bytes:
            problems.append(f"{kind}: {answer['written'] // _MIB} MiB")
    return f"wrote {', '.join(problems)}; the limit is {_LIMITS.disk_bytes // _MIB}" if problems else ""


def _output(trial: _Trial) -> str:
    with trial.open() as (sandbox, _):
        result = _probe(sandbox, "output", _PUSH_SECONDS, bytes=64 * _MIB)
    if len(result.stdout) > _LIMITS.output_bytes:
        return f"{len(result.stdout)} bytes of output came back; the limit is {_LIMITS.output_bytes}"
    if not result.stdout:
        raise _NoAnswerError("no output came back at all")
    return "" if result.truncated else "output was cut, and its result does not say so"


def _timeout(trial: _Trial) -> str:
    problem = ""
    for timeout_seconds in (0.7, _PATIENCE_SECONDS / 4):  # a busy machine may need longer to start
        try:
            dies = trial.daemon_dies(timeout_seconds=timeout_seconds, hold_seconds=60.0)
        except _NoAnswerError as error:
            problem = str(error)
            continue
        return "" if dies else "a daemon lived on after the time-out"
    raise _NoAnswerError(problem)


def _leftovers(trial: _Trial) -> str:
    dies = trial.daemon_dies(timeout_seconds=_PATIENCE_SECONDS, hold_seconds=0.05)
    return "" if dies else "a daemon lived on after its command had ended"


GUARDS: dict[str, tuple[Callable[[_Trial], str], str]] = {
    "network": (_network, "nothing of the host's network can be reached"),
    "host_files": (_host_files, "files of the host cannot be read"),
    "masked": (_masked, "masked paths and installed packages cannot be read"),
    "environment": (_environment, "variables of the parent are not seen"),
    "writes": (_writes, "nothing outside the tree can be written"),
    "signals": (_signals, "processes of the host cannot be seen, signalled or traced"),
    "privilege": (_privilege, "no privileges, and none to gain"),
    "open_files": (_open_files, "open files are limited"),
    "processes": (_processes, "processes are limited"),
    "memory": (_memory, "memory is limited, for one process and for all together"),
    "disk": (_disk, "disk is limited: one file, many files, files that are deleted, mapped ones too"),
    "output": (_output, "output is cut"),
    "timeout": (_timeout, "a time-out kills daemons too"),
    "leftovers": (_leftovers, "nothing lives on after a command"),
}
"""Each guard: the function that tries it (empty when it holds), and what holding means."""

_STARTERS = ("setpriv", "env", "sh", "bwrap")
_TELLING = b"""#!/bin/sh
PATH=/usr/bin:/bin
{ echo "ran ${0##*/}"; grep CapEff /proc/self/status; } >> "${0%/*}/../told"
exec "/usr/bin/${0##*/}" "$@"
"""
_FIX = "use another backend (--backend), or run in a virtual machine"


def run_selftest(
    backend: SandboxBackend,
    *,
    unseen: Collection[Path] = (),
    names: Collection[str] = GUARDS,
    progress: Callable[[int, int, str], None] | None = None,
) -> list[Check]:
    """Try every guard of ``backend``, or those of ``names``; about 2 to 5 seconds, for an ordinary user 2 more.

    Args:
        backend: to be tried.
        unseen: folders of this machine that it must not show, besides ``runs`` in the current one.
        names: of the guards to try.
        progress: called with (guards tried, all of them, the next one).

    Returns:
        One check a guard, in the order of ``GUARDS``. One that could not be tried (the probe did not start, say) is not ok.

    Raises:
        SandboxFailure: nothing can be planted on this machine (CR0302), or its disk is full (CR0104).
    """
    checks: list[Check] = []
    with ExitStack() as stack:
        try:
            bait = Bait(unseen, stack)
        except OSError as error:
            why = f"the self-test cannot plant what it looks for: {error.strerror or error}."
            raise SandboxFailure("CR0302", why, where=str(error.filename or "")) from error
        trial = _Trial(backend, bait)
        for name in (name for name in GUARDS if name in names):
            attempt, meaning = GUARDS[name]
            if progress is not None:
                progress(len(checks), len(names), name)
            try:
                problem = attempt(trial)
            except Exception as error:  # somebody's backend raises what it likes: not tried
                if isinstance(error, SandboxFailure) and error.code == "CR0104":
                    raise  # a full disk says nothing of a jail
                said = error if isinstance(error, ComposerError | _NoAnswerError | OSError) else repr(error)
                problem = f"could not be tried: {said}"
            fix = _FIX if problem else ""
            absent = f" (this machine has {' and '.join(bait.absent)})" if bait.absent else ""
            untried = absent if name == "network" else ""
            checks.append(Check(name, not problem, f"{problem or meaning}{untried}", fix))
    return checks


def require_selftest(
    backend: SandboxBackend,
    accepted: Collection[str] | None = None,
    *,
    unseen: Collection[Path] = (),
    progress: Callable[[int, int, str], None] | None = None,
) -> tuple[str, ...]:
    """Refuse a backend whose guards are not all effective; tried once per process and backend.

    Args:
        backend: to be trusted with rewards.
        accepted: guards that may fail, or ``everything``; by default what this process has accepted.
        unseen: folders that it must not show, as the run's and the one with the hidden tests; each is
            tried when it is first named.
        progress: as for ``run_selftest``.

    Returns:
        The guards that do not hold and are accepted, in the order of ``GUARDS``: to be recorded.

    Raises:
        SandboxFailure: names every guard that does not hold and is not accepted (CR0306); nothing can be planted (CR0302).
        UsageError: no guard of such a name (CR0340).
    """
    allowed = acceptance.accepted() if accepted is None else acceptance.checked(accepted)
    if backend.name == WITHOUT_ISOLATION and acceptance.EVERYTHING in allowed:
        return (acceptance.EVERYTHING,)  # there is nothing to try, and trying would shake this very machine
    kind = f"{type(backend).__module__}.{type(backend).__qualname__}:{backend.name}:{os.geteuid()}"
    with _lock:
        missing = _passed.get(kind)
        if missing is None:
            missing = _unheld(run_selftest(backend, unseen=unseen, progress=progress))
        elif not {(kind, folder) for folder in unseen} <= _closed:
            missing = {**missing, **_unheld(run_selftest(backend, unseen=unseen, names=["host_files"]))}
        unheld = {name: detail for name, detail in missing.items() if name not in allowed}
        if unheld and acceptance.EVERYTHING not in allowed:
            _refuse(backend, unheld)
        _passed[kind] = missing
        _closed.update((kind, folder) for folder in unseen)
        return tuple(name for name in GUARDS if name in missing)


def _unheld(checks: Iterable[Check]) -> dict[str, str]:
    return {check.name: check.detail for check in checks if not check.ok}


def _refuse(backend: SandboxBackend, unheld: Mapping[str, str]) -> None:
    because: dict[str, list[str]] = {}
    for name, detail in unheld.items():
        because.setdefault(detail, []).append(name)
    what = "; ".join(f"{', '.join(names)} ({detail})" for detail, names in because.items())
    raise SandboxFailure(
        "CR0306",
        f"the sandbox {backend.name} does not hold: {what}.",
        where="sandbox self-test",
        fix=f"composer-rl sandbox selftest --backend {name_of(backend)}",
    )


class Bait:
    """Real things outside a jail that a probe must not reach: sockets, files. ``word`` is the secret to look for.

    All of it is planted at once, and removed with ``stack``.

    ``absent`` says what this machine lacks, so that nothing of it could be planted. In ``unseen``, folders that no jail
    may show, as a task store and a run folder, nothing is written.
    """

    def __init__(self, unseen: Iterable[Path], stack: ExitStack) -> None:
        self.word = f"secret-{secrets.token_hex(12)}"
        # Another place than the usual temporary folder where its name leaves no room for a socket's.
        is_long = len(os.path.realpath(tempfile.gettempdir())) > _LONGEST_TEMPORARY_FOLDER
        self.root, held = make_held_folder(BAIT_PREFIX, "/tmp" if is_long else None)
        stack.callback(os.close, held)
        stack.callback(shutil.rmtree, self.root, ignore_errors=True)
        self._stack = stack
        self._unseen = (*unseen, Path("runs"))
        self._datagrams: list[socket.socket] = []
        self.network: list[tuple[str, int, int, Any, str]] = []
        """What a probe tries: how it is called (nothing where we look whether it came), family, kind, address, what is sent."""
        self.absent: list[str] = []
        self.secret = self._file("outside/secret.txt")
        self._planted = [self._file("outside/runs/run.toml"), self._file("outside/tasks/secrets/hidden.py")]
        self.shown = self.root / "shown"
        self.neighbour = self._file("shown/inner/neighbour.txt")
        self.masked = self.root / "shown" / "inner" / "masked"
        self._file("shown/inner/masked/deep/hidden.txt")
        for path in (self.root, *self.root.rglob("*")):
            path.chmod(0o755 if path.is_dir() else 0o644)
        self._open_sockets()

    def _open_sockets(self) -> None:
        unix_path = str(self.root / "outside" / "host.sock")
        abstract = f"\0composer-rl-{secrets.token_hex(8)}"
        self._listen(socket.AF_UNIX, socket.SOCK_STREAM, unix_path, "a unix socket of the host")
        self._listen(socket.AF_UNIX, socket.SOCK_STREAM, abstract, "an abstract unix socket of the host")
        os.chmod(unix_path, 0o777)
        (self.root / "outside").chmod(0o755)
        named = _nameservers()
        servers = (*_SERVERS, *(each for each in named if ":" not in each))
        servers_ipv6 = (*_SERVERS_IPV6, *(each for each in named if ":" in each))
        self._plant_internet(socket.AF_INET, "127.0.0.1", servers, "169.254.169.254")
        self._plant_internet(socket.AF_INET6, "::1", servers_ipv6, "fd00:ec2::254")

    def _plant_internet(self, family: int, loopback: str, servers: Iterable[str], metadata: str) -> None:
        """Listen on the loopback and the address by which others reach us; what this machine lacks of IPv6 is said in ``absent``."""
        by = "IPv6 " if family == socket.AF_INET6 else ""
        try:
            self._listen(family, socket.SOCK_STREAM, (loopback, 0), f"a listener on the host's {by}loopback")
            self._datagrams.append(self._listen(family, socket.SOCK_DGRAM, (loopback, 0), ""))
        except OSError:
            if not by:
                raise
            self.absent.append("no loopback address of IPv6")
        try:
            own = _own_address(family)
        except OSError:  # no route leads out of this machine
            if by:
                self.absent.append("no route of IPv6 that leads out")
                return
        else:
            with suppress(OSError):  # an address that is not ours any more
                self._listen(family, socket.SOCK_STREAM, (own, 0), f"this machine by its {by}address")
        route = f"{'an' if by else 'a'} {by}route to the outside"
        self.network.append((route, family, socket.SOCK_DGRAM, (_NOBODY[family], 9), ""))
        places = [(f"a server outside ({server})", server, 53) for server in servers]
        for what, address, port in (*places, (f"the metadata service of a cloud ({metadata})", metadata, 80)):
            self.network.append((what, family, socket.SOCK_STREAM, (address, port), "probe"))

    def _file(self, name: str) -> Path:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self.word)
        path.chmod(0o644)
        return path

    def _listen(self, family: int, kind: int, address: Any, what: str) -> socket.socket:
        listener = self._stack.enter_context(socket.socket(family, kind))
        listener.bind(address)
        listener.setblocking(False)
        if kind == socket.SOCK_STREAM:
            listener.listen(8)
        place = address if family == socket.AF_UNIX else listener.getsockname()[:2]
        self.network.append((what, family, kind, place, "probe"))
        return listener

    def got_datagram(self) -> bool:
        got = False
        for listener in self._datagrams:
            with suppress(BlockingIOError):
                got = bool(listener.recv(64)) or got
        return got

    def masked_files(self, folders: Iterable[Path]) -> dict[str, str]:
        """Digests of files below our masked folder and of some below each of ``folders``."""
        return _digests(path for folder in (self.masked, *folders) for path in _some_files(folder))

    def host_files(self) -> dict[str, str]:
        """Digests of files that we can read and the jail must not.

        Accounts, our home, this package, a run folder and hidden tests: planted ones, and the real ones.
        """
        names = ("/etc/shadow", "/etc/passwd", "/etc/hostname", "/etc/machine-id", __file__)
        found = [Path(name) for name in names]
        with suppress(OSError, RuntimeError):
            found += [path for path in sorted(Path.home().iterdir()) if path.is_file()][:_SOME]
        unseen = [path for folder in self._unseen for path in _one_of_each(folder.resolve())]
        return _digests([*found, *self._planted, *unseen])


def _own_address(family: int) -> str:
    """By which others reach us. Nothing is sent to that address, which is nobody's."""
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((_NOBODY[family], 9))
        return str(probe.getsockname()[0])


def _nameservers() -> list[str]:
    with suppress(OSError):
        lines = Path("/etc/resolv.conf").read_text().splitlines()
        return [line.split()[1] for line in lines if line.startswith("nameserver ")][:1]
    return []


def _some_files(folder: Path, suffixes: tuple[str, ...] = (".py", ".txt", ".whl")) -> list[Path]:
    found: list[Path] = []
    for place, _, names in os.walk(folder):
        paths = (Path(place) / name for name in sorted(names) if name.endswith(suffixes))
        found += [path for path in paths if path.is_file() and path.stat().st_size]  # a pipe would hold us
        if len(found) >= _SOME:
            break
    return found[:_SOME]


def _one_of_each(folder: Path) -> list[Path]:
    """One file of a folder that no jail may show, and of each folder in it."""
    with suppress(OSError):
        folders = (folder, *sorted(path for path in folder.iterdir() if path.is_dir()))
        return [path for place in folders for path in _some_files(place, ("",))[:1]][:_MOST]
    return []


def _digests(paths: Iterable[Path]) -> dict[str, str]:
    """As the probe computes them, of those in which it would find something."""
    return {str(path): digest(text) for path in paths if (text := read_head(str(path)))}
