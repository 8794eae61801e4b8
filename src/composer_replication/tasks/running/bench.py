"""Where trees of one repository are tried out: each run has a fresh tree, a batch shares a sandbox."""

from __future__ import annotations

import json
import os
import secrets
import tempfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from composer_replication.records import Limits
from composer_replication.sandbox.process_folder import process_folder
from composer_replication.tasks.intake.environment import Environment
from composer_replication.tasks.planning.edits import write_files
from composer_replication.tasks.test_run import (
    TestReport,
    Trial,
    judge,
    program_text,
    read_records,
    run_inside,
)

# --- Test runs of one repository in one sandbox: the test runner is started once, then forked.

START_SECONDS = 120.0
SECONDS_BETWEEN_RUNS = 15.0
MAX_RUNS = 16
"""In one sandbox: so many trees lie on the disk of this machine at a time, for each job."""


def run_batch(
    runs: Sequence[Trial],
    environment: Environment,
    *,
    backend: str | None = None,
    limits: Limits | None = None,
) -> list[TestReport]:
    """Do runs of one repository one after the other, each in a tree of its own, and report on each as ``run_alone`` would.

    One interpreter imports the test runner and what is slow to import; each run is forked off it, and its time counts from
    there. No module of a tree is ever shared, only the compiled code of files with the same path and bytes. A run that takes
    the batch down is done alone. ``limits`` are of one run; one process more is allowed for the batch itself.

    **Not isolated**: a run may read the memory of the batch, nonces too, change the trees of later runs, and signal the
    processes of the batch; where the sandbox has no ``/proc`` (sandlock), a daemon that left its session lives on until
    the batch ends. So use it for golden and stub code of one repository, never for a policy's answers.
    """
    chosen, reports = limits or Limits(), list[TestReport]()
    while len(reports) < len(runs):
        part = runs[len(reports) : len(reports) + MAX_RUNS]
        found = _run_part(part, environment, backend, chosen)
        reports += found
        if len(found) < len(part):  # the next one took the batch down
            reports += _run_part([part[len(found)]], environment, backend, chosen)
    return reports


def run_alone(
    run: Trial, environment: Environment, *, backend: str | None = None, limits: Limits | None = None
) -> TestReport:
    """Do one run in a sandbox of its own; the arguments are those of ``run_batch``."""
    return _run_part([run], environment, backend, limits or Limits())[0]


def _run_part(
    runs: Sequence[Trial], environment: Environment, backend: str | None, limits: Limits
) -> list[TestReport]:
    """Reports of the first runs, up to one that the batch has no answer for; one that is alone has one in any case."""
    own_nonce, *nonces = (secrets.token_hex(16) for _ in range(len(runs) + 1))
    program = program_text("running.pytest_runner", "running.batch_server") + "\n\nserve()\n"
    orders: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="batch-", dir=process_folder()) as folder:
        root = Path(folder) / "trees"
        root.mkdir(mode=0o700)  # closed to others: the sign by which the server knows what it may clear
        for number, (run, nonce) in enumerate(zip(runs, nonces, strict=True)):
            tree = root / str(number) / "tree"
            tree.mkdir(parents=True)
            write_files(tree, run.files)
            for path, data in run.files.items() if len(runs) > 1 else ():
                os.utime(tree / path, (_time_of(data),) * 2)  # what a run compiles is found again by it
            orders.append({"timeout_seconds": run.wall_seconds, "request": run.request(tree, nonce)})
        order = {"nonce": own_nonce, "idle_seconds": IDLE_SECONDS, "runs": orders}
        result = run_inside(
            root,
            environment,
            [program],
            json.dumps(order).encode(),
            backend=backend,
            limits=replace(limits, num_processes=limits.num_processes + 1),
            timeout_seconds=START_SECONDS + sum(run.wall_seconds + SECONDS_BETWEEN_RUNS for run in runs),
        )
    ends: list[dict[str, Any]] = []
    told: list[list[dict[str, Any]]] = [[] for _ in runs]
    for record in read_records(result.stdout, [own_nonce, *nonces]):
        if record["nonce"] == own_nonce and record["event"] == "run":
            ends.append(record)
        elif len(ends) < len(runs) and record["nonce"] == nonces[len(ends)]:  # of the run that is at work
            told[len(ends)].append(record)
    words = result.stderr.split(f"\n{own_nonce}\n")[1:]
    reports = []
    for number, run in enumerate(runs):
        ended = replace(result, stderr=words[number]) if number < len(words) else result
        if number < len(ends):
            said: dict[str, Any] = {
                name: ends[number][name] for name in ("exit_code", "timed_out", "stopped", "seconds")
            }
            if len(runs) > 1:  # a limit that ended the batch is no fault of those before
                said |= {"truncated": False, "out_of_memory": False}
            elif result.stopped:  # the sandbox may note a limit that ended the run alone
                del said["stopped"]
            ended = replace(ended, **said)
        elif len(runs) > 1:
            break
        reports.append(judge(ended, told[number], run))
    return reports


def _time_of(data: bytes) -> int:
    """A time of change, of the years 2000 to 2016, that other bytes hardly have."""
    return 946_684_800 + zlib.crc32(data) % 2**29


# --- How long the runs of one repository may take.

WALL_FACTOR = 4
"""The limit of a run is processor time, which a busy machine hardly changes; by the clock it may be so many times
as long, for a run that waits for something that never comes."""
SLOWER = 10.0
MIN_SECONDS = 2.0
"""A fault with which the tests need ten times the golden code's time, and more than this, is noticed."""
IDLE_SECONDS = 10.0
"""A run ends when everything in it has waited so long at a stretch: what it waits for does not come, or is too slow for
grading. Seen only where there is a ``/proc``."""


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
        """Reports in the order of the trials."""
        runs = []
        for trial in trials:
            usual = self.suite_seconds if trial.node_ids is None else self.test_seconds
            seconds = trial.seconds or usual
            factor = WALL_FACTOR * usual / seconds  # less of it is no less patience with a busy machine
            left_out = self.left_out if trial.node_ids is None else ()
            runs.append(replace(trial, seconds=seconds, wall_factor=factor, left_out=left_out))
        return run_batch(runs, self.environment, backend=self.backend)


def noticing_seconds(golden_seconds: float, most: float) -> float:
    """The processor time after which tests have noticed a fault; with golden code they need ``golden_seconds``."""
    return min(max(SLOWER * golden_seconds, MIN_SECONDS), most)
