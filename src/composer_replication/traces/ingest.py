"""Recorded sessions of any known format into one folder of ATIF lines, with a sum of what became of every record."""

from __future__ import annotations

import gc
import json
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from composer_replication.errors import InputError, NothingToDoError
from composer_replication.traces.duplicates import duplicates, has_minhash, minhash, step_chain
from composer_replication.traces.json_sources import first_records, read_records, trace_files
from composer_replication.traces.readers.atif_files import matches_atif, read_atif, trace_of, trace_row
from composer_replication.traces.readers.chat_logs import (
    matches_chat,
    matches_responses,
    read_chat,
    read_responses,
)
from composer_replication.traces.readers.claude_code import matches_claude_code, read_claude_code
from composer_replication.traces.readers.codex_rollouts import matches_codex, read_codex
from composer_replication.traces.readers.gemini_cli import matches_gemini_cli, read_gemini_cli
from composer_replication.traces.readers.openhands_events import matches_openhands, read_openhands
from composer_replication.traces.readers.otel_spans import matches_otel, read_otel
from composer_replication.traces.readers.swe_agent_files import (
    matches_mini_swe_agent,
    matches_swe_agent,
    read_mini_swe_agent,
    read_swe_agent,
)
from composer_replication.traces.redaction import Redactor, merged_counts
from composer_replication.traces.trace_records import Ledger, Trace

TRACES_NAME = "traces.jsonl"
REPORT_NAME = "ingest.json"
SECRETS_NAME = "redactions.local.json"
Report = Callable[[int, int, str], None]


class Format(NamedTuple):
    """A format by name: ``matches`` gives its version or an empty text, ``read`` the conversations of its records."""

    name: str
    matches: Callable[[Sequence[Any]], str]
    read: Callable[[Iterator[Any], Ledger, str], Iterator[Trace]]


FORMATS = (
    Format("atif", matches_atif, read_atif),
    Format("claude-code", matches_claude_code, read_claude_code),
    Format("codex", matches_codex, read_codex),
    Format("openhands", matches_openhands, read_openhands),
    Format("swe-agent", matches_swe_agent, read_swe_agent),
    Format("mini-swe-agent", matches_mini_swe_agent, read_mini_swe_agent),
    Format("openai-chat", matches_chat, read_chat),
    Format("openai-responses", matches_responses, read_responses),
    Format("otel-genai", matches_otel, read_otel),
    Format("gemini-cli", matches_gemini_cli, read_gemini_cli),
)
_JOINED = {"openai-chat", "otel-genai"}
"""One call a file: the files of a folder are read together. Events of OpenHands lie one a file, too."""


@dataclass(frozen=True, slots=True)
class TraceUnit:
    """Files that are read together, of one format."""

    kind: str
    version: str
    paths: tuple[Path, ...]


@dataclass(slots=True)
class UnitSums:
    """What became of one unit: a part file with a line a trace, and what tells duplicates."""

    part: str
    num_records: int
    counts: Counter[str]
    redactions: Counter[str]
    secrets: dict[str, dict[str, str]]
    chains: list[tuple[int, ...]] = field(default_factory=list)
    hashes: list[tuple[int, ...]] = field(default_factory=list)
    steps: list[tuple[int, int, int, int]] = field(default_factory=list)
    """For each trace: answers, calls, results, failed results."""


def detect(path: Path) -> tuple[str, str]:
    """Format and version of a file; ("", "") where none fits.

    Raises:
        InputError: two formats fit (CR0940).
    """
    head = first_records(path)
    found = [(kind.name, version) for kind in FORMATS if (version := kind.matches(head))]
    if len(found) > 1:
        names = " and ".join(f"{name} {version}" for name, version in found)
        raise InputError(
            "CR0940",
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
        InputError: a path that is not there (CR0941), or ``detect`` found two formats in a file that was named itself (CR0940).
    """
    left_out: Counter[str] = Counter()
    groups: dict[tuple[str, str, Path], list[Path]] = {}
    for path in paths:
        if not path.exists():
            raise InputError(
                "CR0941", "there is no such file or folder.", where=str(path), fix="ls ~/.claude/projects"
            )
        for file in trace_files(path):
            kind, version = _kind_of(file, only, left_out, is_named=file == path)
            if kind:
                is_event = kind == "openhands" and file.name.startswith("event-")
                is_joined = (kind in _JOINED or is_event) and file.suffix == ".json"
                groups.setdefault((kind, version, file.parent if is_joined else file), []).append(file)
    return [TraceUnit(kind, version, tuple(files)) for (kind, version, _), files in groups.items()], left_out


def _kind_of(file: Path, only: str, left_out: Counter[str], *, is_named: bool) -> tuple[str, str]:
    if only:
        version = next(kind for kind in FORMATS if kind.name == only).matches(first_records(file))
        left_out["another format than --format says"] += not version
        return (only, version) if version else ("", "")
    try:
        kind, version = detect(file)
    except InputError:
        if is_named:
            raise
        left_out["two formats fit (CR0940)"] += 1
        return "", ""
    left_out["unknown format"] += not kind
    return kind, version


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
        raise NothingToDoError(
            "CR0942",
            f"no file of a known format was found ({sum(left_out.values())} file(s) looked at).",
            where=str(paths[0]),
            fix=f"known are {', '.join(kind.name for kind in FORMATS)}.",
        )
    out.mkdir(parents=True, exist_ok=True)
    sizes = [sum(path.stat().st_size for path in unit.paths) for unit in units]
    with tempfile.TemporaryDirectory(dir=out, prefix="parts-") as parts:
        sums = list(_read_all(units, sizes, Path(parts), num_processes, report))
        result = _write(units, sums, out)
    result |= {
        "bytes": sum(sizes),
        "files": sum(len(unit.paths) for unit in units),
        "files_left_out": dict(+left_out),
    }
    (out / REPORT_NAME).write_text(json.dumps(result, indent=1) + "\n")
    if not result["traces"]:
        raise NothingToDoError(
            "CR0942",
            "no answer of a model is in these files.",
            where=str(paths[0]),
            fix=f"read the reasons in {out / REPORT_NAME}",
        )
    return result


def read_traces(folder: Path) -> Iterator[Trace]:
    """The traces that ``ingest`` wrote, or those of a file of episodes or of ATIF lines.

    Raises:
        InputError: the file is missing or a line is damaged (CR0941).
    """
    path = folder / TRACES_NAME if folder.is_dir() else folder
    fix = "composer-rl traces ingest PATH --out DIR"
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                try:
                    yield trace_of(json.loads(line))
                except (ValueError, RecursionError, StopIteration, AttributeError) as error:
                    raise InputError(
                        "CR0941", f"line {number} is not a trace.", where=str(path), fix=fix
                    ) from error
    except OSError as error:
        raise InputError(
            "CR0941", f"there are no traces to read: {error.strerror}.", where=str(path), fix=fix
        ) from error


def _read_all(
    units: Sequence[TraceUnit], sizes: Sequence[int], parts: Path, num_processes: int, report: Report | None
) -> Iterator[UnitSums]:
    jobs = [(unit, str(parts / f"{number}.jsonl")) for number, unit in enumerate(units)]
    done, total = 0, max(1, sum(sizes))
    if num_processes > 1:
        with ProcessPoolExecutor(min(num_processes, len(jobs))) as pool:
            for size, sums in zip(sizes, pool.map(_read_job, jobs, chunksize=1), strict=True):
                done += size
                if report is not None:
                    report(done, total, "read, in bytes")
                yield sums
        return
    for size, job in zip(sizes, jobs, strict=True):
        sums = _read_job(job)
        done += size
        if report is not None:
            report(done, total, "read, in bytes")
        yield sums


def _read_job(job: tuple[TraceUnit, str]) -> UnitSums:
    """Without the search for cycles, of which records have none: it takes a tenth of the time."""
    gc.disable()
    try:
        return read_unit(*job)
    finally:
        gc.enable()


def read_unit(unit: TraceUnit, part: str) -> UnitSums:
    """Read the files of a unit into a part file, redacted; nothing that they hold raises."""
    ledger = Ledger()
    sums = UnitSums(part, 0, Counter(), Counter(), {})
    kind = next(each for each in FORMATS if each.name == unit.kind)
    records = (record for path in unit.paths for record in read_records(path, ledger))
    name = unit.paths[0].stem
    with Path(part).open("w", encoding="utf-8", errors="replace") as file:
        for trace in kind.read(records, ledger, name):
            if not any(True for _ in trace.agent_steps()):
                ledger.counts["traces without an answer of a model"] += 1
                continue
            trace.version = trace.version or unit.version
            redactor = Redactor()
            file.write(json.dumps(redactor.row(trace_row(trace)), ensure_ascii=False) + "\n")
            sums.redactions += redactor.counts
            if redactor.values:
                sums.secrets[f"{trace.trace_id}"] = redactor.values
            sums.chains.append(step_chain(trace))
            sums.hashes.append(minhash(trace))
            sums.steps.append(_numbers(trace))
    sums.num_records, sums.counts = ledger.num_records, ledger.counts
    return sums


def _numbers(trace: Trace) -> tuple[int, int, int, int]:
    answers = [step for _, step in trace.agent_steps()]
    return (
        len(answers),
        sum(len(step.calls) for step in answers),
        sum(len(step.results) for step in answers),
        sum(step.num_errors for step in answers),
    )


def _write(units: Sequence[TraceUnit], sums: Sequence[UnitSums], out: Path) -> dict[str, Any]:
    chains = [chain for each in sums for chain in each.chains]
    hashes = [sketch for each in sums for sketch in each.hashes]
    twice = duplicates(chains, hashes)
    place, kept = 0, []
    temporary = out / f"{TRACES_NAME}.new"
    with temporary.open("wb") as file:
        for each in sums:
            with Path(each.part).open("rb") as part:
                for numbers, line in zip(each.steps, part, strict=True):
                    if place not in twice:
                        file.write(line)
                        kept.append(numbers)
                    place += 1
    temporary.replace(out / TRACES_NAME)
    secrets = {name: values for each in sums for name, values in each.secrets.items()}
    _write_secret(out / SECRETS_NAME, secrets)
    counts = sum((each.counts for each in sums), Counter())
    num_records = sum(each.num_records for each in sums)
    without = counts.pop("traces without an answer of a model", 0)
    return {
        "traces": len(kept),
        "steps": sum(numbers[0] for numbers in kept),
        "calls": sum(numbers[1] for numbers in kept),
        "results": sum(numbers[2] for numbers in kept),
        "failed_results": sum(numbers[3] for numbers in kept),
        "formats": dict(Counter(f"{unit.kind} {unit.version}" for unit in units)),
        "records": num_records,
        "became": dict(counts.most_common()),
        "is_balanced": num_records == sum(counts.values()),
        "traces_without_answer": without,
        "duplicates": dict(Counter(twice.values())),
        "near_duplicates": "looked for"
        if has_minhash()
        else "not looked for: pip install 'composer-replication[traces]'",
        "redactions": merged_counts(sum((each.redactions for each in sums), Counter())),
        "out": str(out),
    }


def _write_secret(path: Path, secrets: dict[str, dict[str, str]]) -> None:
    """Readable for this user alone, and kept from git."""
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8", errors="replace") as file:
        json.dump(secrets, file, ensure_ascii=False)
    (path.parent / ".gitignore").write_text(f"{SECRETS_NAME}\n")
