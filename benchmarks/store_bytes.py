"""How many bytes a built task takes, by part of the store; the wheels of the environments are left out.

    python benchmarks/store_bytes.py [STORE …] [--source sdist:funcy==2.1] [--tasks 40] [--jobs 2]

Without a STORE it builds one of ``--source`` in a temporary folder: all sizes and ways, with
hidden tests and recorded behaviour. Everything else in the folder is counted, each file once and
divided by the number of tasks: what belongs to a repository too (its files, its green tests,
what they call), and the Parquet file.
"""

from __future__ import annotations

import argparse
import tempfile
from collections import Counter
from pathlib import Path

from composer_replication.tasks.build import build_tasks
from composer_replication.tasks.store import TaskStore

PARTS = {
    "repositories": "records of repositories",
    "locks": "locked environments",
    "tasks": "records of tasks",
    "secrets": "secret records",
    "instructions": "written instructions",
}


def bytes_by_part(store: TaskStore) -> Counter[str]:
    """Size of everything in the store's folder but the wheels, by what it is for."""
    repositories = store.repositories()
    locks = [store.environment_lock(record.environment) for record in repositories]
    names = {wheel.sha256: "wheels" for lock in locks for wheel in (*lock.wheels, lock.installer)}
    names |= {digest: "files of repositories" for record in repositories for digest in record.files.values()}
    for task_id in store.task_ids():
        names |= dict.fromkeys((store.secret(task_id).twins or {}).values(), "twins")
    sizes: Counter[str] = Counter()
    for path in sorted(store.root.rglob("*")):
        if not path.is_file():
            continue
        top = path.relative_to(store.root).parts[0]
        if top == "objects":  # what is left are the green tests of a repository, and what each calls
            part = names.get(path.name.partition(".")[0], "green tests and their calls")
        else:
            part = PARTS.get(top, top)
        sizes[part] += path.stat().st_size
    del sizes["wheels"]
    return sizes


def print_table(folder: Path) -> None:
    """The parts of one store, the largest first."""
    store = TaskStore.open(folder)
    num_tasks = len(store.task_ids())
    sizes = bytes_by_part(store)
    print(f"\n{folder}: {num_tasks} tasks\n\n| part | bytes | bytes per task |\n|---|---|---|")
    for part, size in [*sizes.most_common(), ("all", sizes.total())]:
        print(f"| {part} | {size:,} | {size / max(num_tasks, 1):,.0f} |")


def main() -> None:
    """Print one table for each store."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("stores", nargs="*", type=Path, metavar="STORE")
    parser.add_argument("--source", default="sdist:funcy==2.1")
    parser.add_argument("--tasks", type=int, default=40)
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    for folder in options.stores:
        print_table(folder)
    if not options.stores:
        with tempfile.TemporaryDirectory(prefix="store-bytes-") as scratch:
            folder = Path(scratch) / "tasks"
            build_tasks(
                [options.source],
                folder,
                granularities=("function", "class", "module", "feature"),
                removals=("body", "whole"),
                with_truth=True,
                max_tasks=options.tasks,
                jobs=options.jobs,
            )
            print_table(folder)


if __name__ == "__main__":
    main()
