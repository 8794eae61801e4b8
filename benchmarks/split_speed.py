"""How long HeldoutSplit takes for thousands of tasks, and that it misses no planted copy.

    python benchmarks/split_speed.py [--tasks 5000] [--planted 100] [--seed 0]

Each task's golden is the body of a real function (as in near_duplicates.py), its own tests
are a test with some lines of another one, its tree two small files. ``tasks`` are trained on and
as many held out; ``planted`` of the held-out ones are copies of training tasks with every
variable renamed and every constant changed, in another repository under another name.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import sys
import sysconfig
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from near_duplicates import PACKAGES, Function, OtherConstants, Renamed, functions, written

from composer_replication.records import TaskContent
from composer_replication.safety import HeldoutSplit, SplitOverlapError
from composer_replication.safety.task_sketch import SketchReader


def task_of(number: int, function: Function, other: Function, golden: str) -> TaskContent:
    """A task with a tree, tests and a golden of its own."""
    lines = "".join(f"    {line.strip()}\n" for line in other.body.splitlines()[:20])
    tests = f"def test_{function.name}_{number}():\n    subject = make_{number}()\n{lines}    assert subject == {number}\n"
    return TaskContent(
        f"task-{number}",
        f"{function.package}-{number // 10}==1.0",
        f"{function.name}_{number}",
        {
            "module.py": f"def {function.name}_{number}():\n    raise NotImplementedError\n",
            "data.py": f"VALUE = {number}\n",
        },
        {"tests/test_module.py": tests},
        golden,
        tests,
    )


def changed(function: Function) -> str:
    """The body with other names and constants."""
    renamed = Renamed(function.node).visit(copy.deepcopy(function.node))
    return str(written(OtherConstants().visit(renamed)))


def sides(
    everything: Sequence[Function], num: int, num_planted: int
) -> tuple[list[TaskContent], list[TaskContent]]:
    """Tasks to train on and held-out ones; the first of both sides are the planted copies."""
    reader = SketchReader()
    train = [task_of(n, everything[n], everything[-n - 1], everything[n].body) for n in range(num)]
    long = [n for n in range(num) if len(reader.of_task(train[n]).golden_shapes) >= 40][:num_planted]
    heldout = [
        task_of(num + n, everything[num + n], everything[-num - n - 1], everything[num + n].body)
        for n in range(num - len(long))
    ]
    heldout += [
        task_of(3 * num + n, everything[2 * num + n], everything[n + 7], changed(everything[original]))
        for n, original in enumerate(long)
    ]
    return [*[train[n] for n in long], *[task for n, task in enumerate(train) if n not in set(long)]], heldout


def main() -> None:
    """Print one JSON line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", type=int, default=5000, help="on each side")
    parser.add_argument("--planted", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    everything = list(functions(Path(sysconfig.get_path("stdlib"))))
    everything += functions(Path(sysconfig.get_path("purelib")), PACKAGES)
    random.Random(arguments.seed).shuffle(everything)
    train, heldout = sides(everything, arguments.tasks, arguments.planted)
    num_planted = min(arguments.planted, len(heldout))
    planted = {
        (one.task_id, other.task_id) for one, other in zip(train, heldout[-num_planted:], strict=False)
    }
    started, cpu = time.monotonic(), time.process_time()
    found: list[tuple[str, str, str]] = []
    try:
        HeldoutSplit(train, heldout)
    except SplitOverlapError as error:
        found = error.pairs
    checked, checked_cpu = time.monotonic() - started, time.process_time() - cpu
    started, cpu = time.monotonic(), time.process_time()
    split = HeldoutSplit.split([*train, *heldout], 0.3, arguments.seed)
    print(
        json.dumps(
            {
                "train": len(train),
                "heldout": len(heldout),
                "check_seconds": round(checked, 1),
                "check_cpu_seconds": round(checked_cpu, 1),
                "pairs_listed": len({pair[1:] for pair in found}),
                "planted": len(planted),
                "planted_found": len(planted & {pair[1:] for pair in found}),
                "split_tasks": len(split.train_ids) + len(split.heldout_ids),
                "split_seconds": round(time.monotonic() - started, 1),
                "split_cpu_seconds": round(time.process_time() - cpu, 1),
            }
        )
    )


if __name__ == "__main__":
    main()
