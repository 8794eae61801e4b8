"""How long one command in a fresh jail takes, against a plain subprocess.

    python benchmarks/sandbox_start.py [--runs 300] [--parallel 4]

Each run opens a sandbox on an empty tree, runs ``true`` in it and closes it; the plain
subprocess, measured in the same loop and turn by turn, isolates nothing. Prints p50 and
p99 in milliseconds, and runs a second with several threads. A backend that does not work
here has a line that says why.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from composer_replication.interfaces import SandboxBackend
from composer_replication.records import SandboxSpec
from composer_replication.sandbox import choose_backend
from composer_replication.sandbox.acceptance import WITHOUT_ISOLATION
from composer_replication.sandbox.choice import BACKENDS

TIMEOUT_SECONDS = 60.0


def plain() -> None:
    """One ``true`` in an empty folder, with no isolation at all."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["true"], cwd=folder, check=True, capture_output=True)


def jailed(backend: SandboxBackend) -> Callable[[], None]:
    """The same in a fresh sandbox of ``backend``."""

    def run() -> None:
        with tempfile.TemporaryDirectory() as folder, backend.open(SandboxSpec(Path(folder))) as sandbox:
            if sandbox.exec(["true"], timeout_seconds=TIMEOUT_SECONDS).exit_code != 0:
                raise RuntimeError(f"true failed under {backend.name}")

    return run


def seconds_of(run: Callable[[], None]) -> float:
    """Wall-clock seconds of one run."""
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that at least ``percent`` of a hundred values do not exceed (nearest rank)."""
    return sorted(values)[max(0, math.ceil(percent / 100 * len(values)) - 1)]


def number_of(text: str) -> int:
    """A whole number above 0, of the command line."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"a whole number above 0 is needed, not {text!r}")
    return int(text)


def main() -> None:
    """Measure every backend that works here and print a table and one JSON line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--runs", type=number_of, default=300, help="runs of each; below 100 p99 is the slowest"
    )
    parser.add_argument("--parallel", type=number_of, default=4, help="threads")
    args = parser.parse_args()
    runs: dict[str, Callable[[], None]] = {"plain subprocess": plain}
    for name in (known for known in BACKENDS if known != WITHOUT_ISOLATION):  # what the plain one stands for
        backend = choose_backend(name)
        check = backend.is_available()
        if check.ok:
            runs[name] = jailed(backend)
        else:
            print(f"{name}: not measured, {check.detail}")
    for run in runs.values():
        run()  # the first start asks the machine what it can do
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(args.runs):
        for name, run in runs.items():
            seconds[name].append(seconds_of(run))
    figures: dict[str, dict[str, float]] = {}
    print(
        f"{'backend':<18}{'p50 ms':>10}{'p99 ms':>10}{'per second':>12}   ({args.parallel} threads, {args.runs} runs)"
    )
    for name, run in runs.items():
        started = time.perf_counter()
        with ThreadPoolExecutor(args.parallel) as pool:
            for future in [pool.submit(run) for _ in range(args.runs)]:
                future.result()
        rate = args.runs / (time.perf_counter() - started)
        p50_ms, p99_ms = (1000 * percentile(seconds[name], percent) for percent in (50, 99))
        figures[name] = {
            "p50_ms": round(p50_ms, 2),
            "p99_ms": round(p99_ms, 2),
            "runs_per_second": round(rate, 1),
        }
        print(f"{name:<18}{p50_ms:>10.1f}{p99_ms:>10.1f}{rate:>12.1f}", flush=True)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
