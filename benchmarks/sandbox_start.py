"""How long one command in a fresh jail takes, against a plain subprocess.

    python benchmarks/sandbox_start.py [--runs 30] [--parallel 4]

Each run opens a sandbox on an empty tree, runs ``true`` in it and closes it; the plain
subprocess, measured in the same loop and turn by turn, isolates nothing. Prints the
median in milliseconds, and runs a second with several threads.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
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


def main() -> None:
    """Measure every backend that works here and print a table and one JSON line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=30)
    parser.add_argument("--parallel", type=int, default=4)
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
    print(f"{'backend':<18}{'median ms':>10}{'per second':>12}   ({args.parallel} threads)")
    for name, run in runs.items():
        started = time.perf_counter()
        with ThreadPoolExecutor(args.parallel) as pool:
            for future in [pool.submit(run) for _ in range(args.runs)]:
                future.result()
        rate = args.runs / (time.perf_counter() - started)
        median_ms = statistics.median(seconds[name]) * 1000
        figures[name] = {"median_ms": round(median_ms, 2), "runs_per_second": round(rate, 1)}
        print(f"{name:<18}{median_ms:>10.1f}{rate:>12.1f}")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
