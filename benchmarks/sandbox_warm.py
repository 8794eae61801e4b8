"""What an action in a sandbox costs: ours warm and cold, and how two agents run theirs, in one run.

    python benchmarks/sandbox_warm.py [--rounds 30] [--live 64 …] [--starts 40] [--peer-python PATH] [--no-peers]

Everybody is given the action ``true`` as text and runs it in its own shell (ours and swe-rex's
single command ``/bin/sh``, mini-swe-agent and swe-rex's session ``bash``; two rows more say what
``bash`` costs ours, and nobody), in blocks that take turns, so that all see the machine as busy
as it is; seconds are the caller's, from the call to the result. mini-swe-agent's bubblewrap
environment (bubblewrap is our kind of jail too; it starts one for each action, with its own
defaults) and swe-rex's local runtime (no jail; its single command, and the action in a shell
session) run in an interpreter of their own, made for this run from
``sandbox_peers/requirements.txt`` unless ``--peer-python`` names one. The plain subprocess has
no jail and runs in our process.

Then, for warm jails and each number of ``--live`` (``--no-peers``: this alone): seconds from the opening of
a sandbox to its readiness, with one and with so many of them alive; a command, turn by turn, in
each of these; and the memory of one that waits (its two processes; a page that N processes share counts
as one Nth for each). A number that this machine's free memory does not allow is left out, and said.
"""

from __future__ import annotations

import argparse
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

from composer_replication.interfaces import Sandbox
from composer_replication.records import SandboxSpec
from composer_replication.sandbox import open_sandbox
from composer_replication.sandbox.bubblewrap import Bubblewrap, WarmBubblewrapSandbox
from composer_replication.sandbox.process_tree import descendants

ACTION = "true"
IN_BASH = ["bash", "-c", ACTION]
FOLDER = Path(__file__).parent / "sandbox_peers"
TIMEOUT_SECONDS = 60.0
BLOCK = 10
SLOW_BLOCK = 2
_MS = 1000
ROOM_KIB = 5 * 1024  # for one; a little more than it takes


@contextmanager
def peer_python(given: str) -> Iterator[Path]:
    """An interpreter that has both agents: the given one, or one made for this run."""
    with tempfile.TemporaryDirectory(prefix="peers-") as folder:
        python = Path(given) if given else Path(folder) / "bin" / "python"
        if not given:
            venv.create(folder, with_pip=True)
            pip = [
                str(python),
                "-m",
                "pip",
                "install",
                "-q",
                "--no-deps",
                "-r",
                str(FOLDER / "requirements.txt"),
            ]
            done = subprocess.run(pip, capture_output=True, text=True, check=False)
            if done.returncode:
                raise SystemExit(
                    f"the agents cannot be installed ({done.stderr.strip().splitlines()[-1]}): give --peer-python"
                    f" the path of an interpreter that has what {FOLDER / 'requirements.txt'} lists."
                )
        yield python


class Peers:
    """The process that runs commands as the agents do."""

    def __init__(self, python: Path) -> None:
        self.process = subprocess.Popen(
            [str(python), "-X", "utf8", str(FOLDER / "peer_runs.py")],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        if self._line() != "ready":
            raise SystemExit("the agents do not start")

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def seconds(self, who: str, count: int) -> list[float]:
        """So many commands."""
        assert self.process.stdin is not None
        print(json.dumps({"who": who, "num": count, "action": ACTION}), file=self.process.stdin, flush=True)
        found: list[float] = json.loads(self._line())
        return found

    def close(self) -> None:
        """End it."""
        assert self.process.stdin is not None
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


@contextmanager
def warm(
    folder: Path, count: int, seconds: list[float] | None = None
) -> Iterator[list[WarmBubblewrapSandbox]]:
    """So many live warm sandboxes; ``seconds`` gets how long each took from opening to readiness."""
    with ExitStack() as stack:
        found: list[WarmBubblewrapSandbox] = []
        for number in range(count):
            tree = folder / f"tree-{number}"
            tree.mkdir(exist_ok=True)

            def start(tree: Path = tree) -> None:
                sandbox = stack.enter_context(WarmBubblewrapSandbox(SandboxSpec(tree)))
                sandbox.exec("true", timeout_seconds=60)
                found.append(sandbox)

            took = seconds_of(start)
            if seconds is not None:
                seconds.append(took)
        yield found


def run_in(sandbox: Sandbox, command: str | list[str] = ACTION) -> None:
    """One command in a sandbox."""
    done = sandbox.exec(command, timeout_seconds=TIMEOUT_SECONDS)
    if done.exit_code != 0:
        raise RuntimeError(f"it failed: {done.stderr}")


def actions(folder: Path, peers: Peers, rounds: int) -> dict[str, dict[str, float]]:
    """Seconds of an action, by who runs it."""
    seconds: dict[str, list[float]] = {}
    (folder / "cold").mkdir()
    with warm(folder, 1) as (ours,), open_sandbox(SandboxSpec(folder / "cold"), Bubblewrap()) as cold:
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


def crowd(folder: Path, live: int, starts: int, rounds: int) -> dict[str, dict[str, float]]:
    """Starts, commands and memory, with ``live`` warm sandboxes alive."""
    crowded: list[float] = []
    before = set(descendants(os.getpid()))
    with warm(folder, live, crowded) as sandboxes:
        jails = [pid for pid in descendants(os.getpid()) if pid not in before]
        kib = sum(kib_in(f"/proc/{pid}/smaps_rollup", "Pss") for pid in jails) / live
        actions: list[float] = []
        for number in range(max(2, rounds // 3)):
            for sandbox in sandboxes:
                took = seconds_of(lambda: run_in(sandbox))  # noqa: B023  called at once
                actions += [took] if number else []
        for _ in range(starts):  # one more, with all the others alive
            with warm(folder / "more", 1, crowded):
                pass
    return {
        f"start, {live} live": describe(crowded[live:]),
        f"action, {live} live": describe(actions),
        f"memory, {live} live": {"mib_per_idle_sandbox": round(kib / 1024, 2)},
    }


def report(figures: dict[str, dict[str, float]]) -> None:
    """Print the tables, then all figures as one line of JSON."""
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
    print(json.dumps(figures))


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--live", type=int, nargs="+", default=[64])
    parser.add_argument("--starts", type=int, default=40)
    parser.add_argument("--peer-python", default="")
    parser.add_argument("--no-peers", action="store_true")
    args = parser.parse_args()
    print(
        f"load of the machine before: {os.getloadavg()[0]:.1f}; {os.cpu_count()} processors", file=sys.stderr
    )
    figures: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        (folder / "more").mkdir()
        if not args.no_peers:
            with peer_python(args.peer_python) as python, closing(Peers(python)) as peers:
                figures |= actions(folder, peers, args.rounds)
        alone: list[float] = []
        for _ in range(args.starts):
            with warm(folder, 1, alone):
                pass
        figures["start, 1 live"] = describe(alone)
        for live in args.live:
            if live * ROOM_KIB < kib_in("/proc/meminfo", "MemAvailable") / 2:
                figures |= crowd(folder, live, args.starts, args.rounds)
            else:
                print(f"{live} live: not measured, the free memory does not allow it")
    report(figures)
    print(f"load of the machine after: {os.getloadavg()[0]:.1f}", file=sys.stderr)


if __name__ == "__main__":
    main()
