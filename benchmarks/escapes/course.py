"""Run attempts against one backend and say what came of each."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from benchmarks.escapes.attempt import Attempt, Outcome
from benchmarks.escapes.drives import Stage, spec_of
from benchmarks.escapes.findings import ESCAPED, HELD, NOT_RUN, UNTRIED, WITHOUT_JAIL
from benchmarks.escapes.scene import Scene
from benchmarks.escapes.watch import Watch, kill_survivors, processes_with, system_shmem_bytes
from composer_replication.errors import ComposerError, SandboxFailure
from composer_replication.sandbox import SandboxBackend

_NOT_SHOWN = "CR0304"
_GRACE_SECONDS = 0.3
_MOST_TREE_BYTES = 1 << 20
_CRASHED = 1
"""The interpreter's own exit code for an exception that no attempt expects: a mistake in the script."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What came of one attempt: ``state`` is held, ESCAPED, not run, or COULD NOT BE TRIED."""

    family: str
    name: str
    state: str
    evidence: str
    seconds: float


def run_course(backend: SandboxBackend, attempts: Iterable[Attempt]) -> Iterator[Finding]:
    """Try each attempt in a scene and a sandbox of its own."""
    for attempt in attempts:
        reason = _reason_not_to_run(backend, attempt)
        if reason:
            yield Finding(attempt.family, attempt.name, NOT_RUN, reason, 0.0)
            continue
        started = time.monotonic()
        state, evidence = _try(backend, attempt)
        seconds = round(time.monotonic() - started, 2)
        yield Finding(attempt.family, attempt.name, state, evidence, seconds)


def _reason_not_to_run(backend: SandboxBackend, attempt: Attempt) -> str:
    if attempt.only_for not in {"", "root" if os.geteuid() == 0 else "user"}:
        return f"only for {attempt.only_for}"
    if backend.name in WITHOUT_JAIL and attempt.not_without_jail:
        return attempt.not_without_jail
    return ""


def _try(backend: SandboxBackend, attempt: Attempt) -> tuple[str, str]:
    with Scene(has_victim=attempt.has_victim, has_way_out=attempt.has_way_out) as scene:
        outcome = Outcome()
        outcome.notes["timeout"] = attempt.timeout_seconds
        try:
            _run(backend, attempt, scene, outcome)
        except (ComposerError, OSError) as error:
            refused = attempt.has_way_out and isinstance(error, SandboxFailure) and error.code == _NOT_SHOWN
            return (HELD, "it does not open") if refused else (UNTRIED, str(error)[:300])
        finally:
            kill_survivors(scene.token)
        try:
            evidence = attempt.judge(scene, outcome)
        except OSError as error:
            return UNTRIED, f"it could not be judged: {error}"[:300]
        if outcome.survivors and not evidence:
            evidence = f"alive after the end of the sandbox: {', '.join(outcome.survivors[:3])}"
        if outcome.broken and not evidence:
            evidence = outcome.broken[0]
        if evidence:
            return ESCAPED, evidence[:300]
        problem = _script_problem(outcome)
        return (UNTRIED, problem) if problem else (HELD, _how_it_ended(outcome))


def _run(backend: SandboxBackend, attempt: Attempt, scene: Scene, outcome: Outcome) -> None:
    outcome.notes["shmem_before"] = system_shmem_bytes()
    drive = attempt.drive or Stage.run
    with ExitStack() as stack:
        sandbox = stack.enter_context(backend.open(spec_of(scene, attempt, scene.tree)))
        stage = Stage(backend, attempt, scene, outcome, sandbox)
        if attempt.is_watched:
            watch = stack.enter_context(Watch(scene.token, (scene.tree,)))
        started = time.monotonic()
        drive(stage)
        outcome.seconds = time.monotonic() - started
        outcome.notes["alive"] = _still_alive(scene, outcome)
        outcome.in_tree = _tree_contents(scene.tree)
        outcome.notes["disk_at_end"] = sum(info.st_blocks * 512 for _, info in _own_files(scene.tree))
        if attempt.is_watched:
            outcome.samples = watch.samples
    outcome.survivors = [f"process {pid}" for pid in processes_with(scene.token)]
    outcome.notes["setuid"] = [
        path.name
        for path, info in _own_files(scene.tree)
        if info.st_mode & (stat.S_ISUID | stat.S_ISGID) and info.st_uid == os.getuid()
    ]


def _still_alive(scene: Scene, outcome: Outcome) -> list[str]:
    """Processes that outlived their command; a moment later, so that what is dying is dead."""
    beat = scene.tree / "beat"
    before = beat.stat().st_size if beat.exists() else 0
    if beat.exists() or processes_with(scene.token):
        time.sleep(_GRACE_SECONDS)
    outcome.notes["beats"] = beat.exists() and beat.stat().st_size > before
    return [f"process {pid}" for pid in processes_with(scene.token)]


def _own_files(tree: Path) -> Iterator[tuple[Path, os.stat_result]]:
    for place, _, names in os.walk(tree):
        for path in (Path(place, name) for name in names):
            with suppress(OSError):
                info = path.lstat()
                if stat.S_ISREG(info.st_mode):
                    yield path, info


def _tree_contents(tree: Path) -> bytes:
    found = bytearray()
    for path, _ in _own_files(tree):
        with suppress(OSError), path.open("rb") as handle:
            found += handle.read(1 << 16)
        if len(found) > _MOST_TREE_BYTES:
            break
    return bytes(found)


def _how_it_ended(outcome: Outcome) -> str:
    """For a reader: by which refusal, or by which limit, an attempt came to nothing."""
    if not outcome.results:
        return ""
    last = outcome.results[-1]
    said = (last.stderr.strip().splitlines() or [""])[-1]
    return f"exit code {last.exit_code}{', timed out' if last.timed_out else ''}: {said}"[:200]


def _script_problem(outcome: Outcome) -> str:
    """A script that crashed, or did not come to its first line in time, has tried nothing."""
    if outcome.notes.get("never_began"):
        return "it was ended before its first line: the machine is too busy"
    for result in outcome.results:
        if result.exit_code == _CRASHED and "Traceback" in result.stderr:
            return (result.stderr.strip().splitlines() or ["exit code 1"])[-1][:300]
    return ""
