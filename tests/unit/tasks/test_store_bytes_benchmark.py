"""The benchmark of a store's size counts every file once and knows what it is for."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import zstandard

from composer_replication.tasks.store import TaskStore

BENCHMARK = Path(__file__).parents[3] / "benchmarks" / "store_bytes.py"


def table_of(folder: Path) -> tuple[str, dict[str, tuple[int, int]]]:
    """Title, and bytes in all and per task by part, as it prints them."""
    done = subprocess.run(
        [sys.executable, str(BENCHMARK), str(folder)], capture_output=True, text=True, check=True
    )
    title, _, *lines = done.stdout.strip().splitlines()
    rows = [[cell.strip().replace(",", "") for cell in line.strip("| ").split("|")] for line in lines[2:]]
    return title, {part: (int(size), int(per_task)) for part, size, per_task in rows}


def test_every_file_but_the_wheels_is_counted_once(tiny_store: TaskStore, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(tiny_store.root, folder)
    (folder / "stray.txt").write_bytes(b"x" * 4000)
    title, table = table_of(folder)
    assert title == f"{folder}: 4 tasks"
    wheels = set()
    for path in (folder / "locks").iterdir():
        lock = json.loads(zstandard.decompress(path.read_bytes()))
        wheels |= {wheel[3] for wheel in (*lock["wheels"], lock["installer"])}
    sizes = {
        path.relative_to(folder).as_posix(): path.stat().st_size
        for path in folder.rglob("*")
        if path.is_file() and path.name not in wheels
    }
    assert len(sizes) < sum(path.is_file() for path in folder.rglob("*"))  # there are wheels
    total = sum(sizes.values())
    assert table.pop("all") == (total, round(total / 4))
    assert sum(size for size, _ in table.values()) == total
    assert table["stray.txt"] == (4000, 1000)
    assert table["records of tasks"][0] == sum(
        size for name, size in sizes.items() if name.startswith("tasks/")
    )
    originals = {zstandard.decompress(p.read_bytes()) for p in folder.glob("objects/*/*.zst")}
    assert any(b"def clamp(" in data for data in originals)
    assert 0 < table["files of repositories"][0] < sum(map(len, originals))
