"""The pinned tasks of real repositories, and the store that is built of them once, in the project's cache."""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path

from composer_replication.errors import InputError
from composer_replication.tasks.build import build_tasks
from composer_replication.tasks.intake.cache import cache_folder, cache_lock, hold
from composer_replication.tasks.journal import GATES_VERSION
from composer_replication.tasks.store import TaskStore
from composer_replication.tasks.store_manifest import STORE_VERSION

PINS = Path(__file__).with_name("real_tasks.toml")
NUM_TASKS = 20
_DAMAGED_STORE = "CR0411"


def read_pins() -> dict[str, list[str]]:
    """Pins by source distribution."""
    pins: dict[str, list[str]] = tomllib.loads(PINS.read_text())
    return pins


def write_pins(path: Path, drawn: Sequence[tuple[str, str]]) -> None:
    """Write (source, pin) pairs as ``read_pins`` reads them."""
    lines = ["# The tasks of hack_matrix.py; draw_tasks.py wrote this file and says by which rule.", ""]
    for source in dict.fromkeys(source for source, _ in drawn):
        lines += [f"{json.dumps(source)} = ["]
        lines += [f"    {json.dumps(pin)}," for each, pin in drawn if each == source] + ["]"]
    path.write_text("\n".join(lines) + "\n")


def real_store() -> TaskStore:
    """The store; built when it is asked for first, with its progress on standard error.

    Raises:
        ComposerError: this machine has no sandbox, a source cannot be fetched, or nothing could be built.
    """
    pins = read_pins()
    asked = json.dumps([pins, STORE_VERSION, GATES_VERSION], sort_keys=True)
    key = hashlib.sha256(f"hack_matrix/{asked}".encode()).hexdigest()[:16]
    folder = cache_folder() / "task-stores" / key
    with cache_lock(f"task-store-{key}"):  # a second run waits for the first one's build
        try:
            return _built(folder, pins)
        except InputError as error:
            if error.code != _DAMAGED_STORE:
                raise
            for path in folder.iterdir():  # only a copy of what can be built again
                if path.is_dir():
                    shutil.rmtree(path)
                elif path.name != "LOCK":
                    path.unlink()
            return _built(folder, pins)


def _built(folder: Path, pins: Mapping[str, Sequence[str]]) -> TaskStore:
    """The store in the folder: as it is where it has all tasks, which its key names; else built, or built on."""
    if (folder / "manifest.json").is_file():
        store = TaskStore.open(folder)
        if len(store.task_ids()) == sum(map(len, pins.values())):
            hold(folder)
            store.verify()
            return store
    build_tasks(list(pins), folder, symbols=pins, progress=_say).require_tasks()
    hold(folder)
    return TaskStore.open(folder)


def _say(done: int, total: int, what: str) -> None:
    print(f"  {done} of {total}: {what}", file=sys.stderr, flush=True)
