"""Claim: a store of 10,000 small tasks is written with linear bytes and opens in under a second.

    python benchmarks/store_growth.py [--tasks 1000 2000 5000 10000]

The tasks are copies of one task of the project in ``recipes/tiny-cpu`` under other ids, put one by one as a build
puts them. ``written`` is all that this process has handed to the kernel meanwhile (``wchar`` of ``/proc/self/io``),
``kept`` the size of the folder. Bytes a task that do not grow with the number of tasks are linear bytes.
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import replace
from pathlib import Path

from command_line import options

from composer_replication.tasks.build import build_tasks
from composer_replication.tasks.store import TaskStore

PROJECT = Path(__file__).parents[1] / "recipes" / "tiny-cpu" / "project"


def bytes_written() -> int:
    """By this process so far, to files and pipes."""
    return int(Path("/proc/self/io").read_text().split("wchar: ")[1].split()[0])


def write(source: TaskStore, folder: Path, num_tasks: int) -> None:
    """Write such a store and print its row."""
    first = source.task_ids()[0]
    record, secret = source.record(first), source.secret(first)
    store, started, before = TaskStore.create(folder), time.perf_counter(), bytes_written()
    for task_id in (f"{first}-{number:06d}" for number in range(num_tasks)):
        store.put_task(replace(record, task_id=task_id), replace(secret, task_id=task_id))
    store.settle()
    written, seconds = bytes_written() - before, time.perf_counter() - started
    kept = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    started = time.perf_counter()
    assert len(TaskStore.open(folder).task_ids()) == num_tasks
    opening = time.perf_counter() - started
    said = f"{num_tasks:6d} tasks: {written / 1e6:7.1f} MB written ({written / num_tasks:6.0f} bytes a task)"
    print(f"{said} in {seconds:5.1f} s, {kept / num_tasks:5.0f} bytes a task kept, opened in {opening:.2f} s")


if __name__ == "__main__":
    sizes = options(__doc__, tasks=[1000, 2000, 5000, 10000]).tasks
    with tempfile.TemporaryDirectory() as made:
        build_tasks([str(PROJECT)], Path(made) / "source", max_tasks=1)
        one = TaskStore.open(Path(made) / "source")
        for size in sizes:
            write(one, Path(made) / f"store-{size}", size)
