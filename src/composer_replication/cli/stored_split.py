"""A split on disk: which file a recipe means, and whether it still speaks of these tasks."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

from composer_replication.errors import InputError
from composer_replication.safety import HeldoutSplit

if TYPE_CHECKING:
    from composer_replication.config import RunConfig
    from composer_replication.records import Task
    from composer_replication.tasks.store import TaskStore

FILE_NAME = "split.json"


@dataclass(frozen=True, slots=True)
class SplitItem:
    """A task's content with the word whether it may be held out at all."""

    content: Any
    has_hidden_tests: bool

    def __getattr__(self, name: str) -> Any:
        return getattr(self.content, name)


def split_items(store: TaskStore, tasks: Iterable[Task]) -> Iterator[SplitItem]:
    """Tasks as a split compares them, one after the other: their files are large."""
    return (SplitItem(store.content(task), task.has_hidden_tests) for task in tasks)


def split_file(config: RunConfig, store: TaskStore, recipe_folder: Path) -> Path | None:
    """``heldout.split``, or the store's own file where the recipe says nothing else."""
    section = config.heldout
    if section is None:
        return None
    if section.split:
        return (recipe_folder / section.split).resolve()
    beside = store.root / FILE_NAME
    is_asked_for = config.tasks.store and not section.repositories and section.fraction is None
    return beside if is_asked_for and beside.is_file() else None


def check_named_split(config: RunConfig, recipe_folder: Path) -> None:
    """Read the file that the recipe names, before tasks are built for an hour.

    Raises:
        InputError: it is missing, damaged or changed by hand (CR0504).
    """
    if config.heldout is not None and config.heldout.split:
        path = (recipe_folder / config.heldout.split).resolve()
        HeldoutSplit.from_state_dict(_read(path), where=str(path))


def open_split(path: Path, store: TaskStore) -> HeldoutSplit:
    """The split of a file, compared again with the tasks as they are now.

    Raises:
        InputError: the file is missing, damaged or changed by hand (CR0504), its tasks were
            compared by id only (CR0504), or they are not the store's (CR0504).
        SplitOverlapError: its sides overlap (CR0501).
    """
    split = HeldoutSplit.from_state_dict(_read(path), where=str(path))
    if "content" not in split.checked:
        raise InputError(
            "CR0504",
            "the content of train and held-out tasks was not compared when this split was made.",
            where=str(path),
            fix="make it again with composer-rl tasks split.",
        )
    present, known = set(store.task_ids()), set(split.contents)
    _refuse_other_tasks(known - present, "no longer in the store", path, store)
    _refuse_other_tasks(present - known, "not in the split", path, store)
    sides = (map(store.get, split.train_ids), map(store.get, split.heldout_ids))
    now = HeldoutSplit(*(split_items(store, side) for side in sides))
    changed = {name for name, content in now.contents.items() if content != split.contents[name]}
    _refuse_other_tasks(changed, "changed since the split was made", path, store)
    return now


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except FileNotFoundError as error:
        raise InputError(
            "CR0504", "there is no such split.", where=str(path), fix="composer-rl tasks split DIR"
        ) from error
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(
            "CR0504",
            f"the stored split cannot be read: {error}.",
            where=str(path),
            fix="make it again with composer-rl tasks split.",
        ) from error


def _refuse_other_tasks(task_ids: set[str], what: str, path: Path, store: TaskStore) -> None:
    if task_ids:
        raise InputError(
            "CR0504",
            f"{len(task_ids)} task(s) are {what}, {min(task_ids)} first.",
            where=str(path),
            fix=f"composer-rl tasks split {quote(str(store.root))} --heldout-fraction 0.3 --seed 0, or restore the store.",
        )
