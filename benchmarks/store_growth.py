"""Bytes that writing a store of many tasks takes, and the seconds that opening it takes.

    python benchmarks/store_growth.py [--tasks 1000 2000 5000 10000]

The tasks are copies of one task of the project in ``recipes/tiny-cpu`` under other ids, put one by one as a build
puts them. ``written`` is all that this process has handed to the kernel meanwhile (``wchar`` of ``/proc/self/io``),
``kept`` the size of the folder. Bytes a task that do not grow with the number of tasks are linear bytes.
"""

from __future__ import annotations

import tempfile
import time
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from dataclasses import replace
from pathlib import Path

from composer_replication.tasks.build import build_tasks
from composer_replication.tasks.store import TaskStore

PROJECT = Path(__file__).parents[1] / "recipes" / "tiny-cpu" / "project"


def bytes_written() -> int:
    """By this process so far, to files and pipes."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["wchar"])


def write(source: TaskStore, folder: Path, num_tasks: int) -> None:
    """Write such a store and print its row."""
    first = source.task_ids()[0]
    record, secret = source.record(first), source.secret(first)
    store = TaskStore.create(folder)
    started, before = time.perf_counter(), bytes_written()
    for number in range(num_tasks):
        task_id = f"{first}-{number:06d}"
        store.put_task(replace(record, task_id=task_id), replace(secret, task_id=task_id))
    store.settle()
    written, seconds = bytes_written() - before, time.perf_counter() - started
    kept = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    opening = time.perf_counter()
    opened = TaskStore.open(folder)
    opened_seconds = time.perf_counter() - opening
    assert len(opened.task_ids()) == num_tasks
    print(
        f"{num_tasks:6d} tasks: {written / 1e6:7.1f} MB written ({written / num_tasks:6.0f} bytes a task) in {seconds:5.1f} s, "
        f"{kept / num_tasks:5.0f} bytes a task kept, opened in {opened_seconds:.2f} s"
    )


def main() -> None:
    """Print one row for each number of tasks."""
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, nargs="+", default=[1000, 2000, 5000, 10000])
    sizes = parser.parse_args().tasks
    with tempfile.TemporaryDirectory() as folder:
        build_tasks([str(PROJECT)], Path(folder) / "source", max_tasks=1)
        source = TaskStore.open(Path(folder) / "source")
        for size in sizes:
            write(source, Path(folder) / f"store-{size}", size)


if __name__ == "__main__":
    main()
