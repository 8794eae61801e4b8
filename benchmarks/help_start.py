"""How long does ``composer-rl --help`` take, against a bare interpreter of the same environment?

Claim: less than five times. Prints the median of both and their ratio, measured in turn
so that a busy machine slows both alike.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

NUM_ROUNDS = 15
BARE = (sys.executable, "-c", "pass")
OURS = (sys.executable, "-m", "composer_replication.cli.main")
COMMANDS = {
    "bare interpreter": BARE,
    "import argparse": (sys.executable, "-c", "import argparse"),
    "composer-rl --help": (*OURS, "--help"),
    "composer-rl train --help": (*OURS, "train", "--help"),
}


def main() -> None:
    """Print one line a command: median seconds and ratio to the bare interpreter."""
    seconds: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for _ in range(NUM_ROUNDS):
        for name, command in COMMANDS.items():
            started = time.perf_counter()
            subprocess.run(command, check=True, capture_output=True)
            seconds[name].append(time.perf_counter() - started)
    bare = statistics.median(seconds["bare interpreter"])
    for name, values in seconds.items():
        median = statistics.median(values)
        print(f"{name:<26} {median * 1000:7.1f} ms   {median / bare:4.1f}x")


if __name__ == "__main__":
    main()
