"""Recorded sessions of any known format into one folder of ATIF lines, with a sum of what became of every record.

Sessions that are held twice are left out: the same, the beginning of a longer one, or nearly the same. A program that keeps a copy at
every checkpoint holds each session many times: almost half of the bytes of a real corpus were beginnings of other sessions. Near
duplicates are found by MinHash where the extra ``traces`` is installed.
"""

from __future__ import annotations

import gc
import hashlib
import itertools
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
from composer_replication.traces.json_values import json_bytes, json_value, read_records, trace_files
from composer_replication.traces.readers import agent_files as agents
from composer_replication.traces.readers import atif_files as atif
from composer_replication.traces.readers import messages
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
_NUM_HEAD = 20
"""Records that a format is known by."""
TRACES_NAME, REPORT_NAME, SECRETS_NAME = "traces.jsonl", "ingest.json", "redactions.local.json"
_COUNTS = ("steps", "calls", "results", "failed_results")
Report = Callable[[int, int, str], None]


class Format(NamedTuple):
    """``matches`` gives the version of a file's first records or an empty text, ``read`` their conversations."""

    matches: Callable[[Sequence[Any]], str]
    read: Callable[[Iterator[Any], Ledger, str], Iterator[Trace]]


FORMATS = {
    "atif": Format(atif.matches_atif, atif.read_atif),
    "claude-code": Format(agents.matches_claude_code, agents.read_claude_code),
    "codex": Format(agents.matches_codex, agents.read_codex),
    "openhands": Format(agents.matches_openhands, agents.read_openhands),
    "swe-agent": Format(agents.matches_swe_agent, agents.read_swe_agent),
    "mini-swe-agent": Format(agents.matches_mini_swe_agent, agents.read_mini_swe_agent),
    "openai-chat": Format(messages.matches_chat, partial(messages.read_requests, "openai-chat")),
    "openai-responses": Format(
        messages.matches_responses, partial(messages.read_requests, "openai-responses")
    ),
    "otel-genai": Format(messages.matches_otel, messages.read_otel),
}


class TraceUnit(NamedTuple):
    """Files that are read together, of one format."""

    kind: str
    version: str
    paths: tuple[Path, ...]


@dataclass(slots=True)
class UnitSums:
    """What became of one unit: a part file with a line a trace, and of each trace what tells duplicates and what it counts."""

    part: Path
    ledger: Ledger = field(default_factory=Ledger)
    redactions: Counter[str] = field(default_factory=Counter)
    secrets: dict[str, dict[str, str]] = field(default_factory=dict)
    chains: list[tuple[int, ...]] = field(default_factory=list)
    sketches: list[Any] = field(default_factory=list)
    counts: list[tuple[int, int, int, int]] = field(default_factory=list)
    num_without_answer: int = 0


def detect(path: Path, only: str = "") -> list[tuple[str, str]]:
    """The formats that a file fits, with its version; none where it cannot be read. ``only`` names the one that is looked for."""
    try:
        head = list(itertools.islice(read_records(path, Ledger()), _NUM_HEAD))
    except OSError:
        head = []
    kinds = ([only] if only else FORMATS) if head else ()
    return [(name, version) for name in kinds if (version := FORMATS[name].matches(head))]


def find_units(paths: Sequence[Path], only: str = "") -> tuple[list[TraceUnit], Counter[str]]:
    """What is to be read, and how many files were left out by reason; ``only`` names a format, and files of others are left out.

    Raises:
        InputError: a path that is not there (CR0942), or two formats fit a file that was named itself (CR0206).
    """
    left_out: Counter[str] = Counter()
    groups: dict[tuple[str, str, Path], list[Path]] = {}
    for path in paths:
        if not path.exists():
            problem = "there is no such file or folder."
            raise InputError("CR0942", problem, where=str(path), fix="ls ~/.claude/projects")
        for file in trace_files(path):
            fits = detect(file, only)
            if len(fits) > 1 and file == path:
                problem = f"two formats fit a file: {' and '.join(map(' '.join, fits))}."
                fix = (
                    "give each program's files in a folder of their own, and name the format: --format NAME."
                )
                raise InputError("CR0206", problem, where=str(path), fix=fix)
            if len(fits) == 1:
                # one call or one event a file: the files of a folder are one conversation
                is_joined = file.suffix == ".json" and fits[0][0] in ("openai-chat", "openhands")
                groups.setdefault((*fits[0], file.parent if is_joined else file), []).append(file)
            else:
                unknown = "another format than --format says" if only else "unknown format"
                left_out["two formats fit (CR0206)" if fits else unknown] += 1
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
        problem = f"no file of a known format was found ({left_out.total()} file(s) looked at)."
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
        twice = _write(sums, out)
    kept = [counts for n, counts in enumerate(c for each in sums for c in each.counts) if n not in twice]
    became = sum((each.ledger.counts for each in sums), Counter())
    redactions = sum((each.redactions for each in sums), Counter())
    num_records = sum(each.ledger.num_records for each in sums)
    missing = "not looked for: pip install 'composer-replication[traces]'"
    result = {
        "traces": len(kept),
        **{name: sum(counts[column] for counts in kept) for column, name in enumerate(_COUNTS)},
        "formats": dict(Counter(f"{unit.kind} {unit.version}" for unit in units)),
        "records": num_records,
        "became": dict(became.most_common()),
        "is_balanced": num_records == became.total(),
        "traces_without_answer": sum(each.num_without_answer for each in sums),
        "duplicates": dict(Counter(twice.values())),
        "near_duplicates": missing if rensa is None else "looked for",
        "redactions": {rule.name: redactions[rule.name] for rule in RULES},
        "out": str(out),
        "bytes": sum(sizes),
        "files": sum(len(unit.paths) for unit in units),
        "files_left_out": dict(left_out),
    }
    write_json(out / REPORT_NAME, result)
    if not kept:
        problem, fix = "no answer of a model is in these files.", f"read the reasons in {out / REPORT_NAME}"
        raise NothingToDoError("CR0942", problem, where=str(paths[0]), fix=fix)
    return result


def read_traces(folder: Path) -> Iterator[Trace]:
    """The traces that ``ingest`` wrote, or those of a file of episodes or of ATIF lines.

    Raises:
        InputError: the file is missing or a line is damaged (CR0942).
    """
    path = folder / TRACES_NAME if folder.is_dir() else folder
    problem = ""
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
                trace.version = trace.version or unit.version
                sums.chains.append(step_chain(trace))
                redactor = Redactor()
                redactor.trace(trace)
                sums.redactions += redactor.counts
                sums.secrets |= {trace.trace_id: redactor.values} if redactor.values else {}
                sums.sketches.append(minhash(trace))
                sums.counts.append(trace.counts)
                file.write(json_bytes(atif.trace_row(trace)) + b"\n")
    finally:
        gc.enable()
    return sums


def _write(sums: Sequence[UnitSums], out: Path) -> dict[int, str]:
    """Everything but the report; the places of traces that are left out, and why."""
    chains, sketches = (
        [each for own in sums for each in getattr(own, key)] for key in ("chains", "sketches")
    )
    twice = duplicates(chains, sketches)
    places = itertools.count()
    temporary = out / f"{TRACES_NAME}.new"
    with temporary.open("wb") as file:
        for each in sums:
            with each.part.open("rb") as part:
                file.writelines(line for line in part if next(places) not in twice)
    temporary.replace(out / TRACES_NAME)
    (out / SECRETS_NAME).unlink(missing_ok=True)  # readable for this user alone, and kept from git
    (out / SECRETS_NAME).touch(mode=0o600, exist_ok=False)
    secrets = {name: values for each in sums for name, values in each.secrets.items()}
    (out / SECRETS_NAME).write_bytes(json_bytes(secrets))
    (out / ".gitignore").write_text(f"{SECRETS_NAME}\n")
    return twice


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
    texts = [t for _, step in trace.agent_steps() for t in (step.text, *(c.arguments for c in step.calls))]
    words = " ".join(texts).split()
    if rensa is None or len(words) < _LEAST_WORDS:
        return None
    sketch = rensa.RMinHash(num_perm=_NUM_PERMUTATIONS, seed=0)
    sketch.update(map(" ".join, zip(*(words[start:] for start in range(5)), strict=False)))
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
