"""Where trees of one repository are tried out: each run has a fresh tree, a batch shares a sandbox."""

from __future__ import annotations

import ast
import json
import secrets
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Any

from composer_replication.records import ExecResult, Limits
from composer_replication.sandbox.process_folder import process_folder
from composer_replication.tasks.intake.environment import Environment
from composer_replication.tasks.intake.tree_rules import is_subject_path, is_test_path
from composer_replication.tasks.planning.edits import write_files
from composer_replication.tasks.syntax_trees import parsed
from composer_replication.tasks.test_run import (
    BLOCKED,
    TestReport,
    Trial,
    judge,
    read_records,
    record_bytes,
    run_inside,
    runner_text,
)

# --- Test runs of one repository in one sandbox: the test runner is started once, then forked.

PRELOAD_SECONDS = 60.0
SECONDS_BETWEEN_RUNS = 15.0
TREE_SHARE = 0.25
"""Of ``disk_bytes``: a run that removes its tree may write as much more, so it must stay small."""
MAX_RUNS = 64
_NUM_OWN_PROCESSES = 1
_BLOCK_BYTES = 4096
_CALL = "serve(main, Channel)\n"
_UNSAFE_AFTER_FORK = frozenset(
    "gevent eventlet grpcio tensorflow jax jaxlib torch ray pytest-twisted pytest-qt pytest-xdist pytest-xvfb".split()
)
"""They keep threads, sockets or displays that a fork tears, often without a thread to be seen by."""


def run_batch(
    runs: Sequence[Trial],
    environment: Environment,
    *,
    backend: str | None = None,
    limits: Limits | None = None,
) -> list[TestReport]:
    """Do runs one after the other, each in a tree of its own, and report on each as ``run_alone`` would.

    One interpreter imports the test runner, its plugins and the foreign modules that the trees
    import at their top; each run is forked off it, so no module of a tree is ever shared, only the
    compiled code of files with the same path and bytes. Where
    that import started threads, met a module that the trees have too, or the environment holds a
    package that is known to break when forked, each run is done by ``run_alone`` instead.

    A run's time counts from its fork, without the start of the interpreter. **Not isolated**: a run may
    read the memory of the batch, nonces too, change the trees of later runs, and signal the processes of
    the batch; where the sandbox has no ``/proc`` (sandlock), a daemon that left its session lives on until
    the batch ends. Each run leads a session, and modules imported beforehand keep plain ``assert`` messages.
    So use it for golden and stub code of one repository, never for a policy's answers.

    Args:
        runs: of one repository; their order is the order of the reports.
        environment: where the test runner lives.
        backend: sandbox backend by name or dotted path; None for the best of this machine.
        limits: of one run; one process more is allowed for the batch itself. A batch whose
            trees would fill more than ``TREE_SHARE`` of ``disk_bytes`` is split over sandboxes.

    Raises:
        OSError: the disk of this machine is full.
    """
    chosen = limits or Limits()
    if environment.names & _UNSAFE_AFTER_FORK:
        return [run_alone(run, environment, backend=backend, limits=chosen) for run in runs]
    reports: list[TestReport] = []
    largest = max((_tree_bytes(run.files) for run in runs), default=_BLOCK_BYTES)
    at_once = max(1, min(MAX_RUNS, int(chosen.disk_bytes * TREE_SHARE) // largest))
    for first in range(0, len(runs), at_once):
        waiting = list(runs[first : first + at_once])
        while waiting:
            found, was_started = _run_part(waiting, environment, backend, chosen, is_alone=False)
            reports += found
            waiting = waiting[len(found) :]
            while waiting:  # the next one took the batch down, or nothing ever started: alone, then
                reports.append(run_alone(waiting.pop(0), environment, backend=backend, limits=chosen))
                if was_started:
                    break
    return reports


def run_alone(
    run: Trial, environment: Environment, *, backend: str | None = None, limits: Limits | None = None
) -> TestReport:
    """Do one run in a sandbox of its own, in which nothing is imported before; the arguments are those of ``run_batch``."""
    return _run_part([run], environment, backend, limits or Limits(), is_alone=True)[0][0]


def _tree_bytes(files: Mapping[str, bytes]) -> int:
    """About the disk of a tree: a file takes whole blocks, and may have a folder of its own."""
    return _BLOCK_BYTES + sum(len(data) + 2 * _BLOCK_BYTES for data in files.values())


def _run_part(
    runs: Sequence[Trial], environment: Environment, backend: str | None, limits: Limits, *, is_alone: bool
) -> tuple[list[TestReport], bool]:
    """Reports of the first runs, up to one that the batch has no answer for; whether it got as far as any.

    One that ``is_alone`` has a report in any case.
    """
    own_nonce = secrets.token_hex(16)
    nonces = [secrets.token_hex(16) for _ in runs]
    order: dict[str, Any] = {
        "nonce": own_nonce,
        "keep_bytes": record_bytes(limits),
        "preload": None if is_alone else {"seconds": PRELOAD_SECONDS, **_preload_order(runs)},
        "is_alone": is_alone,
    }
    names = ("suite_plugin", "pytest_runner", "context_recorder", "batch_server")
    program = "\n\n".join([*(runner_text(f"{name}.py") for name in names), _CALL])
    allowed = replace(
        limits,
        output_bytes=(1 if is_alone else 2) * record_bytes(limits),
        num_processes=limits.num_processes + _NUM_OWN_PROCESSES,
    )
    seconds = 2 * PRELOAD_SECONDS + sum(run.wall_seconds + SECONDS_BETWEEN_RUNS for run in runs)
    with tempfile.TemporaryDirectory(prefix="batch-", dir=process_folder()) as folder:
        root = Path(folder) / "trees"
        root.mkdir(mode=0o700)  # closed to others: the sign by which the server knows what it may clear
        order["runs"] = [
            _run_order(run, nonce, root, f"{number}/tree")
            for number, (run, nonce) in enumerate(zip(runs, nonces, strict=True))
        ]
        result = run_inside(
            root, environment, [program], json.dumps(order).encode(),
            backend=backend, limits=allowed, timeout_seconds=seconds,
        )  # fmt: skip
    results, was_started = _results(result.stdout, own_nonce)
    if is_alone:
        said = (results or [result])[0]  # all but how it ended is known from the sandbox itself
        same = {name: getattr(said, name) for name in ("exit_code", "timed_out", "seconds")}
        results = [replace(result, **same)]
    reports = [judge(result, nonce, run) for run, nonce, result in zip(runs, nonces, results, strict=False)]
    return reports, was_started


def _run_order(run: Trial, nonce: str, root: Path, folder: str) -> dict[str, Any]:
    """Write the tree of a run below ``root``; what the server is told of it."""
    (root / folder).mkdir(parents=True)
    write_files(root / folder, run.files)
    return {
        "folder": folder,
        "timeout_seconds": run.wall_seconds,
        "idle_seconds": run.idle_seconds,
        "each_seconds": run.each_seconds,
        "request": run.request(root / folder, nonce),
    }


def _results(stdout: str, nonce: str) -> tuple[list[ExecResult], bool]:
    """What the server said of the runs, in order, as if each had been a command of its own."""
    results: list[ExecResult] = []
    records = read_records(stdout, nonce)
    for value in records:
        if value["event"] == "run" and value["number"] == len(results):
            same = ("exit_code", "stdout", "truncated", "timed_out", "seconds")
            said = {name: value[name] for name in same}
            # A sandbox that is out of memory ends the batch.
            results.append(ExecResult(**said, stderr=value["last_words"], out_of_memory=False))
    return results, bool(records)


def _preload_order(runs: Sequence[Trial]) -> dict[str, Any]:
    """What to import beforehand: what the trees import at their top and do not have themselves."""
    # Python files alone: a py.typed is no module py, which the test runner has.
    paths = {PurePosixPath(path) for run in runs for path in run.files if path.endswith(".py")}
    own = {part for path in paths for part in (*path.parts[:-1], path.stem)}
    # One version of each file will do: the trees of a batch differ in a few bodies.
    files = {path: data for run in reversed(runs) for path, data in run.files.items()}
    wanted: dict[str, set[str]] = {}
    for path, data in files.items():
        if is_subject_path(path) or is_test_path(path):
            for module, names in _top_imports(data):
                if module.partition(".")[0] not in own:
                    wanted.setdefault(module, set()).update(names)
    return {
        "blocked": [f"no:{name}" for name in BLOCKED],
        "tree_names": sorted(_top_names([run.files for run in runs])),
        "modules": [[module, sorted(names)] for module, names in sorted(wanted.items())],
    }


def _top_names(trees: Sequence[Mapping[str, bytes]]) -> set[str]:
    """Modules that a tree has outside of its packages: a path of imports may lead to them by their name alone."""
    inits = set.intersection(*({path for path in files if path.endswith("__init__.py")} for files in trees))
    packages = {str(PurePosixPath(path).parent) for path in inits} - {"."}
    places = {PurePosixPath(path) for files in trees for path in files if path.endswith(".py")}
    places |= {folder for place in places for folder in place.parents}
    return {place.stem for place in places if place.name and str(place.parent) not in packages}


@lru_cache(maxsize=4096)
def _top_imports(source: bytes) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Modules that a file imports when it is imported itself, each with the names taken from it."""
    if b"import" not in source:
        return ()
    module = parsed(source)
    return () if module is None else tuple(_imports_of(module.body))


def _imports_of(body: Iterable[ast.stmt]) -> Iterator[tuple[str, tuple[str, ...]]]:
    for node in body:
        if isinstance(node, ast.Import):
            yield from ((alias.name, ()) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module, tuple(alias.name for alias in node.names if alias.name != "*")
        elif isinstance(node, ast.Try):
            yield from _imports_of(node.body)


# --- How long the runs of one repository may take.

PATIENCE = 10
WALL_FACTOR = 4
"""The limit of a run is processor time, which a busy machine hardly changes; by the clock it may be so many times
as long, for a run that waits for something that never comes."""
SLOWER = 10.0
MIN_SECONDS = 2.0
"""A fault with which the tests need ten times the golden code's time, and more than this, is noticed."""
IDLE_SECONDS = 5.0
"""So is one with which everything waits so long at a stretch for something that does not come. Where tests of the
golden code sleep as long themselves this is too strict: a constant that they would let pass counts as noticed."""


@dataclass(frozen=True, slots=True)
class Bench:
    """One repository, its environment, and how long its runs may take, in processor time.

    ``left_out`` are tests and files that no run of the whole suite has: they end the run, or take too long.
    """

    original: Mapping[str, bytes]
    environment: Environment
    backend: str | None
    suite_seconds: float
    test_seconds: float
    left_out: tuple[str, ...] = ()

    def run_all(self, trials: Sequence[Trial]) -> list[TestReport]:
        """Reports in the order of the trials.

        A golden run that ran out of time is made once more, alone and with ``PATIENCE`` times as
        much, so that what becomes of a candidate does not hang on how busy the machine was.
        """
        reports = run_batch([self._of(trial) for trial in trials], self.environment, backend=self.backend)
        for number, (trial, report) in enumerate(zip(trials, reports, strict=True)):
            if trial.is_golden and report.ran_out_of_time:
                run = self._of(trial)
                patient = replace(run, seconds=PATIENCE * run.seconds, wall_factor=None)
                reports[number] = run_batch([patient], self.environment, backend=self.backend)[0]
        return reports

    def _of(self, trial: Trial) -> Trial:
        usual = self.suite_seconds if trial.node_ids is None else self.test_seconds
        seconds = trial.seconds or usual
        return replace(
            trial,
            seconds=seconds,
            wall_factor=WALL_FACTOR * usual / seconds,  # less of it is no less patience with a busy machine
            left_out=self.left_out if trial.node_ids is None else (),
        )


def noticing_seconds(golden_seconds: float, most: float) -> float:
    """The processor time after which tests have noticed a fault; with golden code they need ``golden_seconds``."""
    return min(max(SLOWER * golden_seconds, MIN_SECONDS), most)
