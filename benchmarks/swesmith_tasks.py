"""How many valid tasks a minute, of how many bytes, and what a thief gets: against swesmith.

    python benchmarks/swesmith_tasks.py [--sources sdist:funcy==2.1 …] [--per-repository 40] [--jobs 2]
                                        [--seed 0] [--tasks N] [--granularities function …] [--removals body …]
                                        [--suite-seconds 90] [--swesmith-python PATH]

Both sides work on the same files (package code, no tests) of the same repositories, in the
same sandbox, environment and number of parallel jobs, and are charged the same preparation:
the suite three times, which also leaves out tests that are not green each time (the flake
filter). Making the environment is charged to nobody; it is there before the clock runs.

swesmith: ``--per-repository`` rewrites, in turn from its 13 Python modifiers
(``swesmith_peer/modifiers.py``). Each is judged as its ``harness.valid`` and ``harness.gather``
do, but by our test runner in our sandbox, without a container's start: the whole suite once;
valid if it ends within ``--suite-seconds`` (its default, 90), every file still collects, at
least one three-times-green test does not pass any more and at least one still passes. Seconds
are those of finding, drawing and changing entities (not of importing swesmith) and of these
runs; putting tasks on branches is not charged. Bytes: the row of each task as
``harness.gather`` writes it (instance id, patch, FAIL_TO_PASS, PASS_TO_PASS, image and
repository name, indented JSON) plus the repository's files once as a ``.tar.gz``; the
environment in its Docker image is not counted.

ours: ``build_tasks`` for as many valid tasks as the peer got (or ``--tasks``), with all gates:
hidden tests parted, golden code and stubs tried, the behaviour of the deleted functions recorded, tables of
answers tried and the strength of the tests measured by mutants. How many of the seconds went by until the gates
were passed and recording began is printed beside. Every candidate that was looked at counts,
those that no test calls included. Bytes: everything in the store's folder but the wheels of
the environment, repository included.

Wall seconds are for the machine as busy as it is: its load average over the last minute is
printed for each side at the end of its work.

Thief (``swesmith_peer/thief.py``): looks for deleted or changed lines that are distinctive (once
in the restored tree, not in the broken one, no comment; if none is, for the changed place with
as many lines around it as make it so) and for code objects that only the original compiles
to, in what a solver has by each project's own procedure. Ours: the exported rollout tree.
swesmith: the clone with the task's branch checked out, which ``RepoProfile.create_mirror``,
``harness.gather`` and ``RepoProfile.get_container`` make: one commit with the original on
``main``, on top of it "Bug Patch", then "Remove F2P Tests"; nothing in version 0.0.9 takes ``.git``
out of the container. Assumed to its favour: its install command is the default
``pip install -e .``, so that there is no second copy of the package, and no bytecode lies in the
image. A harness that removes ``.git`` before a model sees the folder is not its procedure and
would change the figure. Both: the environment's folder of installed packages. As a control
the same thief gets the original files and must then recover every task.

The tasks are not of one kind: swesmith's are changed operators, conditions and removed
statements, ours deleted code. Only what is printed is compared.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from swesmith_peer.procedure import (
    SUITE_SECONDS,
    Bench,
    deliver,
    draw_rewrites,
    packed_size,
    peer_python,
    row_of,
    validate_rewrite,
)
from swesmith_peer.robbery import Tree, rob

from composer_replication.sandbox.process_folder import process_folder
from composer_replication.tasks.build import build_tasks
from composer_replication.tasks.intake.environment import open_environment
from composer_replication.tasks.intake.sources import open_source
from composer_replication.tasks.planning.deletion import GRANULARITIES, REMOVALS
from composer_replication.tasks.repository import lock_repository, prepare
from composer_replication.tasks.store import TaskStore

RECORDING = "twins of repositories"  # what a build says it does once all gates are passed
SOURCES = ("sdist:funcy==2.1", "sdist:semver==3.1.1")


@dataclass
class Side:
    """What one side did; several repositories add up.

    ``fixed_bytes`` are those of the repository, ``bytes`` all. ``judged`` tasks have something
    that a thief could be seen with, ``recovered`` of them he got, ``control`` of them he gets
    when the original lies there. ``gate_seconds`` of the work passed before anything was recorded.
    """

    candidates: int = 0
    valid: int = 0
    preparation_seconds: float = 0.0
    work_seconds: float = 0.0
    gate_seconds: float = 0.0
    fixed_bytes: int = 0
    bytes: int = 0
    judged: int = 0
    recovered: int = 0
    control: int = 0
    load: list[float] = field(default_factory=list)
    channels: Counter[str] = field(default_factory=Counter)
    rejected: Counter[str] = field(default_factory=Counter)

    def __add__(self, other: Side) -> Side:
        return Side(
            **{name: getattr(self, name) + getattr(other, name) for name in self.__dataclass_fields__}
        )

    def rows(self) -> dict[str, str]:
        """The figures as text, by name."""
        minutes = (self.preparation_seconds + self.work_seconds) / 60
        channels = ", ".join(f"{name} {number}" for name, number in sorted(self.channels.items()))
        reasons = ", ".join(f"{name} {number}" for name, number in self.rejected.most_common())
        return {
            "candidates": str(self.candidates),
            "valid tasks": str(self.valid),
            "yield": _ratio(100 * self.valid, self.candidates, "%"),
            "seconds: preparation + work": f"{self.preparation_seconds:.1f} + {self.work_seconds:.1f}",
            "of the work, up to the gates": f"{self.gate_seconds:.1f}" if self.gate_seconds else "all",
            "valid tasks per minute": _ratio(self.valid, minutes),
            "valid tasks per minute of work": _ratio(self.valid, self.work_seconds / 60),
            "load of the machine meanwhile": ", ".join(f"{load:.1f}" for load in self.load),
            "bytes per task": _ratio(self.bytes, self.valid, digits=0),
            "of them the repository's share": _ratio(self.fixed_bytes, self.valid, digits=0),
            "recovered by the thief": f"{self.recovered} of {self.judged}"
            + (f" ({channels})" if channels else ""),
            "recovered with the original there": f"{self.control} of {self.judged}",
            "not valid": reasons or "none",
        }


def _ratio(value: float, by: float, unit: str = "", digits: int = 1) -> str:
    return f"{value / by:,.{digits}f}{unit}" if by else "-"


def bench_of(name: str, folder: Path, jobs: int) -> Bench:
    """Prepare a repository once, into the store that our side goes on with; the environment first, untimed."""
    source = open_source(name)
    environment = open_environment(lock_repository(source))
    store = TaskStore.create(folder)
    started = time.monotonic()
    prepared = prepare(source, store, None, map_calls=True, jobs=jobs)
    return Bench(source, prepared.record, environment, time.monotonic() - started, folder)


def peer_side(bench: Bench, python: Path, options: argparse.Namespace) -> tuple[Side, dict[str, Any]]:
    """swesmith on one repository."""
    answer = draw_rewrites(bench, python, options.per_repository, options.seed)
    rewrites = answer["rewrites"]
    started = time.monotonic()
    with ThreadPoolExecutor(options.jobs) as pool:
        verdicts = list(
            pool.map(lambda rewrite: validate_rewrite(bench, rewrite, options.suite_seconds), rewrites)
        )
    seconds = answer["seconds"] + time.monotonic() - started
    tasks = [
        (row_of(bench, place, rewrite, failing, passing), rewrite)
        for place, (rewrite, (reason, failing, passing)) in enumerate(zip(rewrites, verdicts, strict=True))
        if not reason
    ]
    repository = packed_size(bench.source.files)
    side = Side(
        candidates=len(rewrites),
        valid=len(tasks),
        preparation_seconds=bench.seconds,
        work_seconds=seconds,
        load=[os.getloadavg()[0]],
        fixed_bytes=repository,
        bytes=repository + len(json.dumps([row for row, _ in tasks], indent=4).encode()),
        rejected=Counter(reason for reason, _, _ in verdicts if reason),
    )
    with tempfile.TemporaryDirectory(prefix="peer-", dir=process_folder()) as folder:
        take_stock(side, bench, deliver(bench, tasks, Path(folder)))
    return side, answer


def our_side(bench: Bench, max_tasks: int, options: argparse.Namespace) -> Side:
    """``build_tasks`` on one repository, from the preparation that both are charged."""
    fixed = store_bytes(bench.store)
    recording: list[float] = []
    started = time.monotonic()

    def watch(_done: int, _total: int, what: str) -> None:
        if what == RECORDING and not recording:
            recording.append(time.monotonic() - started)

    built = build_tasks(
        [bench.source.source],
        bench.store,
        granularities=options.granularities,
        removals=options.removals,
        max_tasks=max_tasks,
        with_truth=True,
        seed=options.seed,
        jobs=options.jobs,
        progress=watch,
    )
    side = Side(
        candidates=built.candidates,
        valid=built.valid,
        preparation_seconds=bench.seconds,
        work_seconds=time.monotonic() - started,
        gate_seconds=sum(recording),
        load=[os.getloadavg()[0]],
        fixed_bytes=fixed,
        bytes=store_bytes(bench.store),
        rejected=Counter(built.rejected),
    )
    store = TaskStore.open(bench.store)
    with tempfile.TemporaryDirectory(prefix="ours-", dir=process_folder()) as folder:
        trees = [Tree(task.task_id, Path(folder) / task.task_id) for task in store.tasks()]
        for task, tree in zip(store.tasks(), trees, strict=True):
            store.write_tree(task, tree.folder, "rollout")
        take_stock(side, bench, trees)
    return side


def store_bytes(folder: Path) -> int:
    """Everything in a store's folder but the wheels of the environment."""
    store = TaskStore.open(folder)
    locks = [store.environment_lock(record.environment) for record in store.repositories()]
    wheels = {wheel.sha256 for lock in locks for wheel in (*lock.wheels, lock.installer)}
    return sum(
        path.stat().st_size
        for path in folder.rglob("*")
        if path.is_file() and path.name.partition(".")[0] not in wheels
    )


def take_stock(side: Side, bench: Bench, trees: Sequence[Tree]) -> None:
    """Send the thief, and note what he brings."""
    loot = rob(bench.source.files, str(bench.environment.root), trees)
    side.judged = len(loot.found)
    side.recovered = sum(bool(channels) for channels in loot.found.values())
    side.control = loot.num_control
    side.channels = Counter(channel for channels in loot.found.values() for channel in channels)


def print_table(title: str, peer: Side, ours: Side, version: str) -> None:
    """Both sides beside each other."""
    print(f"\n{title}\n\n| | swesmith {version} | composer-rl |\n|---|---|---|")
    for (name, theirs), own in zip(peer.rows().items(), ours.rows().values(), strict=True):
        print(f"| {name} | {theirs} | {own} |", flush=True)


def main() -> None:
    """Run both sides on every repository and print their figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--sources", nargs="+", default=list(SOURCES))
    parser.add_argument("--per-repository", type=int, default=40, help="rewrites drawn from swesmith")
    parser.add_argument("--tasks", type=int, help="valid tasks of ours; as many as the peer got")
    parser.add_argument("--granularities", nargs="+", choices=GRANULARITIES, default=["function"])
    parser.add_argument("--removals", nargs="+", choices=REMOVALS, default=["body"])
    parser.add_argument("--suite-seconds", type=float, default=SUITE_SECONDS, help="swesmith's time limit")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--swesmith-python", default="", help="made for this run when not given")
    options = parser.parse_args()
    peers, ours, version = Side(), Side(), ""
    with peer_python(options.swesmith_python) as python, tempfile.TemporaryDirectory() as scratch:
        for place, name in enumerate(options.sources):
            bench = bench_of(name, Path(scratch) / f"store-{place}", options.jobs)
            peer, answer = peer_side(bench, python, options)
            own = our_side(bench, options.tasks or max(1, peer.valid), options)
            version, peers, ours = answer["version"], peers + peer, ours + own
            turns = Counter(rewrite["modifier"] for rewrite in answer["rewrites"])
            print_table(f"{bench.source.repository}", peer, own, version)
            print(
                f"\n{len(turns)} of {answer['num_modifiers']} modifiers gave rewrites of {answer['num_entities']}"
                f" entities in {len(bench.subjects)} files, {min(turns.values(), default=0)} to"
                f" {max(turns.values(), default=0)} each; {answer['num_raised']} raised."
            )
    print_table("All repositories", peers, ours, version)


if __name__ == "__main__":
    main()
