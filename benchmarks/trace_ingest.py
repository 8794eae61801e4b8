"""How fast sessions are read, how much memory it takes, and whether independent readers find the same.

    python benchmarks/trace_ingest.py --megabytes 200 --oracle agentpile=/path/to/python --oracle harbor=/path/to/python

The corpus is made of the sessions of Claude Code in ``--source``, each copy with ids of its own, so that none is a duplicate. Speed is by
processor time of one process, redaction, duplicates and writing included; beside it the time that parsing the same lines takes alone.
``--oracle`` names a reader and an interpreter that has it: agentpile knows Claude Code, ATIF 1.7, OTLP and chats, Harbor Claude Code,
Codex, SWE-agent and mini-swe-agent (its converters to ATIF). Answers, calls by id and name, and the result of each are compared file by
file of ``--compare``, a folder; then it reads the corpus, its imports not counted, and writes nothing.
"""

from __future__ import annotations

import json
import re
import resource
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from command_line import options

from composer_replication.traces import ingest
from composer_replication.traces.json_values import text_of
from composer_replication.traces.trace_records import Ledger

DATA = Path(__file__).parents[1] / "tests" / "data" / "traces"
ORACLES = {
    "agentpile": """
from agentpile import load

def read(path):
    return list(load(path))

def agent_steps(runs):
    return [step for run in runs for step in run.steps if step["source"] == "agent"]
""",
    "harbor": """
import logging, shutil, tempfile
from pathlib import Path
from harbor.agents.installed.claude_code import ClaudeCode
from harbor.agents.installed.codex import Codex
from harbor.agents.installed.mini_swe_agent import convert_mini_swe_agent_to_atif
from harbor.agents.installed.swe_agent import convert_swe_agent_to_atif

logging.disable()

def read(path):
    document = convert_mini_swe_agent_to_atif if "mini-swe-agent" in path else convert_swe_agent_to_atif
    if "swe-agent" in path:
        return document(json.loads(Path(path).read_text()), "session")
    agent = ClaudeCode if "claude-code" in path else Codex
    with tempfile.TemporaryDirectory() as folder:  # there a session is a folder
        shutil.copy(path, folder)
        return agent(logs_dir=Path(folder))._convert_events_to_trajectory(Path(folder))

def agent_steps(whole):
    steps = [step for each in [whole, *(whole.subagent_trajectories or ())] for step in each.steps]
    return [step.model_dump(mode="json") for step in steps if step.source == "agent"]
""",
}
PRINT = """
for path in sys.argv[1:]:
    started = time.process_time()
    try:
        found = read(path)
        seconds = time.process_time() - started
        steps = agent_steps(found)
    except Exception:
        print("null")
        continue
    results = [each for step in steps for each in (step.get("observation") or {}).get("results") or ()]
    texts = {each.get("source_call_id"): each.get("content") for each in results}
    calls = [call for step in steps for call in step.get("tool_calls") or ()]
    rows = [[key, call["function_name"], texts.get(key)] for call in calls for key in [call["tool_call_id"]]]
    print(json.dumps([len(steps), rows, seconds]))
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


def read_by(reader: str, python: str, paths: list[Path]) -> dict[Path, Any]:
    """Of each file that another reader takes the number of answers, its calls, and the seconds of processor time."""
    command = [python, "-c", f"import json, sys, time\n{ORACLES[reader]}\n{PRINT}", *map(str, paths)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    rows = zip(paths, map(json.loads, done.stdout.splitlines()), strict=True)
    return {path: found for path, found in rows if found is not None}


def compared(reader: str, python: str, folder: Path) -> None:
    """Every file of a folder that both read, with what only one of them has or what they read otherwise."""
    units = {
        unit.paths[0]: unit for path in ingest.trace_files(folder) for unit in ingest.find_units([path])[0]
    }
    for path, (num_theirs, calls, _) in read_by(reader, python, list(units)).items():
        traces = ingest.FORMATS[units[path].kind](ingest.read_records(path, Ledger()), Ledger(), path.stem)
        steps = [step for trace in traces for _, step in trace.agent_steps()]
        texts = {result.call_id: result.text.strip() for step in steps for result in step.results}
        names = {call.call_id: call.name for step in steps for call in step.calls}
        own = {call_id: (name, texts.get(call_id, "")) for call_id, name in names.items()}
        theirs = {call_id: (name, text_of(text).strip()) for call_id, name, text in calls}
        if own.keys().isdisjoint(theirs):  # ids that the file does not have
            own, theirs = ({str(n): pair for n, pair in enumerate(pairs.values())} for pairs in (own, theirs))
        both = [(own[key], theirs[key]) for key in theirs if key in own]
        same = sum(pair == other for pair, other in both)
        alike = sum(a == b or (bool(a[1] and b[1]) and (a[1] in b[1] or b[1] in a[1])) for a, b in both)
        sums = f"answers {len(steps)} and {num_theirs}, calls {len(own)} and {len(theirs)}"
        print(f"{reader}: {path.relative_to(folder)!s:<60} {sums}, {same} pairs the same, {alike} alike")
        print(*(f"    {each!s:.150}\n" for each in sorted(own.items() ^ theirs.items())[:3]), sep="", end="")


def main() -> None:
    """Measure, then compare: what another reader holds is no peak of ours."""
    args = options(__doc__, megabytes=50, oracle=[], compare=DATA, source=DATA / "claude-code")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (sessions := folder / "claude-code").mkdir()  # Harbor's converter is chosen by this name
        megabytes, num_steps = corpus(args.source, sessions, args.megabytes * 10**6) / 1e6, 0
        seconds: dict[Path, float] = {}
        # a part each: emptying one takes long
        for number, unit in enumerate(ingest.find_units([sessions])[0]):
            started = time.process_time()
            num_steps += sum(row[3][0] for row in ingest.read_unit(unit, folder / f"{number}.part")[1])
            seconds[unit.paths[0]] = time.process_time() - started
        started = time.process_time()
        for line in (line for path in seconds for line in path.open("rb")):
            with suppress(ValueError):  # one line of the sessions is two records
                json.loads(line)
        parsing, total = time.process_time() - started, sum(seconds.values())
        print(f"one process, processor time: {megabytes / total:.0f} MB/s, {num_steps / total:.0f} answers/s")
        print(f"json.loads alone: {megabytes / parsing:.0f} MB/s; ours is {parsing / total:.2f} of that")
        started = time.monotonic()
        result = ingest.ingest([sessions], folder / "out", num_processes=2)
        print(f"two processes, by the clock: {megabytes / (time.monotonic() - started):.0f} MB/s")
        for where, who in (("here", resource.RUSAGE_SELF), ("in a worker", resource.RUSAGE_CHILDREN)):
            print(f"peak {where}: {resource.getrusage(who).ru_maxrss / 1024:.0f} MiB")
        print(f"{megabytes:.0f} MB, {result['traces']} sessions; duplicates: {result['duplicates']}")
        for reader, _, python in (oracle.partition("=") for oracle in args.oracle):
            theirs = read_by(reader, python, list(seconds))
            taken, own = sum(each[2] for each in theirs.values()), sum(seconds[path] for path in theirs)
            speed = f"{sum(path.stat().st_size for path in theirs) / taken / 1e6:.0f} MB/s"
            said = f"{reader}, {len(theirs)} of {len(seconds)} files: {speed}"
            print(f"{said}; ours is {taken / own:.2f} times as fast, and redacts and writes")
            compared(reader, python, args.compare)


if __name__ == "__main__":
    sys.exit(main())
