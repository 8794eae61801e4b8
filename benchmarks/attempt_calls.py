"""Tool calls a second of attempts in warm jails and in cold ones, in one run.

    python benchmarks/attempt_calls.py [--attempts 8] [--rounds 5] [--tasks STORE]

``--attempts`` attempts of each kind at one task are open at the same time, each used by a thread of its own, as an agent
loop does. In each round every one of them makes the same calls, first those of one kind, then of the other, and the two
take turns in going first; both must get the same answers. ``commands`` are calls that start a program (``bash``,
``search``), ``mixed`` every tool but ``run_tests``, half of which start none. The first round, in which warm jails are
started, is counted on its own. Without ``--tasks`` a store of one task is built first.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

from composer_replication.records import ToolCall
from composer_replication.rollouts.environment.attempt import AttemptOptions
from composer_replication.rollouts.environment.feature_deletion_env import FeatureDeletionEnv
from composer_replication.rollouts.grading import Grader
from composer_replication.tasks.build import build_tasks
from composer_replication.tasks.store import TaskStore

PROJECT = Path(__file__).parents[1] / "recipes" / "tiny-cpu" / "project"
PIN = "tinymath/numbers.py::clamp"
KINDS = {"cold": False, "warm": True}


def calls(*each: tuple[str, dict[str, object]]) -> list[ToolCall]:
    """Calls by tool and arguments."""
    return [ToolCall(name, json.dumps(arguments)) for name, arguments in each]


COMMANDS = calls(
    ("bash", {"command": "true"}),
    ("bash", {"command": "git status --short | head -5"}),
    ("bash", {"command": "cat tests/*.py | wc -l"}),
    ("search", {"pattern": "def "}),
)
MIXED = [
    *COMMANDS,
    *calls(
        ("list_files", {}),
        ("read_file", {"path": "tinymath/numbers.py"}),
        ("write_file", {"path": "notes.txt", "content": "a line\n" * 100}),
        ("str_replace", {"path": "notes.txt", "old_str": "nowhere", "new_str": ""}),
    ),
]


def answers(environment: FeatureDeletionEnv, made: Sequence[ToolCall]) -> list[str]:
    """What an attempt was told."""
    return [environment.call(call).text.replace(environment.tree_root, "") for call in made]


def rates(attempts: dict[str, list[FeatureDeletionEnv]], made: Sequence[ToolCall], rounds: int) -> None:
    """Play the rounds and print a line for each kind."""
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for number in range(rounds + 1):
        told = {}
        for kind in sorted(KINDS, reverse=bool(number % 2)):
            with ThreadPoolExecutor(len(attempts[kind])) as threads:
                started = time.perf_counter()
                told[kind] = list(threads.map(lambda each: answers(each, made), attempts[kind]))
                seconds[kind].append(time.perf_counter() - started)
        assert told["cold"] == told["warm"], "the two kinds answered differently"
    num_calls = len(made) * len(attempts["cold"])
    for kind, (first, *others) in seconds.items():
        print(
            f"  {kind}  {num_calls * rounds / sum(others):8.1f} calls a second"
            f"   (first round {num_calls / first:.1f})"
        )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--attempts", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tasks", type=Path, help="a store; its first task is taken")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        store = given.tasks or Path(folder) / "tasks"
        if given.tasks is None:
            build_tasks([str(PROJECT)], store, symbols={str(PROJECT): (PIN,)})
        grader = Grader(TaskStore.open(store), backend="bubblewrap")
        stack.callback(grader.close)
        task_id = grader.store.task_ids()[0]
        attempts: dict[str, list[FeatureDeletionEnv]] = {}
        for kind, is_warm in KINDS.items():
            assert grader.attempt_backend(is_warm=is_warm).name.endswith("-warm") == is_warm, (
                "no such jail here"
            )
            options = AttemptOptions(is_warm=is_warm)
            attempts[kind] = [
                stack.enter_context(FeatureDeletionEnv(grader, attempt=options))
                for _ in range(given.attempts)
            ]
            for each in attempts[kind]:
                each.reset(task_id)
        for name, made in (("commands", COMMANDS), ("mixed", MIXED)):
            print(
                f"{name}, {given.attempts} attempts at once, load {os.getloadavg()[0]:.0f} on {os.cpu_count()} cores:"
            )
            rates(attempts, made, given.rounds)


if __name__ == "__main__":
    main()
