"""Twins: their form in a file, the sandboxes in which calls are recorded and replayed, and candidates judged by them.

A twin is SECRET: it tells what the deleted code answers. It lies beside hidden tests, never in a sandbox that holds a
policy's tools; a judging sandbox gets its inputs alone. Recorder and player come as text with the request, and so
does cloudpickle: no environment is changed and no folder of this program's own packages is mounted. What comes back
is JSON with the nonce of the run; blobs are bytes that are never unpickled here.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import secrets
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources import files as resources
from itertools import accumulate
from pathlib import Path
from typing import Any

import zstandard

from composer_replication.errors import InputError, SandboxFailure
from composer_replication.records import ExecResult, Limits
from composer_replication.sandbox.process_folder import process_folder
from composer_replication.tasks.intake.environment import Environment
from composer_replication.tasks.intake.tree_rules import is_subject_path
from composer_replication.tasks.planning.body_cuts import STUB_EXPRESSIONS, BodyCut
from composer_replication.tasks.planning.edits import write_files
from composer_replication.tasks.running.bench import Bench
from composer_replication.tasks.store_manifest import decompress
from composer_replication.tasks.suite_options import suite_arguments
from composer_replication.tasks.test_run import (
    ARGUMENTS,
    import_roots,
    last_words,
    program_text,
    read_records,
    run_inside,
)
from composer_replication.tasks.twin.canonical_encoding import NUM_DIGITS

FORMAT_VERSION = 3
"""A line of JSON, then all pickles one after the other. Version 2 also told which tests made a call."""
MUTATED_SHARE = 0.95
"""Share of the mutated calls that must agree. Lookup solvers miss a median of all of them, so this
is as strict against them as 1 would be, and forgives an honest candidate an unfair call."""
_LEVEL = 19
_MAX_BYTES = 512 * 1024**2
_NAMES = ("pin", "path", "symbol", "pickler")


@dataclass(frozen=True, slots=True)
class Vector:
    """One call: its pickled arguments, and the canonical digest of what the golden code did."""

    blob: bytes
    digest: str


@dataclass(frozen=True, slots=True)
class Twin:
    """Recorded and mutated calls of one function; ``pickler`` is the hash of the cloudpickle that its blobs need."""

    pin: str
    path: str
    symbol: str
    recorded: tuple[Vector, ...]
    mutated: tuple[Vector, ...]
    pickler: str

    @property
    def vectors(self) -> tuple[Vector, ...]:
        """The recorded calls, then the mutated ones: the order in which they are judged."""
        return (*self.recorded, *self.mutated)


@dataclass(frozen=True, slots=True)
class TwinScore:
    """On how many calls a candidate does what the golden code did; ``error`` says why its run as a whole failed."""

    recorded_agree: int
    num_recorded: int
    mutated_agree: int
    num_mutated: int
    error: str = ""

    @property
    def passed(self) -> bool:
        """All recorded calls agree, and at least 95% of the mutated ones."""
        is_exact = 0 < self.num_recorded == self.recorded_agree
        wanted = math.ceil(MUTATED_SHARE * self.num_mutated)
        return not self.error and is_exact and self.mutated_agree >= wanted


def score_digests(twin: Twin, digests: Mapping[int, str], error: str = "") -> TwinScore:
    """Compare a candidate's digests, by index in ``twin.vectors``, with the expected ones."""
    agree = [digests.get(index) == vector.digest for index, vector in enumerate(twin.vectors)]
    split = len(twin.recorded)
    return TwinScore(sum(agree[:split]), split, sum(agree[split:]), len(twin.mutated), error)


def twin_bytes(twin: Twin) -> bytes:
    """The compressed form of a twin: equal twins give equal bytes."""
    value = {
        "version": FORMAT_VERSION,
        **{name: getattr(twin, name) for name in _NAMES},
        "num_recorded": len(twin.recorded),
        "sizes": [len(vector.blob) for vector in twin.vectors],
        "digests": "".join(vector.digest for vector in twin.vectors),
    }
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    blobs = b"".join(vector.blob for vector in twin.vectors)
    return zstandard.ZstdCompressor(level=_LEVEL, write_checksum=True).compress(text.encode() + b"\n" + blobs)


def read_twin(data: bytes, *, where: str = "") -> Twin:
    """A twin from its compressed form, of which nothing is unpickled; an InputError where it is none (CR0411)."""
    try:
        line, _, blobs = decompress(data, max_bytes=_MAX_BYTES).partition(b"\n")
        value = json.loads(line)
        if value["version"] not in (2, FORMAT_VERSION):
            raise ValueError(f"version {value['version']}")
        sizes, digests, split = value["sizes"], str(value["digests"]), int(value["num_recorded"])
        if sum(sizes) != len(blobs) or min(sizes, default=0) < 0 or len(digests) != NUM_DIGITS * len(sizes):
            raise ValueError("the calls do not fill it")
        if not 0 < split <= len(sizes):
            raise ValueError(f"{split} of its {len(sizes)} calls are recorded ones")
        vectors = tuple(
            Vector(blobs[end - size : end], digests[NUM_DIGITS * index : NUM_DIGITS * (index + 1)])
            for index, (end, size) in enumerate(zip(accumulate(sizes), sizes, strict=True))
        )
        names = {name: str(value[name]) for name in _NAMES}
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
        raise damaged(f"the recorded behaviour of a function cannot be read: {error}", where) from error
    return Twin(**names, recorded=vectors[:split], mutated=vectors[split:])


def damaged(problem: str, where: str) -> InputError:
    """The error for a twin that cannot be used."""
    fix = "build the tasks again with composer-rl tasks build."
    return InputError("CR0411", f"{problem}.", where=where, fix=fix)


# --- Start the recorder and the player in fresh sandboxes, and read what they say.

CALL_SECONDS = 1.0
"""Processor time of one call; one that sleeps may take twenty times as long."""
GOLDEN_CALL_SECONDS = 0.25
"""Of one call of the golden code while a twin is made: an honest candidate may be four times as slow."""
JOB_SECONDS = 600.0
"""Processor time of one job of a build."""
WALL_FACTOR = 10
"""A limit of a candidate is processor time, which a busy machine hardly changes; by the clock it may be so
many times as long."""
MAX_CALL_BYTES = 30_000
MAX_CALLS = 150
ADDRESS_BYTES = 3 * 1024**3
PLAYER_BYTES = 1024**3
"""Memory of the player: a mutated integer may ask for a list of any length. At most half of what its sandbox
may use, so that such a call fails alone and not the sandbox."""
_RECORD_SECONDS = 600.0
_PLAY_SECONDS = 1800.0
_JOB_WALL_SECONDS = 60.0
"""Of ``play_apart`` by the clock, for each of its jobs, where that is more than ``_PLAY_SECONDS``."""
_OWN_LIMITS = Limits(memory_bytes=4 * 1024**3)
"""Of a sandbox that replays golden code and its relatives."""
_OUTPUT_BYTES = 512 * 1024**2
_PACKAGE = "composer_replication.tasks"
_PROGRAMS = {
    "twin.twin_recorder": ("twin.call_pickle", "running.pytest_runner"),
    "twin.twin_player": ("twin.canonical_encoding", "twin.call_pickle", "twin.call_mutation"),
    "leaks.leak_search": ("intake.packed_forms",),
}
"""What each program needs beside itself."""


@dataclass(frozen=True, slots=True)
class Job:
    """One child process of the player: the function that it calls, and what it does, in the player's own words.

    What a call ought to give is not sent along. The ``mode`` is replay (as without options), mutate or constants;
    ``overlay`` are files to write over the tree before it is imported.
    """

    twin: Twin
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class JobReport:
    """What one job said.

    ``digests`` tell by index what calls returned or raised, ``seconds`` is the processor time of its calls; ``inputs`` and
    ``mutated`` come from the mode mutate. ``error`` is empty, or why the job as a whole failed.
    """

    digests: dict[int, str] = field(default_factory=dict)
    line: int = 0
    error: str = "it ended early"
    inputs: list[str | None] = field(default_factory=list)
    mutated: list[Vector] = field(default_factory=list)
    seconds: float = 0.0


def record_calls(bench: Bench, cuts: Sequence[BodyCut]) -> tuple[dict[str, list[bytes]], str]:
    """Run the whole suite once, but for tests and files that are left out, and keep the calls of all functions.

    The answer is the pickled arguments of the calls by pin, and an empty text or what went wrong with the run.
    """
    files = bench.original
    options = {
        "targets": [[cut.path, cut.first_line] for cut in cuts],
        "by_value": sorted(path for path in files if path.endswith(".py") and not is_subject_path(path)),
        "arguments": ARGUMENTS,
        "left_out": list(bench.left_out),
        "max_calls": MAX_CALLS,
        "max_bytes": MAX_CALL_BYTES,
        "ours": str(process_folder()),
        "cloudpickle": _cloudpickle(),
    }
    done, records = run_program(
        "twin.twin_recorder", files, bench.environment, options,
        backend=bench.backend, limits=Limits(output_bytes=_OUTPUT_BYTES), timeout_seconds=_RECORD_SECONDS,
    )  # fmt: skip
    if not records or records[-1]["event"] != "end":
        return {}, f"the recording did not end{last_words(done)}"
    told = (one for one in records if one["event"] == "calls")  # a test that forks may have ended twice
    return {cuts[one["target"]].pin: list(map(base64.b64decode, one["calls"])) for one in told}, ""


def play(
    files: Mapping[str, bytes],
    environment: Environment,
    jobs: Sequence[Job],
    *,
    backend: str | None = None,
    limits: Limits | None = None,
    timeout_seconds: float,
    hash_seed: str = "0",
    call_seconds: float = CALL_SECONDS,
    job_seconds: float = JOB_SECONDS,
) -> tuple[list[JobReport], str]:
    """Do jobs one after the other in one fresh sandbox, each in a process of its own.

    ``call_seconds`` and ``job_seconds`` are processor time, ``timeout_seconds`` of all by the clock. The answer is a report
    for each job, and an empty text or why the run as a whole failed.
    """
    chosen = limits or Limits()
    numbers = {twin: number for number, twin in enumerate(dict.fromkeys(job.twin for job in jobs))}
    blobs = [[base64.b64encode(vector.blob).decode() for vector in twin.vectors] for twin in numbers]
    named = zip(numbers, blobs, strict=True)
    options = {
        "twins": [{"path": twin.path, "symbol": twin.symbol, "blobs": texts} for twin, texts in named],
        "jobs": [{"twin": numbers[job.twin], "mode": "replay", "overlay": {}, **job.options} for job in jobs],
        "call_seconds": call_seconds,
        "job_seconds": job_seconds,
        "max_bytes": 4 * MAX_CALL_BYTES,
        "address_bytes": ADDRESS_BYTES,
        "memory_bytes": min(PLAYER_BYTES, chosen.memory_bytes // 2),
        "cloudpickle": _cloudpickle(),
    }
    done, records = run_program(
        "twin.twin_player", files, environment, options,
        backend=backend, limits=replace(chosen, output_bytes=_OUTPUT_BYTES),
        timeout_seconds=timeout_seconds, hash_seed=hash_seed,
    )  # fmt: skip
    if not records or records[0]["event"] != "ready":
        raise SandboxFailure(
            "CR0302",
            f"the program that replays calls did not start{last_words(done)}.",
            fix="composer-rl sandbox selftest, then the same command again",
        )
    reports = [JobReport() for _ in jobs]
    problem = ""
    try:
        for record in records[1:]:
            problem = problem or _take(record, reports)
    except (KeyError, TypeError, ValueError, IndexError):
        problem = "a record is malformed"
    if done.timed_out:
        problem = f"the calls ran longer than {timeout_seconds:g} s"
    elif done.out_of_memory:
        problem = "the calls used more memory than allowed"
    elif done.truncated:
        problem = "the records are cut off"
    elif not problem and [record["event"] for record in records].count("end") != 1:
        problem = f"the run ended without its one closing record{last_words(done)}"
    return reports, problem


def play_apart(bench: Bench, jobs: Sequence[Job], **options: Any) -> list[JobReport]:
    """As ``play``, for code of our own making; a report for each job. ``options`` are some of ``play``.

    Where one job takes the sandbox down, all are parted until it stands alone.
    """
    if not jobs:
        return []
    reports, problem = play(
        bench.original, bench.environment, jobs,
        backend=bench.backend, limits=_OWN_LIMITS,
        timeout_seconds=max(_PLAY_SECONDS, _JOB_WALL_SECONDS * len(jobs)), **options,
    )  # fmt: skip
    if not problem:
        return reports
    if len(jobs) == 1:
        return [JobReport(error=problem)]
    half = len(jobs) // 2
    return [report for part in (jobs[:half], jobs[half:]) for report in play_apart(bench, part, **options)]


def run_program(
    program: str,
    files: Mapping[str, bytes],
    environment: Environment,
    options: Mapping[str, Any],
    *,
    backend: str | None,
    limits: Limits,
    timeout_seconds: float,
    hash_seed: str = "0",
) -> tuple[ExecResult, list[dict[str, Any]]]:
    """Start one of our programs over a tree in a fresh sandbox; how it ended, and what it sent.

    ``options`` are what it is told beside the places of import and, for the recorder, the options of the suite.
    """
    nonce = secrets.token_hex(16)
    folder, _, name = program.partition(".")
    with tempfile.TemporaryDirectory(prefix="inside-", dir=process_folder()) as place:
        tree = Path(place) / "tree"
        tree.mkdir()
        write_files(tree, files)
        request = {
            **options,
            "import_roots": import_roots(tree),
            "suite": suite_arguments(tree) if name == "twin_recorder" else [],
            "nonce": nonce,
            "program": f"{_PACKAGE}.{program}",
            "sources": [
                (f"{_PACKAGE}.{each}", program_text(each)) for each in (*_PROGRAMS[program], program)
            ],
        }
        done = run_inside(
            tree,
            environment,
            [program_text("running.pytest_runner") + "\n\nhand_over()\n"],
            json.dumps(request, default=sorted).encode(),
            backend=backend,
            limits=limits,
            timeout_seconds=timeout_seconds,
            more_variables={"PYTHONHASHSEED": hash_seed},
            is_ours=folder == "leaks",
        )
    return done, read_records(done.stdout, [nonce])


def _take(record: Mapping[str, Any], reports: Sequence[JobReport]) -> str:
    """Note one record; the answer is empty, or what is out of order."""
    event = record["event"]
    if event == "end":
        return ""
    report = reports[int(record["job"])]
    if event == "vector":
        index = int(record["index"])
        if index in report.digests:
            return "a call has two outcomes"
        report.digests[index] = str(record["digest"])
    elif event == "done":
        report.line, report.error = int(record["line"]), str(record["error"])
        report.seconds = float(record.get("seconds", 0.0))
        for index, (digest, known) in enumerate(record.get("recorded", ())):
            report.digests[index] = str(digest)
            report.inputs.append(None if known is None else str(known))
        calls = record.get("mutated", ())
        report.mutated = [Vector(base64.b64decode(blob), str(digest)) for blob, digest in calls]
    else:
        return "an unknown record"
    return ""


@cache
def _cloudpickle() -> str:
    """The text of the cloudpickle installed here: it needs no other package."""
    return resources("cloudpickle").joinpath("cloudpickle.py").read_text(encoding="utf-8")


def pickler_fingerprint() -> str:
    """Which cloudpickle this is: blobs name its private functions, so another one may not read them."""
    return hashlib.sha256(_cloudpickle().encode()).hexdigest()[:16]


# --- Judge candidates by the twin of the function that they write anew.


def judge_twin(
    tree_files: Mapping[str, bytes],
    environment: Environment,
    twin: Twin,
    *,
    backend: str | None = None,
    limits: Limits | None = None,
    timeout_seconds: float,
) -> TwinScore:
    """Does a candidate do what the golden code did?

    The candidate runs in a fresh sandbox of its own; no tests are needed in its tree. It gets the inputs; its canonical
    digests come out and are compared here. A call that is missing, hangs (1 s of processor time) or takes down its process
    disagrees. Past ``timeout_seconds`` of processor time the whole run is a failure of the candidate; by the clock it may
    take ``WALL_FACTOR`` times as long, so that a busy machine fails nobody. An InputError (CR0411) where the twin needs
    another cloudpickle than this installation has.
    """
    _check_pickler(twin)
    reports, problem = play(
        tree_files, environment, [Job(twin)],
        backend=backend, limits=limits,
        timeout_seconds=WALL_FACTOR * timeout_seconds, job_seconds=timeout_seconds,
    )  # fmt: skip
    return score_digests(twin, reports[0].digests, problem or reports[0].error)


def judge_twins(
    bench: Bench, twins: Sequence[Twin], overlays: Sequence[Mapping[str, str]] | None = None
) -> list[TwinScore]:
    """Judge the tree of a bench, which is of our own making, by several twins: one sandbox, a process for each.

    ``overlays`` are, for each twin, files to write over the tree. A policy's code gets ``judge_twin``, for it could harm
    its neighbours here.
    """
    for twin in twins:
        _check_pickler(twin)
    each = zip(twins, overlays or [{}] * len(twins), strict=True)
    jobs = [Job(twin, {"overlay": overlay}) for twin, overlay in each]
    reports = zip(twins, play_apart(bench, jobs, job_seconds=bench.suite_seconds), strict=True)
    return [score_digests(twin, report.digests, report.error) for twin, report in reports]


def _check_pickler(twin: Twin) -> None:
    if twin.pickler != pickler_fingerprint():
        raise damaged("the recorded behaviour needs another version of cloudpickle", twin.pin)


# --- What solvers that understand nothing make of recorded behaviour: a constant, and a table of the recorded calls.

CONSTANTS = {"mode": "constants", "constants": STUB_EXPRESSIONS}
"""A job in which each constant stands in the place of the function. All are digested in one pass over the calls, because
without the function a call costs what its arguments cost."""
TABLE = "a table of the recorded calls"


def solver_that_passes(twin: Twin, report: JobReport) -> str:
    """Which of them passes a twin, after a job with ``CONSTANTS``: a constant, ``TABLE``, or none (empty).

    A constant passes when it agrees in all recorded calls and 95% of the mutated ones. The table knows all recorded calls,
    and gives None for the mutated ones.
    """
    # Each digest is one text: those of all constants, in their order. Of a call whose arguments cannot be loaded or
    # compared there is at most one.
    texts = {index: text.split() for index, text in report.digests.items()}
    whole = {index: one for index, one in texts.items() if len(one) == len(STUB_EXPRESSIONS)}
    scores = {
        constant: score_digests(twin, {index: one[place] for index, one in whole.items()})
        for place, constant in enumerate(STUB_EXPRESSIONS)
    }
    table = replace(scores["None"], recorded_agree=len(twin.recorded))
    passed_by = (constant for constant, score in scores.items() if score.passed)
    return next(passed_by, TABLE if table.passed else "")
