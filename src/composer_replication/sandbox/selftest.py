"""Does the jail hold? Try to get out, and say which guard is not effective.

Every check plants something real outside (a listener, a secret file, a variable, a
process) and runs ``selftest_probe`` inside, which tries to reach it. Every limit is
tried by exceeding it. A backend that forgets one guard is named for that guard; no
reward may depend on it (``require_selftest``).
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from composer_replication.errors import ComposerError, SandboxFailure
from composer_replication.interfaces import SandboxBackend
from composer_replication.records import Check, ExecResult, Limits, SandboxSpec
from composer_replication.sandbox import acceptance
from composer_replication.sandbox.acceptance import WITHOUT_ISOLATION
from composer_replication.sandbox.host_paths import base_interpreter, base_python
from composer_replication.sandbox.selftest_bait import Bait

_MIB = 1 << 20
_LIMITS = Limits(
    memory_bytes=192 * _MIB,
    num_processes=24,
    disk_bytes=16 * _MIB,
    output_bytes=_MIB,
    num_open_files=64,
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
_EXIT_KILLED = 137
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
    def _running(
        self, orders: list[dict[str, Any]], timeout_seconds: float
    ) -> Iterator[tuple[ExecResult, Path]]:
        with TemporaryDirectory(dir=self.bait.root, ignore_cleanup_errors=True) as folder:
            tree = Path(folder) / "tree"
            tree.mkdir()
            spec = SandboxSpec(tree, (self.bait.shown,), (self.bait.masked,), _LIMITS)
            with self.backend.open(spec) as sandbox:
                result = sandbox.exec(
                    [str(base_python()), "-I", "-S", "-c", _PROBE.read_text()],
                    timeout_seconds=timeout_seconds,
                    stdin=json.dumps(orders).encode(),
                )
                yield result, tree

    def ask(self, *orders: dict[str, Any]) -> list[dict[str, Any]]:
        """Run probes that must come to an answer."""
        with self._running(list(orders), _PATIENCE_SECONDS) as (result, _):
            if result.exit_code != 0:
                raise _NoAnswerError(_last_line(result))
            return list(json.loads(result.stdout))

    def push(
        self, order: dict[str, Any], timeout_seconds: float = _PATIENCE_SECONDS
    ) -> tuple[ExecResult, Any]:
        """Run a probe that may be killed for what it does: the answer is None then."""
        with self._running([order], timeout_seconds) as (result, _):
            if result.exit_code not in (0, _EXIT_KILLED):
                raise _NoAnswerError(_last_line(result))
            answer = None
            if result.exit_code == 0:
                with suppress(ValueError):  # cut, or mixed with what else it printed
                    answer = json.loads(result.stdout)[0]
            return result, answer

    def daemon_dies(self, timeout_seconds: float, hold_seconds: float) -> bool:
        """Does the heartbeat of a daemon stop with the command (or its time-out) that started it?

        Raises:
            _NoAnswerError: no heartbeat was seen (it did not come up in time).
        """
        lives_seconds = min(timeout_seconds, hold_seconds) + 4.0
        order = {"do": "daemon", "file": "beat", "seconds": hold_seconds, "lives_seconds": lives_seconds}
        with self._running([order], timeout_seconds) as (result, tree):
            beat = tree / "beat"
            if not beat.exists() or beat.stat().st_size == 0:
                raise _NoAnswerError(_last_line(result))
            before = beat.stat().st_size
            threading.Event().wait(0.15)
            return before == beat.stat().st_size and result.timed_out == (hold_seconds > timeout_seconds)


class _NoAnswerError(Exception):
    """The probe could not run inside."""


def _last_line(result: ExecResult) -> str:
    return (result.stderr.strip().splitlines() or [f"exit code {result.exit_code}"])[-1]


def _network(trial: _Trial) -> str:
    order = {"do": "network", **trial.bait.network_order()}
    order["servers"] += getattr(trial.backend, "servers", list)()
    order["routes_count"] = not getattr(trial.backend, "keeps_routes", False)
    (answer,) = trial.ask(order)
    reached = list(answer["reached"]) + (
        ["a datagram socket of the host"] if trial.bait.got_datagram() else []
    )
    return f"reached {', '.join(reached)}" if reached else ""


def _host_files(trial: _Trial) -> str:
    files = trial.bait.host_files()
    (answer,) = trial.ask({"do": "files", "paths": list(files), "secrets": [str(trial.bait.secret)]})
    readable = [path for path, digest in files.items() if answer["digests"][path] == digest]
    readable += ["a planted secret"] if trial.bait.word in answer["text"] else []
    return f"could read {', '.join(readable)}" if readable else ""


def _masked(trial: _Trial) -> str:
    files = trial.bait.masked_files(base_interpreter().masked)
    (answer,) = trial.ask({"do": "files", "paths": list(files), "secrets": [str(trial.bait.neighbour)]})
    if trial.bait.word not in answer["text"]:
        return "a file beside a masked path cannot be read"
    readable = [path for path, digest in files.items() if answer["digests"][path] == digest]
    return f"could read {', '.join(readable)}" if readable else ""


def _environment(trial: _Trial) -> str:
    with trial.bait.variable():
        (answer,) = trial.ask({"do": "environment"})
    return "saw a variable of the parent" if trial.bait.word in answer["text"] else ""


def _writes(trial: _Trial) -> str:
    order = trial.bait.writes_order()
    try:
        (answer,) = trial.ask({"do": "writes", **order})
    finally:
        written = trial.bait.take_away(order)
    written += answer["written"]
    return f"could write {', '.join(written)}" if written else ""


def _signals(trial: _Trial) -> str:
    with trial.bait.victim() as victim:
        (answer,) = trial.ask({"do": "signals", "pid": victim.pid})
        reached = list(answer["reached"])
        if trial.bait.word in answer["text"]:
            reached.append("saw a process of the host")
        threading.Event().wait(0.05)
        if victim.poll() is not None:
            reached.append("ended a process of the host")
    return ", ".join(reached)


def _privilege(trial: _Trial) -> str:
    (answer,) = trial.ask({"do": "privilege"})
    return ", ".join(answer["gained"])


def _open_files(trial: _Trial) -> str:
    (answer,) = trial.ask({"do": "open_files", "try": 4 * _LIMITS.num_open_files})
    count = answer["count"]
    return (
        ""
        if count <= _LIMITS.num_open_files
        else f"opened {count} files; the limit is {_LIMITS.num_open_files}"
    )


def _processes(trial: _Trial) -> str:
    _, answer = trial.push({"do": "processes", "try": 2 * _LIMITS.num_processes})
    if answer is None or answer["count"] <= _LIMITS.num_processes:
        return ""
    return f"ran {answer['count']} processes; the limit is {_LIMITS.num_processes}"


def _memory(trial: _Trial) -> str:
    _, answer = trial.push({"do": "memory", "bytes": 2 * _LIMITS.memory_bytes})
    if answer is not None and answer["held"]:
        return f"one process used {answer['held'] // _MIB} MiB; the limit is {_LIMITS.memory_bytes // _MIB}"
    share = _LIMITS.memory_bytes // 3
    order = {"do": "memory_of_many", "num": 5, "bytes": share, "seconds": _HOLD_SECONDS}
    _, answer = trial.push(order)
    if answer is not None and answer["held"] > 3:
        return f"{answer['held']} processes together used {answer['held'] * share // _MIB} MiB"
    return ""


def _disk(trial: _Trial) -> str:
    problems: list[str] = []
    for kind, seconds in _DISK_KINDS.items():
        size = 2 * _LIMITS.disk_bytes
        name = f"probe-{trial.bait.word[-12:]}"
        order = {"do": "disk", "kind": kind, "bytes": size, "name": name, "seconds": seconds}
        _, answer = trial.push(order)
        if answer is not None and answer["written"] > _LIMITS.disk_bytes:
            problems.append(f"{kind}: {answer['written'] // _MIB} MiB")
    return f"wrote {', '.join(problems)}; the limit is {_LIMITS.disk_bytes // _MIB}" if problems else ""


def _output(trial: _Trial) -> str:
    result, _ = trial.push({"do": "output", "bytes": 64 * _MIB})
    if len(result.stdout) > _LIMITS.output_bytes or not result.truncated:
        return f"{len(result.stdout)} bytes of output came back; the limit is {_LIMITS.output_bytes}"
    return ""


def _timeout(trial: _Trial) -> str:
    for timeout_seconds in (0.7, _PATIENCE_SECONDS / 4):  # a busy machine may need longer to start
        try:
            dies = trial.daemon_dies(timeout_seconds=timeout_seconds, hold_seconds=60.0)
        except _NoAnswerError:
            continue
        return "" if dies else "a daemon lived on after the time-out"
    return "could not be tried: the probe did not start in time"


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

_FIX = "use another backend (--backend), or run in a virtual machine"


def run_selftest(
    backend: SandboxBackend, *, unseen: Collection[Path] = (), names: Collection[str] = GUARDS
) -> list[Check]:
    """Try every guard of ``backend``; about 2 to 5 seconds, for an ordinary user 2 more.

    Args:
        backend: to be tried.
        unseen: folders of this machine that it must not show, besides ``runs`` in the current one.
        names: of the guards to try.

    Returns:
        One check a guard, in the order of ``GUARDS``. A guard that could
        not be tried (the jail did not start, say) is not ok.
    """
    checks: list[Check] = []
    with Bait(unseen) as bait:
        trial = _Trial(backend, bait)
        for name in (name for name in GUARDS if name in names):
            attempt, meaning = GUARDS[name]
            try:
                problem = attempt(trial)
            except (ComposerError, _NoAnswerError, OSError, ValueError) as error:
                problem = f"could not be tried: {error}"
            fix = _FIX if problem else ""
            checks.append(Check(name, not problem, problem or meaning, fix))
    return checks


def require_selftest(
    backend: SandboxBackend, accepted: Collection[str] | None = None, *, unseen: Collection[Path] = ()
) -> tuple[str, ...]:
    """Refuse a backend whose guards are not all effective; tried once per process and backend.

    Args:
        backend: to be trusted with rewards.
        accepted: guards that may fail, or ``everything``; by default what this process has accepted.
        unseen: folders that it must not show, as the run's and the one with the hidden tests; each is
            tried when it is first named.

    Returns:
        The guards that do not hold and are accepted, in the order of ``GUARDS``: to be recorded.

    Raises:
        SandboxFailure: names every guard that does not hold and is not accepted (CR0306).
        UsageError: no guard of such a name (CR0341).
    """
    allowed = acceptance.accepted() if accepted is None else acceptance.checked(accepted)
    if backend.name == WITHOUT_ISOLATION and acceptance.EVERYTHING in allowed:
        return (acceptance.EVERYTHING,)  # there is nothing to try, and trying would shake this very machine
    kind = f"{type(backend).__module__}.{type(backend).__qualname__}:{backend.name}:{os.geteuid()}"
    with _lock:
        missing = _passed.get(kind)
        if missing is None:
            missing = _unheld(backend, unseen)
        elif not {(kind, folder) for folder in unseen} <= _closed:
            missing = {**missing, **_unheld(backend, unseen, ["host_files"])}
        unheld = {name: detail for name, detail in missing.items() if name not in allowed}
        if unheld and acceptance.EVERYTHING not in allowed:
            _refuse(backend, unheld)
        _passed[kind] = missing
        _closed.update((kind, folder) for folder in unseen)
        return tuple(name for name in GUARDS if name in missing)


def _unheld(
    backend: SandboxBackend, unseen: Collection[Path], names: Collection[str] = GUARDS
) -> dict[str, str]:
    return {
        check.name: check.detail
        for check in run_selftest(backend, unseen=unseen, names=names)
        if not check.ok
    }


def _refuse(backend: SandboxBackend, unheld: Mapping[str, str]) -> None:
    what = "; ".join(f"{name} ({detail})" for name, detail in unheld.items())
    raise SandboxFailure(
        "CR0306",
        f"the sandbox {backend.name} does not hold: {what}.",
        where="sandbox self-test",
        fix="composer-rl sandbox selftest",
    )
