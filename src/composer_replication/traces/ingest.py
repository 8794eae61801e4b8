"""Recorded sessions of any known format into one folder of ATIF lines, with a sum of what became of every record.

Sessions that are held twice are left out: the same, the beginning of a longer one, or nearly the same. A program that keeps a copy at
every checkpoint holds each session many times: almost half of the bytes of a real corpus were beginnings of other sessions. Near
duplicates are found by MinHash where the extra ``traces`` is installed.
"""

from __future__ import annotations

import gc
import hashlib
import itertools
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from composer_replication.errors import InputError, NothingToDoError
from composer_replication.run_folder import write_json
from composer_replication.traces.json_values import (
    first_records,
    json_bytes,
    json_value,
    read_records,
    trace_files,
)
from composer_replication.traces.readers import atif_files as atif
from composer_replication.traces.readers import command_line_agents as command_line
from composer_replication.traces.readers import repository_agents, request_logs
from composer_replication.traces.redaction import RULES, Redactor
from composer_replication.traces.trace_records import Ledger, Trace

try:
    import rensa
except ImportError:  # without the extra ``traces``
    rensa = None
_NUM_PERMUTATIONS = 128
THRESHOLD = 0.9
"""Share of five-word shingles in common from which two sessions are nearly the same."""
_LEAST_WORDS = 50
TRACES_NAME = "traces.jsonl"
REPORT_NAME = "ingest.json"
SECRETS_NAME = "redactions.local.json"
Report = Callable[[int, int, str], None]


class Format(NamedTuple):
    """``matches`` gives the version of a file's first records or an empty text, ``read`` their conversations."""

    matches: Callable[[Sequence[Any]], str]
    read: Callable[[Iterator[Any], Ledger, str], Iterator[Trace]]


FORMATS = {
    "atif": Format(atif.matches_atif, atif.read_atif),
    "claude-code": Format(command_line.matches_claude_code, command_line.read_claude_code),
    "codex": Format(command_line.matches_codex, command_line.read_codex),
    "openhands": Format(repository_agents.matches_openhands, repository_agents.read_openhands),
    "swe-agent": Format(repository_agents.matches_swe_agent, repository_agents.read_swe_agent),
    "mini-swe-agent": Format(repository_agents.matches_mini_swe_agent, repository_agents.read_mini_swe_agent),
    "openai-chat": Format(request_logs.matches_chat, partial(request_logs.read_requests, "openai-chat")),
    "openai-responses": Format(
        request_logs.matches_responses, partial(request_logs.read_requests, "openai-responses")
    ),
    "otel-genai": Format(request_logs.matches_otel, request_logs.read_otel),
}


class TraceUnit(NamedTuple):
    """Files that are read together, of one format."""

    kind: str
    version: str
    paths: tuple[Path, ...]


class TraceSum(NamedTuple):
    """What tells duplicates of a trace, and what it counts."""

    chain: tuple[int, ...]
    sketch: Any
    counts: tuple[int, int, int, int]


@dataclass(slots=True)
class UnitSums:
    """What became of one unit: a part file with a line a trace, and a sum of each."""

    part: Path
    ledger: Ledger = field(default_factory=Ledger)
    redactions: Counter[str] = field(default_factory=Counter)
    secrets: dict[str, dict[str, str]] = field(default_factory=dict)
    traces: list[TraceSum] = field(default_factory=list)
    num_without_answer: int = 0


def detect(path: Path, only: str = "") -> tuple[str, str]:
    """Format and version of a file; ("", "") where none fits.

    Raises:
        InputError: two formats fit, and ``only`` names none (CR0206).
    """
    head = first_records(path)
    kinds = ([only] if only else FORMATS) if head else ()
    found = [(name, version) for name in kinds if (version := FORMATS[name].matches(head))]
    if len(found) > 1:
        names = " and ".join(f"{name} {version}" for name, version in found)
        raise InputError(
            "CR0206",
            f"two formats fit a file: {names}.",
            where=str(path),
            fix="give each program's files in a folder of their own, and name the format: --format NAME.",
        )
    return found[0] if found else ("", "")


def find_units(paths: Sequence[Path], only: str = "") -> tuple[list[TraceUnit], Counter[str]]:
    """What is to be read, and how many files were left out by reason.

    Args:
        paths: files and folders.
        only: the name of a format, for files in which two fit; others are left out.

    Raises:
        InputError: a path that is not there (CR0942), or ``detect`` found two formats in a file that was named itself (CR0206).
    """
    left_out: Counter[str] = Counter()
    groups: dict[tuple[str, str, Path], list[Path]] = {}
    for path in paths:
        if not path.exists():
            problem = "there is no such file or folder."
            raise InputError("CR0942", problem, where=str(path), fix="ls ~/.claude/projects")
        for file in trace_files(path):
            try:
                kind, version = detect(file, only)
            except InputError:
                if file == path:
                    raise
                left_out["two formats fit (CR0206)"] += 1
                continue
            if not kind:
                left_out["another format than --format says" if only else "unknown format"] += 1
                continue
            # one call or one event a file: the files of a folder are one conversation
            is_joined = file.suffix == ".json" and kind in ("openai-chat", "openhands")
            groups.setdefault((kind, version, file.parent if is_joined else file), []).append(file)
    return [TraceUnit(kind, version, tuple(files)) for (kind, version, _), files in groups.items()], left_out


def ingest(
    paths: Sequence[Path], out: Path, *, only: str = "", num_processes: int = 1, report: Report | None = None
) -> dict[str, Any]:
    """Read, redact, take duplicates out and write; the sums that stand in ``ingest.json`` too.

    ``out`` gets ``traces.jsonl`` (one ATIF object a line), ``ingest.json`` and, for nobody else to see, ``redactions.local.json``.

    Raises:
        InputError: as ``find_units``.
        NothingToDoError: no file of a known format, or none with an answer of a model (CR0942).
    """
    units, left_out = find_units(paths, only)
    if not units:
        problem = f"no file of a known format was found ({sum(left_out.values())} file(s) looked at)."
        raise NothingToDoError("CR0942", problem, where=str(paths[0]), fix=f"known are {', '.join(FORMATS)}.")
    out.mkdir(parents=True, exist_ok=True)
    sizes = [sum(path.stat().st_size for path in unit.paths) for unit in units]
    sums: list[UnitSums] = []
    with (
        tempfile.TemporaryDirectory(dir=out, prefix="parts-") as parts,
        ProcessPoolExecutor(min(num_processes, len(units))) as pool,
    ):
        names = [Path(parts) / f"{number}.jsonl" for number in range(len(units))]
        for each in (pool.map if num_processes > 1 else map)(read_unit, units, names):
            sums.append(each)
            if report is not None:
                report(sum(sizes[: len(sums)]), max(1, sum(sizes)), "read, in bytes")
        result = _write(units, sums, out)
    num_files = sum(len(unit.paths) for unit in units)
    result |= {"bytes": sum(sizes), "files": num_files, "files_left_out": dict(left_out)}
    write_json(out / REPORT_NAME, result)
    if not result["traces"]:
        problem, fix = "no answer of a model is in these files.", f"read the reasons in {out / REPORT_NAME}"
        raise NothingToDoError("CR0942", problem, where=str(paths[0]), fix=fix)
    return result


def read_traces(folder: Path) -> Iterator[Trace]:
    """The traces that ``ingest`` wrote, or those of a file of episodes or of ATIF lines.

    Raises:
        InputError: the file is missing or a line is damaged (CR0942).
    """
    path = folder / TRACES_NAME if folder.is_dir() else folder
    number, problem = 0, ""
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                problem = f"line {number} is not a trace."
                yield atif.trace_of(json_value(line))
    except (OSError, ValueError, RecursionError, AttributeError) as error:
        problem = f"there are no traces to read: {error.strerror}." if isinstance(error, OSError) else problem
        fix = "composer-rl traces ingest PATH --out DIR"
        raise InputError("CR0942", problem, where=str(path), fix=fix) from error


def read_unit(unit: TraceUnit, part: Path) -> UnitSums:
    """Read the files of a unit into a part file, redacted; nothing that they hold raises."""
    sums = UnitSums(part)
    records = (record for path in unit.paths for record in read_records(path, sums.ledger))
    gc.disable()  # records have no cycles, and the search for some takes a tenth of the time
    try:
        with part.open("wb") as file:
            for trace in FORMATS[unit.kind].read(records, sums.ledger, unit.paths[0].stem):
                if not any(trace.agent_steps()):
                    sums.num_without_answer += 1
                    continue
                trace.version, chain, redactor = trace.version or unit.version, step_chain(trace), Redactor()
                redactor.trace(trace)
                file.write(json_bytes(atif.trace_row(trace)) + b"\n")
                sums.redactions += redactor.counts
                sums.secrets |= {trace.trace_id: redactor.values} if redactor.values else {}
                sums.traces.append(TraceSum(chain, minhash(trace), trace.counts))
    finally:
        gc.enable()
    return sums


def _write(units: Sequence[TraceUnit], sums: Sequence[UnitSums], out: Path) -> dict[str, Any]:
    traces = [trace for each in sums for trace in each.traces]
    twice = duplicates([trace.chain for trace in traces], [trace.sketch for trace in traces])
    kept = [trace.counts for place, trace in enumerate(traces) if place not in twice]
    places = itertools.count()
    temporary = out / f"{TRACES_NAME}.new"
    with temporary.open("wb") as file:
        for each in sums:
            with each.part.open("rb") as part:
                file.writelines(line for line in part if next(places) not in twice)
    temporary.replace(out / TRACES_NAME)
    secrets = {name: values for each in sums for name, values in each.secrets.items()}
    (out / SECRETS_NAME).unlink(missing_ok=True)  # readable for this user alone, and kept from git
    descriptor = os.open(out / SECRETS_NAME, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(json_bytes(secrets))
    (out / ".gitignore").write_text(f"{SECRETS_NAME}\n")
    became = sum((each.ledger.counts for each in sums), Counter())
    redactions = sum((each.redactions for each in sums), Counter())
    num_records = sum(each.ledger.num_records for each in sums)
    names = ("steps", "calls", "results", "failed_results")
    missing = "not looked for: pip install 'composer-replication[traces]'"
    return {
        "traces": len(kept),
        **{name: sum(counts[column] for counts in kept) for column, name in enumerate(names)},
        "formats": dict(Counter(f"{unit.kind} {unit.version}" for unit in units)),
        "records": num_records,
        "became": dict(became.most_common()),
        "is_balanced": num_records == sum(became.values()),
        "traces_without_answer": sum(each.num_without_answer for each in sums),
        "duplicates": dict(Counter(twice.values())),
        "near_duplicates": missing if rensa is None else "looked for",
        "redactions": {rule.name: redactions[rule.name] for rule in RULES},
        "out": str(out),
    }


def step_chain(trace: Trace) -> tuple[int, ...]:
    """For each step a digest of it and of all before it; two traces share a beginning where these are equal."""
    chain, before = [], b""
    for step in trace.steps:
        calls = "".join(f"\0{call.name}\0{call.arguments}" for call in step.calls)
        whole = f"{step.source}{step.text}{calls}".encode("utf-8", "replace")
        before = hashlib.blake2b(before + whole, digest_size=8).digest()
        chain.append(int.from_bytes(before))
    return tuple(chain)


def minhash(trace: Trace) -> Any:
    """The MinHash of what the model wrote; None without the library or with too little text."""
    texts = [
        text for _, step in trace.agent_steps() for text in (step.text, *(c.arguments for c in step.calls))
    ]
    words = " ".join(texts).split()
    if rensa is None or len(words) < _LEAST_WORDS:
        return None
    sketch = rensa.RMinHash(num_perm=_NUM_PERMUTATIONS, seed=0)
    sketch.update(list(map(" ".join, zip(*(words[start:] for start in range(5)), strict=False))))
    return sketch


def duplicates(chains: Sequence[tuple[int, ...]], sketches: Sequence[Any]) -> dict[int, str]:
    """Which traces are left out, by their places, and why: ``the same``, ``the beginning of another``, ``nearly the same``.

    The first of equal ones is kept; of near ones the longest.
    """
    found: dict[int, str] = {}
    first: dict[int, int] = {}
    inner = {digest for chain in chains for digest in chain[:-1]}
    for place, chain in enumerate(chains):
        if chain and first.setdefault(chain[-1], place) != place:
            found[place] = "the same"
        elif chain and chain[-1] in inner:
            found[place] = "the beginning of another"
    rest = [place for place, sketch in enumerate(sketches) if place not in found and sketch is not None]
    if rest:
        kept = rensa.RMinHashLSH(THRESHOLD, _NUM_PERMUTATIONS, num_bands=16)
        for place in sorted(rest, key=lambda each: (-len(chains[each]), each)):
            own = sketches[place]
            if any(own.jaccard(sketches[other]) >= THRESHOLD for other in kept.query(own)):
                found[place] = "nearly the same"
            else:
                kept.insert(place, own)
    return found
