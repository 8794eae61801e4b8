"""How fast sessions are read, how much memory it takes, and whether an independent reader finds the same.

    python benchmarks/trace_ingest.py --megabytes 200 --oracle /path/to/python-with-agentpile

The corpus is made of the shipped sessions of Claude Code, each copy with ids of its own, so that no copy is a duplicate. Speed is
by processor time of one process (other work on the machine does not count), redaction, duplicates and writing included; beside it
the time that parsing the same lines takes alone. ``--oracle`` names an interpreter that has agentpile, the second reader; the first is
a loop of ten lines that knows nothing of ours.
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

from composer_replication.traces.ingest import find_units, ingest, read_traces, read_unit
from composer_replication.traces.json_sources import read_records
from composer_replication.traces.trace_records import Ledger

DATA = Path(__file__).parents[1] / "tests" / "data" / "traces"
_WORDS = re.compile(r"(?<=[a-z]{3}) (?=[a-zA-Z])")
ORACLE = """
import json, sys
from agentpile import load
for path in sys.argv[1:]:
    answers = calls = results = 0
    for run in load(path):
        for step in run.steps:
            if step["source"] == "agent":
                answers += 1
                calls += len(step.get("tool_calls") or ())
                results += len((step.get("observation") or {}).get("results") or ())
    print(json.dumps([answers, calls, results]))
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
        text = _WORDS.sub(f"{number:x} ", text)
        written += (folder / f"{own}.jsonl").write_text(text)
        number += 1
    return written


def naive(path: Path) -> list[int]:
    """Answers, calls and results of a session, by ids alone; what repeats the words of sub-agents is passed over."""
    answers, calls, results = set(), set(), set()
    for record in read_records(path, Ledger()):
        message = record.get("message") or {}
        if record.get("type") == "assistant":
            answers.add(message["id"])
            calls |= {block["id"] for block in message["content"] if block["type"] == "tool_use"}
        elif record.get("type") == "user" and isinstance(message["content"], list):
            results |= {each["tool_use_id"] for each in message["content"] if each["type"] == "tool_result"}
    return [len(answers), len(calls), len(results & calls)]


def compared(oracle: str) -> None:
    """The session of each shipped file beside the two other readers."""
    paths = sorted((DATA / "claude-code").glob("session*.jsonl"))
    paths += sorted((DATA / "claude-code" / "subagent").glob("*.jsonl"))
    others: list[object] = [None] * len(paths)
    if oracle:
        words = [oracle, "-c", ORACLE, *map(str, paths)]
        done = subprocess.run(words, capture_output=True, text=True, check=True)
        others = [json.loads(line) for line in done.stdout.splitlines()]
    for path, other in zip(paths, others, strict=True):
        with tempfile.TemporaryDirectory() as out:
            ingest([path], Path(out))
            ours = list(next(read_traces(Path(out))).counts[:3])
        print(f"{path.name:<44} ours {ours}  naive {naive(path)}  agentpile {other}")


def main() -> None:
    """Compare, then measure."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--megabytes", type=int, default=50)
    parser.add_argument("--oracle", default="")
    parser.add_argument("--source", type=Path, default=DATA / "claude-code", metavar="FOLDER")
    args = parser.parse_args()
    compared(args.oracle)
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
