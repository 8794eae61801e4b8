"""What an action in a sandbox costs: ours warm and cold, and how two agents run theirs, in one run.

    python benchmarks/sandbox_warm.py [--rounds 30] [--live 64 …] [--no-peers]

Everybody is given the action ``true`` as text and runs it in its own shell (ours and swe-rex's
single command ``/bin/sh``, mini-swe-agent and swe-rex's session ``bash``; two rows more say what
``bash`` costs ours, and nobody), in blocks that take turns, so that all see the machine as busy
as it is; seconds are the caller's, from the call to the result. mini-swe-agent's bubblewrap
environment (bubblewrap is our kind of jail too; it starts one for each action, with its own
defaults) and swe-rex's local runtime (no jail; its single command, and the action in a shell
session) run in an interpreter of their own, made for this run from
``sandbox_peers/requirements.txt``. The plain subprocess has no jail and runs in our process.

Then, for warm jails and each number of ``--live`` (``--no-peers``: this alone): seconds from the opening of
a sandbox to its readiness, with one and with so many of them alive; a command, turn by turn, in
each of these; and the memory of one that waits (its two processes; a page that N processes share counts
as one Nth for each). A number that this machine's free memory does not allow is left out, and said.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

from command_line import options

from composer_replication.records import SandboxSpec
from composer_replication.sandbox import LocalSandbox, open_sandbox
from composer_replication.sandbox.bubblewrap import Bubblewrap, WarmBubblewrapSandbox
from composer_replication.sandbox.process_tree import descendants

ACTION = "true"
IN_BASH = ["bash", "-c", ACTION]
FOLDER = Path(__file__).parent / "sandbox_peers"
TIMEOUT_SECONDS = 60.0
BLOCK, SLOW_BLOCK, NUM_STARTS = 10, 2, 40
_MS = 1000
ROOM_KIB = 5 * 1024  # for one; a little more than it takes


class Peers:
    """The process that runs commands as the agents do, in an interpreter that has both, made in ``folder``."""

    def __init__(self, folder: Path) -> None:
        venv.create(folder, with_pip=True)
        python, needed = str(folder / "bin" / "python"), str(FOLDER / "requirements.txt")
        pip = [python, "-m", "pip", "install", "-q", "--no-deps", "-r", needed]
        done = subprocess.run(pip, capture_output=True, text=True, check=False)
        if done.returncode:
            why = (done.stderr.strip().splitlines() or ["pip says nothing"])[-1]
            raise SystemExit(f"the agents cannot be installed ({why}): --no-peers measures ours alone.")
        command = [python, "-X", "utf8", str(FOLDER / "peer_runs.py")]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        if self.process.stdout.readline().strip() != "ready":
            raise SystemExit("the agents do not start")

    def seconds(self, who: str, count: int) -> list[float]:
        """So many commands."""
        print(json.dumps({"who": who, "num": count, "action": ACTION}), file=self.process.stdin, flush=True)
        answer = self.process.stdout.readline()
        if not answer:
            said = "its words stand above; mini needs bwrap in PATH"
            raise SystemExit(f"{who} cannot run a command here ({said})")
        return json.loads(answer)

    def close(self) -> None:
        """End it."""
        self.process.stdin.close()
        self.process.wait()


def seconds_of(run: Callable[[], object]) -> float:
    """Wall-clock seconds of one run."""
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def plain(command: str | list[str]) -> None:
    """The command with no jail at all."""
    subprocess.run(command, shell=isinstance(command, str), check=True, capture_output=True)


def quantile(values: list[float], share: float) -> float:
    """The smallest value that at least ``share`` of all do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def describe(values: list[float]) -> dict[str, float]:
    """Median and 99th percentile in milliseconds, and how many a second, one after the other."""
    return {
        "p50_ms": round(statistics.median(values) * _MS, 2),
        "p99_ms": round(quantile(values, 0.99) * _MS, 2),
        "per_second": round(len(values) / sum(values), 1),
    }


def run_in(sandbox: LocalSandbox, command: str | list[str] = ACTION) -> None:
    """One command in a sandbox."""
    done = sandbox.exec(command, timeout_seconds=TIMEOUT_SECONDS)
    if done.exit_code != 0:
        raise RuntimeError(f"it failed: {done.stderr}")


@contextmanager
def warm(tree: Path) -> Iterator[WarmBubblewrapSandbox]:
    """A warm sandbox that is ready: it has run a command."""
    tree.mkdir(exist_ok=True)
    with WarmBubblewrapSandbox(SandboxSpec(tree)) as sandbox:
        run_in(sandbox)
        yield sandbox


def starts(folder: Path) -> list[float]:
    """Seconds from the opening of a warm sandbox to its readiness, one after another."""
    seconds = []
    for _ in range(NUM_STARTS):
        with ExitStack() as stack:
            seconds.append(seconds_of(lambda: stack.enter_context(warm(folder / "tree-0"))))
    return seconds


def actions(folder: Path, peers: Peers, rounds: int) -> dict[str, dict[str, float]]:
    """Seconds of an action, by who runs it."""
    seconds: dict[str, list[float]] = {}
    (folder / "cold").mkdir()
    with warm(folder / "tree-0") as ours, open_sandbox(SandboxSpec(folder / "cold"), Bubblewrap()) as cold:
        here: dict[str, tuple[Callable[[], object], int]] = {
            "ours, warm": (lambda: run_in(ours), BLOCK),
            "ours, cold": (lambda: run_in(cold), SLOW_BLOCK),
            "plain subprocess, no jail": (lambda: plain(ACTION), BLOCK),
            "ours, warm, bash": (lambda: run_in(ours, IN_BASH), BLOCK),
            "plain subprocess, bash": (lambda: plain(IN_BASH), BLOCK),
        }
        there = {
            "mini-swe-agent, bubblewrap": ("mini", SLOW_BLOCK),
            "swe-rex execute, no jail": ("rex-execute", BLOCK),
            "swe-rex session, no jail": ("rex-session", 1),
        }
        for number in range(rounds + 1):
            for name, (run, count) in here.items():
                found = [seconds_of(run) for _ in range(count)]
                seconds[name] = seconds.get(name, []) + (found if number else [])
            for name, (who, count) in there.items():
                found = peers.seconds(who, count)
                seconds[name] = seconds.get(name, []) + (found if number else [])
    return {name: describe(values) for name, values in seconds.items()}


def kib_in(path: str, name: str) -> int:
    """A value of a file below ``/proc``; Pss is the memory of a process, each page divided by how many share it."""
    return int(Path(path).read_text().split(f"{name}:")[1].split()[0])


def crowd(folder: Path, live: int, rounds: int) -> dict[str, dict[str, float]]:
    """Starts, commands and memory, with ``live`` warm sandboxes alive."""
    before = set(descendants(os.getpid()))
    with ExitStack() as stack:
        sandboxes = [stack.enter_context(warm(folder / f"tree-{number}")) for number in range(live)]
        jails = [pid for pid in descendants(os.getpid()) if pid not in before]
        kib = sum(kib_in(f"/proc/{pid}/smaps_rollup", "Pss") for pid in jails) / live
        actions: list[float] = []
        for number in range(max(2, rounds // 3)):
            for sandbox in sandboxes:
                took = seconds_of(lambda: run_in(sandbox))  # noqa: B023  called at once
                actions += [took] if number else []
        crowded = starts(folder / "more")  # one more, with all the others alive
    return {
        f"start, {live} live": describe(crowded),
        f"action, {live} live": describe(actions),
        f"memory, {live} live": {"mib_per_idle_sandbox": round(kib / 1024, 2)},
    }


def report(figures: dict[str, dict[str, float]]) -> None:
    """Print the tables."""
    print(f"{'':<30}{'p50 ms':>10}{'p99 ms':>10}{'a second':>10}")
    for name, row in figures.items():
        if "p50_ms" in row:
            print(f"{name:<30}{row['p50_ms']:>10.2f}{row['p99_ms']:>10.2f}{row['per_second']:>10.1f}")
    for name in ("mini-swe-agent, bubblewrap", "swe-rex execute, no jail", "swe-rex session, no jail"):
        if name in figures:
            ratio = figures["ours, warm"]["per_second"] / figures[name]["per_second"]
            print(f"ours, warm : {name} = {ratio:.2f}")
    for name, row in figures.items():
        if name.startswith("action, "):
            print(f"p99 : p50 of an {name} = {row['p99_ms'] / row['p50_ms']:.2f}")
        if "mib_per_idle_sandbox" in row:
            print(f"{name}: {row['mib_per_idle_sandbox']:.2f} MiB for one that waits")


def main() -> None:
    """Measure, and print."""
    args = options(__doc__, rounds=30, live=[64], no_peers=False)
    print(f"load of the machine: {os.getloadavg()[0]:.1f}; {os.cpu_count()} processors", file=sys.stderr)
    figures: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        (folder / "more").mkdir()
        if not args.no_peers:
            with closing(Peers(folder / "peers")) as peers:
                figures |= actions(folder, peers, args.rounds)
        figures["start, 1 live"] = describe(starts(folder))
        for live in args.live:
            if live * ROOM_KIB < kib_in("/proc/meminfo", "MemAvailable") / 2:
                figures |= crowd(folder, live, args.rounds)
            else:
                print(f"{live} live: not measured, the free memory does not allow it")
    report(figures)


if __name__ == "__main__":
    main()
