"""Recorded sessions of any known format into one folder of ATIF lines, with a sum of what became of every record.

Keys, tokens, e-mail addresses and home folders leave a session before it is written; signed and encrypted thoughts are not touched.
Sessions held twice are left out: the same, the beginning of a longer one, or nearly the same (MinHash, with the extra ``traces``).
"""

from __future__ import annotations

import fileinput
import gc
import hashlib
import itertools
import json
import re
import tempfile
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

from pydantic_core import SchemaValidator, core_schema

from composer_replication.errors import InputError, NothingToDoError
from composer_replication.run_folder import write_json
from composer_replication.traces import json_values as values
from composer_replication.traces.readers import agent_files, messages
from composer_replication.traces.trace_records import Ledger, Trace

try:
    import rensa
except ImportError:  # without the extra ``traces``
    rensa = None
MAX_LINE_BYTES = 64 * 1024**2
MAX_DOCUMENT_BYTES = 256 * 1024**2  # of longer ones the pieces are damaged JSON, and counted as that
_LINES, _SUFFIXES = (".jsonl", ".ndjson"), (".jsonl", ".ndjson", ".json", ".traj")
_SPACES = re.compile(r"\s+")
_DOCUMENT = re.compile(rb'\s*[{\[]\s*\n[ \t"]')  # over several lines, whatever the file's name says
THRESHOLD = 0.9  # share of five-word shingles in common from which two sessions are nearly the same
_LEAST_WORDS, _NUM_PERMUTATIONS = 50, 128
_NUM_HEAD = 20  # records that a format is known by
TRACES_NAME, REPORT_NAME, SECRETS_NAME = "traces.jsonl", "ingest.json", "redactions.local.json"
_COUNTS = ("steps", "calls", "results", "failed_results")
Report = Callable[[int, int, str], None]
TraceSums = tuple[str, tuple[bytes, ...], Any, tuple[int, int, int, int], "Redactor"]
"""Of a trace its id, the digests of its steps, its MinHash, its counts, and what was taken out."""
FORMATS: Mapping[str, Callable[[Iterator[Any], Ledger, str], Iterator[Trace]]] = {
    "atif": messages.read_atif,
    "claude-code": agent_files.read_claude_code,
    "codex": agent_files.read_codex,
    "gemini-cli": agent_files.read_gemini,
    "openhands": agent_files.read_openhands,
    "swe-agent": partial(agent_files.read_documents, "swe-agent"),
    "mini-swe-agent": partial(agent_files.read_documents, "mini-swe-agent"),
    "openai-chat": partial(messages.read_requests, "openai-chat"),
    "openai-responses": partial(messages.read_requests, "openai-responses"),
    "otel-genai": messages.read_otel,
}
"""Of each format what reads the conversations of its records; ``names.toml`` has by what a record is known."""
_SHAPES = [{"has": [], "lacks": [], "texts": {}} | shape for shape in messages.NAMES["shapes"]]
_PLACES = {place: place.split("/") for s in _SHAPES for place in (*s["has"], *s["texts"], *s["lacks"])}


def _fits(row: Any) -> dict[str, str]:
    """The formats that a record fits, each with its version."""
    chat, listed = messages.chat_messages(row), values.typed(list, row)
    known = {"row": row, "list": listed, "request": messages.request_of(row), "chat": chat}
    known["events"] = listed or values.items_at(row, "history") or values.items_at(row, "items")
    known["code"] = agent_files.has_code_blocks((listed or chat)[:6]) or None
    seen = {place: found for place, keys in _PLACES.items() if (found := values.at(known, *keys)) is not None}
    fits: dict[str, str] = {}
    for shape in _SHAPES:
        is_near = seen.keys() >= {*shape["has"], *shape["texts"]} and seen.keys().isdisjoint(shape["lacks"])
        if is_near and all(seen[place] in texts for place, texts in shape["texts"].items()):
            place, otherwise = shape["version"]
            version = values.typed(str, values.at(known, *place.split("/"))) or otherwise
            fits.setdefault(shape["format"], version.removeprefix("ATIF-v"))
    return fits


class TraceUnit(NamedTuple):
    """Files that are read together, of one format."""

    kind: str
    version: str
    paths: tuple[Path, ...]


def trace_files(path: Path) -> list[Path]:
    """The file itself, or every file of a folder that may hold records, by name; links are not followed."""
    if path.is_file():
        return [path]
    found = (each for each in path.rglob("*") if each.is_file() and not each.is_symlink())
    return sorted(each for each in found if each.suffix in _SUFFIXES)


def read_records(path: Path, ledger: Ledger) -> Iterator[Any]:
    """The objects of a file in its order; each counts as one record of ``ledger``, and so does each damaged piece.

    A line of two objects gives both; a document that is a list gives itself, whole.
    """
    with path.open("rb", buffering=256 * 1024) as file:  # 8 KiB at a time take four times as long
        is_lines = path.suffix in _LINES and not _DOCUMENT.match(file.read(64))
        file.seek(0)
        kinds, what = (dict, "line") if is_lines else (dict | list, "document")
        lines = iter(partial(file.readline, MAX_LINE_BYTES), b"")
        for piece in lines if is_lines else [file.read(MAX_DOCUMENT_BYTES)]:
            try:
                found: Any = [values.json_value(piece)]
            except (ValueError, RecursionError):
                found = _saved(piece.decode("utf-8", "replace").strip(), ledger)
            for record in found:
                if isinstance(record, kinds):
                    ledger.num_records += 1
                    yield record
                else:
                    ledger.dropped(f"a {what} that is no object")


def _saved(text: str, ledger: Ledger) -> Iterator[Any]:
    """The values of a line onto which several were written, up to what is damaged, which counts once."""
    decoder, place = json.JSONDecoder(), 0
    try:
        while place < len(text):
            between = _SPACES.match(text, place)
            first = between.end() if between else place
            _, place = decoder.raw_decode(text, first)
            yield values.json_value(text[first:place].encode())
    except (ValueError, RecursionError):
        ledger.dropped("damaged JSON")


def detect(path: Path, only: str = "") -> list[tuple[str, str]]:
    """The formats that a file fits, with its version; none where it cannot be read. ``only`` names the one that is looked for."""
    found: dict[str, str] = {}
    with suppress(OSError):
        for row in itertools.islice(read_records(path, Ledger()), _NUM_HEAD):
            found |= _fits(row) | {kind: known for kind, known in found.items() if known != "unknown"}
    return [(kind, found[kind]) for kind in FORMATS if kind in found and only in ("", kind)]


def find_units(
    paths: Sequence[Path], only: str = "", out: Path | None = None
) -> tuple[list[TraceUnit], Counter[str]]:
    """What is to be read, and how many files were left out by reason; ``only`` names a format, and files of others are left out.

    What an earlier run wrote into ``out`` is read only where it is named itself. Raises ``InputError`` where a path is not there
    (CR0942), and where two formats fit a file that was named itself (CR0206).
    """
    left_out, groups = Counter[str](), dict[tuple[str, str, Path], list[Path]]()
    for path in paths:
        if not path.exists():
            problem = "there is no such file or folder."
            raise InputError("CR0942", problem, where=str(path), fix="ls ~/.claude/projects")
        for file in trace_files(path):
            fits = detect(file, only)
            if len(fits) > 1 and file == path:
                problem = f"two formats fit a file: {' and '.join(map(' '.join, fits))}."
                raise InputError("CR0206", problem, where=str(path), fix="name one of them: --format NAME.")
            is_written = out is not None and file.resolve() == (out / TRACES_NAME).resolve()
            if is_written and file != path and file.with_name(REPORT_NAME).is_file():
                left_out["written by an earlier run"] += 1
            elif len(fits) == 1:
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
    Raises what ``find_units`` does, and ``NothingToDoError`` where no file is of a known format or has an answer of a model (CR0942).
    """
    units, left_out = find_units(paths, only, out)
    if not units:
        why = ", ".join(f"{number} of {what}" for what, number in left_out.items()) or "no file looked at"
        problem = f"no file of a known format was found ({why})."
        raise NothingToDoError("CR0942", problem, where=str(paths[0]), fix=f"known are {', '.join(FORMATS)}.")
    out.mkdir(parents=True, exist_ok=True)
    sizes = [sum(path.stat().st_size for path in unit.paths) for unit in units]
    ledgers, traces = list[Ledger](), list[TraceSums]()
    with (
        tempfile.TemporaryDirectory(dir=out, prefix="parts-") as folder,
        ProcessPoolExecutor(min(num_processes, len(units))) as pool,
    ):
        parts = [Path(folder) / f"{number}.part" for number in range(len(units))]
        for ledger, found in (pool.map if num_processes > 1 else map)(read_unit, units, parts):
            ledgers.append(ledger)
            traces += found
            if report is not None:
                report(sum(sizes[: len(ledgers)]), max(1, sum(sizes)), "read, in bytes")
        twice = duplicates([chain for _, chain, *_ in traces], [sketch for _, _, sketch, *_ in traces])
        ids = Counter(trace_id for place, (trace_id, *_) in enumerate(traces) if place not in twice)
        secrets, temporary = dict[str, dict[str, str]](), out / f"{TRACES_NAME}.new"
        with fileinput.input(parts, mode="rb") as lines, temporary.open("wb") as file:
            for place, (line, (own_id, *_, redactor)) in enumerate(zip(lines, traces, strict=True)):
                is_alone = ids[own_id] < 2  # files of one name: by its content, so that no order renames it
                name = own_id if is_alone else f"{own_id}-{hashlib.sha256(line).hexdigest()[:12]}"
                if place not in twice:
                    secrets |= {name: redactor.values} if redactor.values else {}
                    named = {"session_id": name, "trajectory_id": name}
                    row = line if is_alone else values.json_bytes(values.json_value(line) | named) + b"\n"
                    file.write(row)
    temporary.replace(out / TRACES_NAME)
    (out / SECRETS_NAME).unlink(missing_ok=True)
    (out / SECRETS_NAME).touch(mode=0o600, exist_ok=False)  # kept from others, and from git
    (out / SECRETS_NAME).write_bytes(values.json_bytes(secrets))
    (out / ".gitignore").write_text(f"{SECRETS_NAME}\n")
    kept = [counts for place, (*_, counts, _) in enumerate(traces) if place not in twice]
    became = sum((each.counts for each in ledgers), Counter())
    redactions = sum((redactor.counts for *_, redactor in traces), Counter())
    result = {
        "traces": len(kept),
        **{name: sum(counts[column] for counts in kept) for column, name in enumerate(_COUNTS)},
        "formats": dict(Counter(f"{unit.kind} {unit.version}" for unit in units)),
        "records": sum(each.num_records for each in ledgers),
        "became": dict(became.most_common()),
        "is_balanced": all(each.is_balanced for each in ledgers),
        "traces_without_answer": sum(each.num_without_answer for each in ledgers),
        "duplicates": dict(Counter(twice.values())),
        "near_duplicates": "looked for" if rensa else "not looked for: install composer-replication[traces]",
        "redactions": {rule: redactions[rule] for rule in RULES},
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
    """The traces that ``ingest`` wrote, or those of a file of episodes or of ATIF lines; ``InputError`` for a damaged one (CR0942)."""
    path, problem = folder / TRACES_NAME if folder.is_dir() else folder, "there are no traces to read."
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                problem = f"line {number} is not a trace."
                yield from messages.read_atif(iter([values.json_value(line)]), Ledger(), "")
    except (OSError, ValueError, RecursionError, AttributeError) as error:
        fix = "composer-rl traces ingest PATH --out DIR"
        raise InputError("CR0942", problem, where=str(path), fix=fix) from error


def read_unit(unit: TraceUnit, part: Path) -> tuple[Ledger, list[TraceSums]]:
    """Write a unit's traces into a part file, redacted, those without an answer left out; nothing that its files hold raises."""
    ledger, sums = Ledger(), list[TraceSums]()
    records = (record for path in unit.paths for record in read_records(path, ledger))
    gc.disable()  # records have no cycles, and the search for some takes a tenth of the time
    with part.open("wb") as file:
        for trace in FORMATS[unit.kind](records, ledger, unit.paths[0].stem):
            ledger.dropped(*trace.lost)
            if not any(trace.agent_steps()):
                ledger.num_without_answer += 1
                continue
            trace.version = trace.version or unit.version
            chain, redactor = messages.step_chain(trace.steps), Redactor()
            row = messages.trace_row(trace, redactor.value)
            sums.append((row["session_id"], chain, minhash(trace), trace.counts, redactor))
            file.write(values.json_bytes(row) + b"\n")
    gc.enable()
    return ledger, sums


def minhash(trace: Trace) -> Any:
    """The MinHash of what the model wrote; None without the library or with too little text."""
    texts = [t for _, step in trace.agent_steps() for t in (step.text, *(c.arguments for c in step.calls))]
    words = " ".join(texts).split()
    if rensa is None or len(words) < _LEAST_WORDS:
        return None
    sketch = rensa.RMinHash(num_perm=_NUM_PERMUTATIONS, seed=42)  # the only one that its deduplicator takes
    sketch.update(map(" ".join, zip(*(words[start:] for start in range(5)), strict=False)))
    return sketch


def duplicates(chains: Sequence[tuple[bytes, ...]], sketches: Sequence[Any]) -> dict[int, str]:
    """Which traces are left out, by their places, and why; the first of equal ones is kept, and of near ones the longest."""
    found, first = dict[int, str](), dict[bytes, int]()
    inner = {digest for chain in chains for digest in chain[:-1] if digest != chain[-1]}
    for place, last in ((place, chain[-1]) for place, chain in enumerate(chains) if any(chain)):
        if first.setdefault(last, place) != place:
            found[place] = "the same"
        elif last in inner:
            found[place] = "the beginning of another"
    rest = [place for place, sketch in enumerate(sketches) if place not in found and sketch is not None]
    if rest:
        kept = rensa.RMinHashDeduplicator(THRESHOLD, _NUM_PERMUTATIONS, use_lsh=True, num_bands=16)
        for place in sorted(rest, key=lambda each: (-len(chains[each]), each)):
            if not kept.add(str(place), sketches[place]):
                found[place] = "nearly the same"
    return found


def _finder(*hints: str) -> Callable[[str], bool]:
    """Whether one of the hints is found: pydantic's engine looks for all of them in one pass."""
    schema = core_schema.str_schema(pattern="|".join(hints), regex_engine="rust-regex")
    return SchemaValidator(schema).isinstance_python


_TABLE = tomllib.loads(Path(__file__).with_name("redaction_rules.toml").read_text(encoding="utf-8"))
_LEFT = re.compile(_TABLE["left"])
RULES = {
    row["name"]: (_finder(row["hint"]), re.compile(row["pattern"]), row.get("placeholder", "REDACTED_key_{}"))
    for row in _TABLE["rules"]
}
"""Patterns with what stands in place of their group 1, by name; the hint is looked for first, which takes a hundredth of the time."""
_FOLDERS = {name: rule for name, rule in RULES.items() if rule[2] == "user-{}"}  # mostly there is no other
_HINTS = {row["name"]: row["hint"] for row in _TABLE["rules"] if "@" not in row["hint"]}  # "@" is quicker
_is_any_hinted = _finder(*_HINTS.values())
_is_secret_hinted = _finder(*(hint for name, hint in _HINTS.items() if name not in _FOLDERS))
_is_plain = lru_cache(maxsize=1024)(lambda key: not ("@" in key or _is_any_hinted(key)))  # keys repeat


class Redactor:
    """The placeholders of one trace; ``counts`` says how often each rule found something, ``values`` what each stands for."""

    def __init__(self) -> None:
        self.counts, self._numbers = Counter[str](), Counter[str]()
        self.values, self._known = dict[str, str](), dict[str, str]()

    def value(self, value: Any, key: str = "") -> Any:
        """A text, or JSON that stands at a key, without secrets and names; whatever names a secret reads as ``_KEY``."""
        if isinstance(value, str):
            names_secret = key and not _is_plain(key) and RULES["assigned"][0](key)
            return self.text(f'_KEY="{value}"')[6:-1] if names_secret else self.text(value)
        if isinstance(value, dict):
            return {n if _is_plain(n) else self.text(n): self.value(each, n) for n, each in value.items()}
        return [self.value(each) for each in value] if isinstance(value, list) else value

    def text(self, text: str) -> str:
        """The text without secrets and names; it holds no half of a pair of surrogates, for ``json_value`` reads none."""
        if not ("@" in text or _is_any_hinted(text)):
            return text
        rules = RULES if "@" in text or _is_secret_hinted(text) else _FOLDERS
        for name, (is_hinted, pattern, placeholder) in rules.items():
            if is_hinted(text):
                text = pattern.sub(partial(self._replaced, name, placeholder), text)
        return text

    def _replaced(self, name: str, placeholder: str, match: re.Match[str]) -> str:
        start, end = match.span(match.re.groups)  # of group 1, else of the whole
        value = match.string[start:end]
        if (known := self._known.get(value)) is None:
            if _LEFT.fullmatch(value):
                return match[0]
            self._numbers[placeholder] += 1
            self._known[value] = known = placeholder.format(self._numbers[placeholder])
            self.values[known] = value
        self.counts[name] += 1
        return f"{match.string[match.start() : start]}{known}{match.string[end : match.end()]}"
