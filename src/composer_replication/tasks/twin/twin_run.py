"""Truth beyond the repository's own tests: what a deleted function did, call by call.

    found = build_twins(bench, cuts)          # where the golden code is known
    score = judge_twin(candidate_files, environment, found.twins[pin], timeout_seconds=60)

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
import re
import secrets
import tempfile
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files as resources
from itertools import accumulate, compress, pairwise
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import zstandard
from pydantic import Base64Bytes, TypeAdapter

from composer_replication.errors import InputError, SandboxFailure
from composer_replication.records import ExecResult, Limits
from composer_replication.sandbox.process_folder import process_folder
from composer_replication.tasks.intake.environment import Environment
from composer_replication.tasks.intake.tree_rules import folders_of_tree, is_subject_path, recorded_folders
from composer_replication.tasks.planning.body_cuts import STUB_EXPRESSIONS, BodyCut
from composer_replication.tasks.planning.edits import write_files
from composer_replication.tasks.planning.symbol_graph import module_name
from composer_replication.tasks.running.bench import Bench
from composer_replication.tasks.store_manifest import decompress
from composer_replication.tasks.suite_options import suite_arguments
from composer_replication.tasks.test_run import (
    ARGUMENTS,
    last_words,
    program_text,
    read_records,
    run_inside,
)
from composer_replication.tasks.twin.call_pickle import MODULE as PICKLER
from composer_replication.tasks.twin.canonical_encoding import NUM_DIGITS

FORMAT_VERSION = 3
"""A line of JSON, then all pickles one after the other. Version 2 also told which tests made a call."""
MUTATED_SHARE = 0.95
"""Share of the mutated calls that must agree. Lookup solvers miss a median of all of them, so this
is as strict against them as 1 would be, and forgives an honest candidate an unfair call."""
_LEVEL = 19
_MAX_BYTES = 512 * 1024**2
_FIX = "build the tasks again with composer-rl tasks build."
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


def score_digests(twin: Twin, digests: Sequence[str], error: str = "") -> TwinScore:
    """Compare a candidate's digests, in the order of ``twin.vectors``, with the expected ones."""
    agree = [given == vector.digest for given, vector in zip(digests, twin.vectors, strict=False)]
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
        sizes, digests, split = value["sizes"], value["digests"], value["num_recorded"]
        ends = [0, *accumulate(sizes)]
        if ends[-1] != len(blobs) or len(digests) != NUM_DIGITS * len(sizes) or not 0 < split <= len(sizes):
            raise ValueError("its calls do not fill it")
        vectors = tuple(
            Vector(blobs[start:end], digests[NUM_DIGITS * index : NUM_DIGITS * (index + 1)])
            for index, (start, end) in enumerate(pairwise(ends))
        )
        names = {name: str(value[name]) for name in _NAMES}
        return Twin(**names, recorded=vectors[:split], mutated=vectors[split:])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        problem = f"the recorded behaviour of a function cannot be read: {error}."
        raise InputError("CR0411", problem, where=where, fix=_FIX) from error


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
PLAYER_BYTES = 1024**3
"""Memory of the player: a mutated integer may ask for a list of any length. At most half of what its sandbox
may use, so that such a call fails alone and not the sandbox."""
_RECORD_SECONDS = 600.0
_OWN_LIMITS = Limits(memory_bytes=4 * 1024**3)
"""Of a sandbox that replays golden code and its relatives."""
_OUTPUT_BYTES = 512 * 1024**2
_PACKAGE = "composer_replication.tasks"
_PROGRAMS = {
    "twin.twin_recorder": ("running.pytest_runner", "twin.call_pickle"),
    "twin.twin_player": ("twin.canonical_encoding", "twin.call_pickle"),
    "leaks.leak_search": ("intake.packed_forms",),
}
"""What each program needs beside itself."""


class Job(NamedTuple):
    """One child process of the player: the function that it calls, and what it does, in the player's own words.

    What a call ought to give is not sent along. With ``wanted`` it mutates the calls, with ``constants`` it puts them in the
    place of the function; ``overlay`` are files to write over the tree before it is imported.
    """

    twin: Twin
    options: Mapping[str, Any] = {}


@dataclass(frozen=True, slots=True)
class JobReport:
    """What one job said.

    ``digests`` tell in the order of the calls what they returned or raised; ``inputs`` and ``mutated`` come of mutating.
    ``error`` is empty, or why the job as a whole failed.
    """

    error: str = "it ended early"
    digests: Sequence[str] = ()
    inputs: Sequence[str | None] = ()
    mutated: Sequence[tuple[Base64Bytes, str]] = ()


_REPORT = TypeAdapter(JobReport)


def record_calls(bench: Bench, cuts: Sequence[BodyCut]) -> tuple[dict[str, list[bytes]], str]:
    """Run the whole suite once, but for tests and files that are left out, and keep the calls of all functions.

    The answer is the pickled arguments of the calls by pin, and an empty text or what went wrong with the run.
    """
    files = bench.original
    options = {
        "targets": [[cut.path, cut.first_line] for cut in cuts],
        "by_value": sorted(path for path in files if path.endswith(".py") and not is_subject_path(path)),
        "arguments": ARGUMENTS,
        "files": [],
        "left_out": list(bench.left_out),
        "ours": str(process_folder()),
    }
    done, records = run_program(
        "twin.twin_recorder", files, bench.environment, options,
        backend=bench.backend, limits=Limits(output_bytes=_OUTPUT_BYTES), timeout_seconds=_RECORD_SECONDS,
    )  # fmt: skip
    if not records or records[-1]["event"] != "end":
        return {}, f"the recording did not end{last_words(done)}"
    told = (one for one in records if one["event"] == "calls")  # a test that forks may have ended twice
    return {cuts[one["target"]].pin: list(map(base64.b64decode, one["calls"])) for one in told}, ""


def play(bench: Bench, jobs: Sequence[Job], **options: Any) -> list[JobReport]:
    """Do jobs one after the other in one fresh sandbox, each in a process of its own; a report for each.

    ``options`` are some of ``_play``. Where one job takes the sandbox down, all are parted until it stands alone, and its
    report says why.
    """
    reports, problem = _play(bench, jobs, **options) if jobs else ([], "")
    if problem and len(jobs) > 1:
        half = len(jobs) // 2
        return [report for part in (jobs[:half], jobs[half:]) for report in play(bench, part, **options)]
    return [JobReport(problem)] if problem else reports


def _play(
    bench: Bench,
    jobs: Sequence[Job],
    *,
    limits: Limits = _OWN_LIMITS,
    wall_seconds: float = 1800.0,
    hash_seed: str = "0",
    call_seconds: float = CALL_SECONDS,
    job_seconds: float = JOB_SECONDS,
) -> tuple[list[JobReport], str]:
    """The reports, and an empty text or why the run as a whole failed.

    ``call_seconds`` and ``job_seconds`` are processor time, ``wall_seconds`` of all by the clock, or a minute for each job.
    """
    roots = recorded_folders(bench.original)
    options = {
        "jobs": [
            {
                "module": module_name(job.twin.path, roots),
                "symbol": job.twin.symbol,
                "blobs": [base64.b64encode(vector.blob).decode() for vector in job.twin.vectors],
                **job.options,
            }
            for job in jobs
        ],
        "call_seconds": call_seconds,
        "job_seconds": job_seconds,
        "memory_bytes": min(PLAYER_BYTES, limits.memory_bytes // 2),
    }
    done, records = run_program(
        "twin.twin_player", bench.original, bench.environment, options,
        backend=bench.backend, limits=replace(limits, output_bytes=_OUTPUT_BYTES),
        timeout_seconds=max(wall_seconds, 60.0 * len(jobs)), hash_seed=hash_seed,
    )  # fmt: skip
    if not records or records[0]["event"] != "ready":
        raise SandboxFailure(
            "CR0302",
            f"the program that replays calls did not start{last_words(done)}.",
            fix="composer-rl sandbox selftest, then the same command again",
        )
    told = [record for record in records if record["event"] == "done"]
    reports = dict[int, JobReport]()
    with suppress(KeyError, TypeError, ValueError):
        reports = {record["job"]: _REPORT.validate_python(record) for record in told}
    num_ends = sum(record["event"] == "end" for record in records)
    problems = (
        (done.timed_out, f"the calls ran longer than {wall_seconds:g} s"),
        (done.out_of_memory, "the calls used more memory than allowed"),
        (done.truncated, "the records are cut off"),
        (num_ends != 1, f"the run ended without its one closing record{last_words(done)}"),
        (len(reports) != len(told), "a record is malformed, or a job is told of twice"),
    )
    problem = next((problem for is_so, problem in problems if is_so), "")
    return [reports.get(number, JobReport()) for number in range(len(jobs))], problem


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
            "import_roots": folders_of_tree(tree),
            "options": suite_arguments(tree) if name == "twin_recorder" else [],
            "nonce": nonce,
            "program": f"{_PACKAGE}.{program}",
            "sources": [
                *([(PICKLER, _cloudpickle())] if folder == "twin" else []),
                *((f"{_PACKAGE}.{each}", program_text(each)) for each in (*_PROGRAMS[program], program)),
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
    take ``WALL_FACTOR`` times as long, so that a busy machine fails nobody.
    """
    bench = Bench(tree_files, environment, backend, timeout_seconds, timeout_seconds)
    wall_seconds = WALL_FACTOR * timeout_seconds
    (score,) = judge_twins(bench, [twin], limits=limits or Limits(), wall_seconds=wall_seconds)
    return score


def judge_twins(
    bench: Bench, twins: Sequence[Twin], overlays: Sequence[Mapping[str, str]] = (), **options: Any
) -> list[TwinScore]:
    """Judge the tree of a bench, which is of our own making, by several twins: one sandbox, a process for each.

    ``overlays`` are, for each twin, files to write over the tree, ``options`` those of ``play``. A policy's code gets
    ``judge_twin``, for it could harm its neighbours here. An InputError (CR0411) where a twin needs another cloudpickle than
    this installation has.
    """
    for twin in twins:
        if twin.pickler != pickler_fingerprint():
            problem = "the recorded behaviour needs another version of cloudpickle."
            raise InputError("CR0411", problem, where=twin.pin, fix=_FIX)
    each = zip(twins, overlays or [{}] * len(twins), strict=True)
    jobs = [Job(twin, {"overlay": overlay}) for twin, overlay in each]
    reports = zip(twins, play(bench, jobs, job_seconds=bench.suite_seconds, **options), strict=True)
    return [score_digests(twin, report.digests, report.error) for twin, report in reports]


# --- What solvers that understand nothing make of recorded behaviour: a constant, and a table of the recorded calls.

CONSTANTS = {"constants": STUB_EXPRESSIONS}
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
    none = [""] * len(STUB_EXPRESSIONS)
    rows = [row if len(row) == len(none) else none for row in map(str.split, report.digests)]
    scores = {
        constant: score_digests(twin, [row[place] for row in rows])
        for place, constant in enumerate(STUB_EXPRESSIONS)
    }
    table = replace(scores["None"], recorded_agree=len(twin.recorded))
    passed_by = (constant for constant, score in scores.items() if score.passed)
    return next(passed_by, TABLE if table.passed else "")


# --- Record and check the twins of functions where the golden code is known.

MIN_BODY_LINES = 4
"""A public function with fewer lines is as a rule one expression, and its name says all of it."""
MIN_RECORDED, MIN_MUTATED = 2, 10
NUM_MUTATED, NUM_MUTATED_TEXT = 60, 200
"""60 calls kill as many mutants as 200, except in functions that work on text."""
TRIES_PER_MUTATED = 7  # about 400 for 60
GOLDEN_SECONDS = 5.0
"""Processor time of the golden code in all calls of a twin; a candidate has several times as much."""
_TEXT_WORK = re.compile(
    r"\bre\.\w|\.(sub|match|fullmatch|search|finditer|findall|split|rsplit|splitlines|replace|join|lower|upper|strip"
    r"|lstrip|rstrip|title|capitalize|startswith|endswith|translate|zfill|ljust|rjust|casefold|encode|decode)\("
)


class TwinSearch(NamedTuple):
    """By pin: the twins, and why a function has none."""

    twins: dict[str, Twin]
    without: dict[str, str]


def is_candidate(cut: BodyCut, *, is_eager: bool = False) -> bool:
    """Whether a function may get a twin: public, long enough unless ``is_eager``, defined once.

    Names that begin with an underscore are left out, dunder methods too: honest candidates choose other arguments.
    """
    *around, name = [*PurePosixPath(cut.path).with_suffix("").parts, *cut.symbol.split(".")]
    is_private = any(part.startswith("_") for part in [*(one for one in around if one != "__init__"), name])
    is_long = cut.num_body_lines >= (1 if is_eager else MIN_BODY_LINES)
    return is_long and not is_private and "#" not in cut.symbol


def build_twins(
    bench: Bench, cuts: Sequence[BodyCut], *, seed: int = 0, eager: Collection[str] = ()
) -> TwinSearch:
    """Record and check the twins of functions of one repository.

    The same bench, cuts and seed give the same bytes (``twin_bytes``), unless a function itself depends on time or
    place. ``eager`` are pins of functions that get a twin however short they are, and with one recorded call: nothing
    else is hidden from whoever writes them. Every other gate holds for them too. The answer has the twins that passed
    every gate, in the order of ``cuts``, and the reason for every other function.
    """
    build = _Build(bench, seed, eager)
    twins = build.sift(build.first_jobs(cuts), build.draft)
    for hash_seed, backwards in (("1", False), ("4242", True)):
        jobs = [Job(twin, {"backwards": backwards}) for twin in twins]
        twins = build.sift(jobs, build.steady_part, hash_seed=hash_seed, job_seconds=GOLDEN_SECONDS)
    twins = build.sift([Job(twin, CONSTANTS) for twin in twins], strong)
    for hash_seed in ("0", "7", "123"):
        jobs = [Job(twin) for twin in twins]
        twins = build.sift(jobs, green, hash_seed=hash_seed, call_seconds=CALL_SECONDS)
    return TwinSearch({twin.pin: twin for twin in twins}, build.without)


class _Build:
    """The steps between recording and a proven twin; each is one sandbox for all functions.

    Real calls are recorded in one run of the suite, replayed through the golden code and changed a little; what is the same
    in fresh processes, with two other hash seeds and once in reverse order, is kept. Method: differential testing (McKeeman,
    1998) with recorded inputs; see ``canonical_encoding`` for when two outcomes are the same.
    """

    def __init__(self, bench: Bench, seed: int, eager: Collection[str]) -> None:
        self.bench, self.seed, self.eager = bench, seed, eager
        self.without: dict[str, str] = {}

    def sift(
        self, jobs: Sequence[Job], check: Callable[[Twin, JobReport], Twin | str], **limits: Any
    ) -> list[Twin]:
        """What a check makes of each job that came to its end; where that is no twin, why is noted."""
        kept = []
        reports = play(self.bench, jobs, **{"call_seconds": GOLDEN_CALL_SECONDS, **limits})
        for job, report in zip(jobs, reports, strict=True):
            found = report.error or check(job.twin, report)
            if isinstance(found, Twin):
                kept.append(found)
            else:
                self.without[job.twin.pin] = found
        return kept

    def first_jobs(self, cuts: Sequence[BodyCut]) -> list[Job]:
        """Record calls in one run of the suite; they are to be replayed and mutated."""
        chosen = [cut for cut in cuts if is_candidate(cut, is_eager=cut.pin in self.eager)]
        calls, problem = record_calls(self.bench, chosen) if chosen else ({}, "")
        if problem:  # what follows from it is final, and the machine may only have been busy
            calls, problem = record_calls(self.bench, chosen)
        jobs = []
        for cut in cuts:
            kept = calls.get(cut.pin, [])
            if cut not in chosen:
                self.without[cut.pin] = "not public, too short, or defined twice"
            elif problem:
                self.without[cut.pin] = problem
            elif len(kept) < (wanted := self._min_recorded(cut.pin)):
                self.without[cut.pin] = f"fewer than {wanted} recorded calls"
            else:
                vectors = tuple(Vector(blob, "") for blob in kept)
                twin = Twin(cut.pin, cut.path, cut.symbol, vectors, (), pickler_fingerprint())
                wanted = NUM_MUTATED_TEXT if _TEXT_WORK.search(cut.golden_body) else NUM_MUTATED
                options = {"wanted": wanted, "tries": TRIES_PER_MUTATED * wanted}
                jobs.append(Job(twin, {**options, "seed": f"{self.seed}/{cut.pin}"}))
        return jobs

    def draft(self, twin: Twin, report: JobReport) -> Twin | str:
        # Two pickles may be one input: their bytes differ, their encoding does not.
        by_input: dict[str, Vector] = {}
        for vector, told, digest in zip(twin.recorded, report.inputs, report.digests, strict=False):
            if told is not None and digest:
                by_input.setdefault(told, Vector(vector.blob, digest))
        return self._large(twin, by_input.values(), (Vector(*call) for call in report.mutated))

    def steady_part(self, twin: Twin, report: JobReport) -> Twin | str:
        """A twin without the calls that had another outcome."""
        same = [vector.digest == given for vector, given in zip(twin.vectors, report.digests, strict=True)]
        split = len(twin.recorded)
        return self._large(twin, compress(twin.recorded, same), compress(twin.mutated, same[split:]))

    def _min_recorded(self, pin: str) -> int:
        return 1 if pin in self.eager else MIN_RECORDED

    def _large(self, twin: Twin, recorded: Iterable[Vector], mutated: Iterable[Vector]) -> Twin | str:
        """The twin with these calls, or why they are too few."""
        twin = replace(twin, recorded=tuple(recorded), mutated=tuple(mutated))
        wanted = self._min_recorded(twin.pin)
        if len(twin.recorded) < wanted:
            return f"fewer than {wanted} recorded calls have a result that can be compared"
        return twin if len(twin.mutated) >= MIN_MUTATED else "fewer than 10 mutated calls return"


def strong(twin: Twin, report: JobReport) -> Twin | str:
    """The twin, unless a constant passes it or a table of all recorded calls."""
    solver = solver_that_passes(twin, report)
    return f"{solver if solver == TABLE else 'a stub'} passes" if solver else twin


def green(twin: Twin, report: JobReport) -> Twin | str:
    """The twin, if the golden code agrees in every call."""
    is_green = report.digests == [vector.digest for vector in twin.vectors]
    return twin if is_green else "the golden code does not agree with itself"
