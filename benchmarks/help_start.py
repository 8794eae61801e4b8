"""How long does ``composer-rl --help`` take, against a bare interpreter of the same environment?

Claim: less than five times. Prints the quickest of many starts of each and their ratio: the
quickest is the one that a busy machine disturbed least. Byte code is written first, as an
installation does.
"""

from __future__ import annotations

import compileall
import subprocess
import sys
import time
from pathlib import Path

import composer_replication

NUM_ROUNDS = 25
BARE = (sys.executable, "-c", "pass")
OURS = (sys.executable, "-m", "composer_replication.cli.main")
COMMANDS = {
    "bare interpreter": BARE,
    "import argparse": (sys.executable, "-c", "import argparse"),
    "composer-rl --help": (*OURS, "--help"),
    "composer-rl train --help": (*OURS, "train", "--help"),
}


def main() -> None:
    """Print one line a command: milliseconds and ratio to the bare interpreter."""
    compileall.compile_dir(Path(composer_replication.__file__).parent, quiet=1)
    seconds: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for _ in range(NUM_ROUNDS):
        for name, command in COMMANDS.items():
            started = time.perf_counter()
            subprocess.run(command, check=True, capture_output=True)
            seconds[name].append(time.perf_counter() - started)
    bare = min(seconds["bare interpreter"])
    for name, values in seconds.items():
        print(f"{name:<26} {min(values) * 1000:7.1f} ms   {min(values) / bare:4.1f}x")


if __name__ == "__main__":
    main()
