"""Which tasks a run trains on and which it holds out: by the recipe, or by the split on disk that it means."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Any

from composer_replication.config import RunConfig
from composer_replication.errors import InputError, NothingToDoError, UsageError
from composer_replication.records import Task
from composer_replication.rollouts.single_turn import build_prompt, shows_golden
from composer_replication.safety import HeldoutSplit
from composer_replication.tasks.store import TaskStore

FILE_NAME = "split.json"
DEFAULT_FRACTION = 0.3
_NEEDED_KINDS = {"id", "content", "near-duplicate", "origin"}


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


@dataclass(frozen=True, slots=True)
class RunTasks:
    """The tasks of a run by use."""

    train: tuple[Task, ...]
    heldout: tuple[Task, ...]
    split: HeldoutSplit | None


def divide_tasks(
    config: RunConfig, store: TaskStore, recipe_folder: Path, note: Callable[[str], None] = lambda _: None
) -> RunTasks:
    """Train and held-out tasks, proven disjoint by id, content, near-duplicates and origin; ``note`` is told what is left out.

    With tools a task of any size will do, and its instruction shows no deleted code. A single answer needs
    the body of one function, and a prompt that does not show the deleted code.
    """
    if config.agent is not None:
        tasks = stored_tasks(store)
    else:
        one_hole = one_hole_tasks(store, note)
        tasks = [
            task
            for task in one_hole
            if not shows_golden(prompt_of(config, store, task), store.golden_body(task))
        ]
        if len(tasks) < len(one_hole):
            note(f"tasks: {len(one_hole) - len(tasks)} left out: their prompts would show the deleted code")
    section = config.heldout
    split = _stored_or_drawn(config, store, recipe_folder, tasks)
    if split is not None:
        held_ids = set(split.heldout_ids)
    else:
        held_ids = set() if section is None else _ids_of(section.repositories, store, tasks)
    train = [task for task in tasks if task.task_id not in held_ids]
    held = [task for task in tasks if task.task_id in held_ids]
    heldout = [task for task in held if task.has_hidden_tests]
    if len(heldout) < len(held):
        note(
            f"tasks: {len(held) - len(heldout)} of held-out repositories left out: they have no hidden tests"
        )
    if not train or (section is not None and not heldout):
        problem = f"of {len(tasks)} tasks none is left to {'hold out' if train else 'train on'}."
        fix = "build more tasks; held-out tasks need hidden tests, and rollouts.context_lines decides what a prompt shows."
        raise NothingToDoError("CR0604", problem, where=str(store.root), fix=fix)
    if section is None:
        return RunTasks(tuple(train), (), None)
    if split is None:
        split = HeldoutSplit(split_items(store, train), split_items(store, heldout))
    missing = _NEEDED_KINDS - set(split.checked)
    if missing:
        problem = f"train and held-out tasks could not be compared by {', '.join(sorted(missing))}."
        fix = "build the tasks again with composer-rl tasks build."
        raise UsageError("CR0504", problem, where=str(store.root), fix=fix)
    split = split.restricted_to({task.task_id for task in (*train, *heldout)})
    return RunTasks(tuple(train), tuple(heldout), split)


def stored_tasks(store: TaskStore) -> list[Task]:
    """All tasks of a store, at least one."""
    store.require_task_ids()
    return list(store.tasks())


def one_hole_tasks(store: TaskStore, note: Callable[[str], None] = lambda _: None) -> list[Task]:
    """The tasks that one answer can solve; ``note`` is told of the others.

    Single-turn rollouts splice one text into one file, so a class, a module, a feature or a
    removed definition is nothing for them.
    """
    tasks = stored_tasks(store)
    found = [task for task in tasks if task.is_one_hole]
    if not found:
        problem = f"none of the {len(tasks)} tasks is the body of one function, which a single answer needs."
        fix = "composer-rl tasks build SOURCE --out NEW_DIR --granularity function --removal body"
        raise NothingToDoError("CR0604", problem, where=str(store.root), fix=fix)
    if len(found) < len(tasks):
        note(f"tasks: {len(tasks) - len(found)} left out: one answer fills the body of one function only")
    return found


def prompt_of(config: RunConfig, store: TaskStore, task: Task) -> str:
    """The prompt of one task as the recipe cuts it."""
    return build_prompt(
        store.broken_text(task),
        task.hole,
        style=config.rollouts.prompt_style,
        context_lines=config.rollouts.context_lines,
    )


def _stored_or_drawn(
    config: RunConfig, store: TaskStore, recipe_folder: Path, tasks: Sequence[Task]
) -> HeldoutSplit | None:
    """The split of a file, or one drawn by repository where there are several; None: names decide, or nothing is held out."""
    section = config.heldout
    path = split_file(config, store, recipe_folder)
    if path is not None:
        return open_split(path, store)
    if section is None or section.repositories:
        return None
    return HeldoutSplit.split(
        split_items(store, tasks),
        DEFAULT_FRACTION if section.fraction is None else section.fraction,
        seed=0,
        by="repository" if len({_name(task) for task in tasks}) > 1 else "origin",
    )


def _ids_of(repositories: Sequence[str], store: TaskStore, tasks: Sequence[Task]) -> set[str]:
    """The tasks of the named repositories."""
    unknown = set(repositories) - {_name(task) for task in tasks}
    if unknown:
        problem = f"no task comes from {', '.join(sorted(unknown))}."
        fix = f"composer-rl tasks show {quote(str(store.root))}"
        raise UsageError("CR0452", problem, where="heldout.repositories", fix=fix)
    return {task.task_id for task in tasks if _name(task) in repositories}


def _name(task: Task) -> str:
    return task.repository.partition("==")[0]


# --------------------------------------------------------------------------- a split on disk


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


def read_split(path: Path) -> HeldoutSplit:
    """The split of a file, not compared with any task."""
    try:
        state = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        is_missing = isinstance(error, FileNotFoundError)
        problem = "there is no such split." if is_missing else f"the stored split cannot be read: {error}."
        fix = "make it again with composer-rl tasks split DIR."
        raise InputError("CR0504", problem, where=str(path), fix=fix) from error
    return HeldoutSplit.from_state_dict(state, where=str(path))


def open_split(path: Path, store: TaskStore) -> HeldoutSplit:
    """The split of a file, compared again with the tasks as they are now."""
    split = read_split(path)
    if "content" not in split.checked:
        problem = "the content of train and held-out tasks was not compared when this split was made."
        fix = "make it again with composer-rl tasks split."
        raise InputError("CR0504", problem, where=str(path), fix=fix)
    now: HeldoutSplit | None = None
    other = set(store.task_ids()) ^ set(split.contents)
    if not other:
        sides = (map(store.get, split.train_ids), map(store.get, split.heldout_ids))
        now = HeldoutSplit(*(split_items(store, side) for side in sides))
        other = {name for name, content in now.contents.items() if content != split.contents[name]}
    if now is None or other:
        problem = f"{len(other)} task(s) were added, taken out or changed since the split was made, {min(other)} first."
        fix = f"composer-rl tasks split {quote(str(store.root))} --heldout-fraction 0.3 --seed 0, or restore the store."
        raise InputError("CR0504", problem, where=str(path), fix=fix)
    return now
