"""Which tasks a run trains on and which it holds out: by the recipe, or by the split on disk that it means."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from shlex import quote

from composer_replication.config import RunConfig
from composer_replication.errors import InputError, NothingToDoError, UsageError
from composer_replication.records import Task
from composer_replication.rollouts.single_turn import build_prompt, shows_golden
from composer_replication.safety import HeldoutSplit
from composer_replication.tasks.store import TaskStore

FILE_NAME = "split.json"
DEFAULT_FRACTION = 0.3
_NEEDED_KINDS = {"id", "content", "near-duplicate", "origin"}
Note = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class RunTasks:
    """The tasks of a run by use; ``split_fingerprint`` is empty where nothing is held out."""

    train: tuple[Task, ...]
    heldout: tuple[Task, ...]
    split: HeldoutSplit | None

    @property
    def split_fingerprint(self) -> str:
        return self.split.fingerprint if self.split else ""


def divide_tasks(
    config: RunConfig, store: TaskStore, recipe_folder: Path, note: Note = lambda _: None
) -> RunTasks:
    """Train and held-out tasks, proven disjoint by id, content, near-duplicates and origin; ``note`` is told what is left out.

    The split is that of ``split_file``, that of the named repositories, or one that is drawn, by repository where there are
    several. A single answer needs the body of one function, and a prompt that does not show the deleted code.
    """
    tasks = stored_tasks(store)
    if config.agent is None:
        found, options = one_hole_tasks(store, note), config.rollouts
        prompts = {t: build_prompt(store.broken_text(t), t.hole, options) for t in found}
        tasks = [t for t in found if not shows_golden(prompts[t], store.golden_body(t))]
        if len(tasks) < len(found):
            note(f"tasks: {len(found) - len(tasks)} left out: their prompts would show the deleted code")
    section, names = config.heldout, {task: task.repository.partition("==")[0] for task in tasks}
    path = split_file(config, store, recipe_folder)
    split = None
    if path is not None:
        split = open_split(path, store)
    elif section is not None and not section.repositories:
        fraction = DEFAULT_FRACTION if section.fraction is None else section.fraction
        items, is_one = map(store.content, tasks), len(set(names.values())) == 1
        split = HeldoutSplit.split(items, fraction, seed=0, by="origin" if is_one else "repository")
    named = set(section.repositories) if section else set()
    if unknown := named - set(names.values()):
        problem = f"no task comes from {', '.join(sorted(unknown))}."
        fix = f"composer-rl tasks show {quote(str(store.root))}"
        raise UsageError("CR0452", problem, where="heldout.repositories", fix=fix)
    held_ids = set(split.heldout_ids if split else (task.task_id for task in tasks if names[task] in named))
    train = tuple(task for task in tasks if task.task_id not in held_ids)
    held = [task for task in tasks if task.task_id in held_ids]
    heldout = tuple(task for task in held if task.has_hidden_tests)
    if without := len(held) - len(heldout):
        note(f"tasks: {without} of held-out repositories left out: they have no hidden tests")
    if not train or (section is not None and not heldout):
        problem = f"of {len(tasks)} tasks none is left to {'hold out' if train else 'train on'}."
        fix = "build more tasks; held-out tasks need hidden tests, and rollouts.context_lines decides what a prompt shows."
        raise NothingToDoError("CR0604", problem, where=str(store.root), fix=fix)
    if section is None:
        return RunTasks(train, (), None)
    if split is None:
        split = HeldoutSplit(map(store.content, train), map(store.content, heldout))
    if missing := _NEEDED_KINDS - set(split.checked):
        problem = f"train and held-out tasks could not be compared by {', '.join(sorted(missing))}."
        fix = "build the tasks again with composer-rl tasks build."
        raise UsageError("CR0504", problem, where=str(store.root), fix=fix)
    return RunTasks(train, heldout, split.restricted_to({task.task_id for task in (*train, *heldout)}))


def stored_tasks(store: TaskStore) -> list[Task]:
    """All tasks of a store, at least one."""
    store.require_task_ids()
    return list(store.tasks())


def one_hole_tasks(store: TaskStore, note: Note = lambda _: None) -> list[Task]:
    """The tasks that one answer, which is one text in one file, can solve; ``note`` is told of the others."""
    tasks = stored_tasks(store)
    found = [task for task in tasks if task.is_one_hole]
    if not found:
        problem = f"none of the {len(tasks)} tasks is the body of one function, which a single answer needs."
        fix = "composer-rl tasks build SOURCE --out NEW_DIR --granularity function --removal body"
        raise NothingToDoError("CR0604", problem, where=str(store.root), fix=fix)
    if len(found) < len(tasks):
        note(f"tasks: {len(tasks) - len(found)} left out: one answer fills the body of one function only")
    return found


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
        raise InputError("CR0504", problem, where=str(path), fix="make it again: composer-rl tasks split.")
    now: HeldoutSplit | None = None
    other = set(store.task_ids()) ^ set(split.contents)
    if not other:
        sides = (map(store.get, split.train_ids), map(store.get, split.heldout_ids))
        now = HeldoutSplit(*(map(store.content, side) for side in sides))
        other = {name for name, content in now.contents.items() if content != split.contents[name]}
    if now is None or other:
        problem = f"{len(other)} task(s) were added, taken out or changed since the split was made, {min(other)} first."
        fix = f"composer-rl tasks split {quote(str(store.root))} --heldout-fraction 0.3 --seed 0, or restore the store."
        raise InputError("CR0504", problem, where=str(path), fix=fix)
    return now
