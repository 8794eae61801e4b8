"""How fast sessions are read, how much memory it takes, and whether an independent reader finds the same.

    python benchmarks/trace_ingest.py --megabytes 200 --oracle /path/to/python-with-agentpile

The corpus is made of the shipped sessions of Claude Code, each copy with ids of its own, so that no copy is a duplicate. Speed is
by processor time of one process (other work on the machine does not count), redaction, duplicates and writing included; beside it
the time that parsing the same lines takes alone. ``--oracle`` names an interpreter that has agentpile, an independent reader of
Claude Code, ATIF 1.7, OTLP and chats: answers, calls by id and name, and the result of each are compared file by file.
"""

from __future__ import annotations

import argparse
import json
import re
import resource
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from composer_replication.traces.ingest import FORMATS, find_units, ingest, read_unit
from composer_replication.traces.json_values import read_records, text_of, trace_files
from composer_replication.traces.trace_records import Ledger

DATA = Path(__file__).parents[1] / "tests" / "data" / "traces"
ORACLE = """
import json, sys
from agentpile import load
for path in sys.argv[1:]:
    try:
        steps = [step for run in load(path) for step in run.steps if step["source"] == "agent"]
    except Exception:
        print("null")
        continue
    results = [each for step in steps for each in (step.get("observation") or {}).get("results") or ()]
    texts = {each.get("source_call_id"): each.get("content") for each in results}
    calls = [call for step in steps for call in step.get("tool_calls") or ()]
    rows = [[key, call["function_name"], texts.get(key)] for call in calls for key in [call["tool_call_id"]]]
    print(json.dumps([len(steps), rows]))
"""


def corpus(source: Path, folder: Path, num_bytes: int) -> int:
    """Copies of the sessions of a folder, a file each, with ids and common words of their own: none is nearly another."""
    sources = [path.read_text() for path in sorted(source.glob("session*.jsonl"))]
    written = number = 0
    while written < num_bytes:
        own = f"{number:08d}"
        text = sources[number % len(sources)]
        for before in ('"uuid":"', 'arentUuid":"', '"id":"msg_', '"sessionId":"', "toolu_", '"text":"'):
            text = text.replace(before, before + own)
        text = re.sub(r"(?<=[a-z]{3}) (?=[a-zA-Z])", f"{number:x} ", text)
        written += (folder / f"{own}.jsonl").write_text(text)
        number += 1
    return written


def ours(path: Path) -> tuple[int, dict[str, tuple[str, str]]]:
    """Answers of a file, and of each call's id its name and the text of its result, before anything is taken out."""
    (unit,) = find_units([path])[0]
    traces = FORMATS[unit.kind](read_records(path, Ledger()), Ledger(), path.stem)
    steps = [step for trace in traces for _, step in trace.agent_steps()]
    texts = {result.call_id: result.text.strip() for step in steps for result in step.results}
    calls = [call for step in steps for call in step.calls]
    return len(steps), {call.call_id: (call.name, texts.get(call.call_id, "")) for call in calls}


def compared(oracle: str, folder: Path) -> None:
    """Every file of a folder that both read, with what only one of them has or what they read otherwise."""
    paths = [path for path in trace_files(folder) if find_units([path])[0]]
    done = subprocess.run(
        [oracle, "-c", ORACLE, *map(str, paths)], capture_output=True, text=True, check=True
    )
    rows = zip(paths, map(json.loads, done.stdout.splitlines()), strict=True)
    for path, found in ((path, found) for path, found in rows if found is not None):
        theirs = {call_id: (name, text_of(text).strip()) for call_id, name, text in found[1]}
        num_own, own = ours(path)
        same = sum(own.get(call_id) == pair for call_id, pair in theirs.items())
        sums = f"answers {num_own} and {found[0]}, calls {len(own)} and {len(theirs)}, {same} pairs the same"
        print(f"{path.relative_to(folder)!s:<60} {sums}")
        print(*(f"    {each!s:.150}\n" for each in sorted(own.items() ^ theirs.items())[:3]), sep="", end="")


def main() -> None:
    """Compare, then measure."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--megabytes", type=int, default=50)
    parser.add_argument("--oracle", default="", metavar="PYTHON")
    parser.add_argument("--compare", type=Path, default=DATA, metavar="FOLDER")
    parser.add_argument("--source", type=Path, default=DATA / "claude-code", metavar="FOLDER")
    args = parser.parse_args()
    if args.oracle:
        compared(args.oracle, args.compare)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "in").mkdir()
        num_bytes = corpus(args.source, folder / "in", args.megabytes * 10**6)
        units = find_units([folder / "in"])[0]
        started = time.process_time()
        num_steps = sum(row.counts[0] for unit in units for row in read_unit(unit, folder / "part").traces)
        seconds = time.process_time() - started
        started = time.process_time()
        for line in (line for path in sorted((folder / "in").iterdir()) for line in path.open("rb")):
            with suppress(ValueError):  # one line of the sessions is two records
                json.loads(line)
        parsing = time.process_time() - started
        megabytes = num_bytes / 1e6
        print(
            f"one process, by processor time: {megabytes / seconds:.0f} MB/s, {num_steps / seconds:.0f} answers/s"
        )
        print(f"parsing alone: {megabytes / parsing:.0f} MB/s; {megabytes:.0f} MB in all")
        started = time.monotonic()
        result = ingest([folder / "in"], folder / "out", num_processes=2)
        print(f"two processes, by the clock: {megabytes / (time.monotonic() - started):.0f} MB/s")
        for where, who in (("here", resource.RUSAGE_SELF), ("in a worker", resource.RUSAGE_CHILDREN)):
            print(f"peak {where}: {resource.getrusage(who).ru_maxrss / 1024:.0f} MiB")
        print(f"{result['traces']} sessions; duplicates: {result['duplicates']}")


if __name__ == "__main__":
    sys.exit(main())
