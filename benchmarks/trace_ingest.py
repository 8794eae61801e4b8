"""How fast sessions are read, how much memory it takes, and whether independent readers find the same.

    python benchmarks/trace_ingest.py --megabytes 200 --oracle agentpile=/path/to/python --oracle harbor=/path/to/python

The corpus is made of the shipped sessions of Claude Code, each copy with ids of its own, so that no copy is a duplicate. Speed is
by processor time of one process (other work on the machine does not count), redaction, duplicates and writing included; beside it
the time that parsing the same lines takes alone. ``--oracle`` names a reader and an interpreter that has it: agentpile knows Claude
Code, ATIF 1.7, OTLP and chats, Harbor Claude Code, Codex, SWE-agent and mini-swe-agent (its converters to ATIF). Answers, calls by id
and name, and the result of each are compared file by file.
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
ORACLES = {
    "agentpile": """
from agentpile import load

def agent_steps(path):
    return [step for run in load(path) for step in run.steps if step["source"] == "agent"]
""",
    "harbor": """
import logging, shutil, tempfile
from pathlib import Path
from harbor.agents.installed.claude_code import ClaudeCode
from harbor.agents.installed.codex import Codex
from harbor.agents.installed.mini_swe_agent import convert_mini_swe_agent_to_atif
from harbor.agents.installed.swe_agent import convert_swe_agent_to_atif

logging.disable()

def converted(path):
    document = convert_mini_swe_agent_to_atif if "mini-swe-agent" in path else convert_swe_agent_to_atif
    if "swe-agent" in path:
        return document(json.loads(Path(path).read_text()), "session")
    agent = ClaudeCode if "claude-code" in path else Codex
    with tempfile.TemporaryDirectory() as folder:  # there a session is a folder
        shutil.copy(path, folder)
        return agent(logs_dir=Path(folder))._convert_events_to_trajectory(Path(folder))

def agent_steps(path):
    whole = converted(path)
    steps = [step for each in [whole, *(whole.subagent_trajectories or ())] for step in each.steps]
    return [step.model_dump(mode="json") for step in steps if step.source == "agent"]
""",
}
PRINT = """
for path in sys.argv[1:]:
    try:
        steps = agent_steps(path)
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


def compared(reader: str, python: str, folder: Path) -> None:
    """Every file of a folder that both read, with what only one of them has or what they read otherwise."""
    paths = [path for path in trace_files(folder) if find_units([path])[0]]
    command = [python, "-c", f"import json, sys\n{ORACLES[reader]}\n{PRINT}", *map(str, paths)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    rows = zip(paths, map(json.loads, done.stdout.splitlines()), strict=True)
    for path, found in ((path, found) for path, found in rows if found is not None):
        theirs = {call_id: (name, text_of(text).strip()) for call_id, name, text in found[1]}
        num_own, own = ours(path)
        if own.keys().isdisjoint(theirs):  # ids that the file does not have
            own, theirs = ({str(n): pair for n, pair in enumerate(pairs.values())} for pairs in (own, theirs))
        both = [(own[key], theirs[key]) for key in theirs if key in own]
        same = sum(pair == other for pair, other in both)
        alike = sum(a == b or (bool(a[1] and b[1]) and (a[1] in b[1] or b[1] in a[1])) for a, b in both)
        sums = f"answers {num_own} and {found[0]}, calls {len(own)} and {len(theirs)}"
        print(f"{reader}: {path.relative_to(folder)!s:<60} {sums}, {same} pairs the same, {alike} alike")
        print(*(f"    {each!s:.150}\n" for each in sorted(own.items() ^ theirs.items())[:3]), sep="", end="")


def main() -> None:
    """Compare, then measure."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--megabytes", type=int, default=50)
    parser.add_argument("--oracle", action="append", default=[], metavar="NAME=PYTHON")
    parser.add_argument("--compare", type=Path, default=DATA, metavar="FOLDER")
    parser.add_argument("--source", type=Path, default=DATA / "claude-code", metavar="FOLDER")
    args = parser.parse_args()
    for reader, _, python in (oracle.partition("=") for oracle in args.oracle):
        compared(reader, python, args.compare)
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
