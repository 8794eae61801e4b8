"""Which tasks a run trains on and which it holds out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from shlex import quote

from composer_replication.cli.stored_split import open_split, split_file, split_items
from composer_replication.config import RunConfig
from composer_replication.errors import NothingToDoError, UsageError
from composer_replication.records import Task
from composer_replication.rollouts.single_turn import build_prompt, shows_golden
from composer_replication.safety import HeldoutSplit
from composer_replication.tasks.store import TaskStore

DEFAULT_FRACTION = 0.3
_NEEDED_KINDS = {"id", "content", "near-duplicate", "origin"}


@dataclass(frozen=True, slots=True)
class RunTasks:
    """The tasks of a run by use; ``num_blind`` were of held-out repositories but have no hidden tests.

    ``num_leaking`` were left out because the lines around the function show its deleted body,
    ``num_other_sizes`` because one answer cannot fill them.
    """

    train: tuple[Task, ...]
    heldout: tuple[Task, ...]
    num_blind: int
    split: HeldoutSplit | None
    num_leaking: int = 0
    num_other_sizes: int = 0


def usable_tasks(config: RunConfig, store: TaskStore) -> tuple[list[Task], int, int]:
    """The tasks that the recipe's rollouts can do; how many others there are; how many whose prompt shows the deleted code.

    With tools a task of any size will do, and its instruction shows no deleted code.

    Raises:
        NothingToDoError, InputError: as ``one_hole_tasks``.
    """
    if config.agent is not None:
        return stored_tasks(store), 0, 0
    one_hole, num_others = one_hole_tasks(store)
    tasks = [
        task for task in one_hole if not shows_golden(prompt_of(config, store, task), store.golden_body(task))
    ]
    return tasks, num_others, len(one_hole) - len(tasks)


def stored_tasks(store: TaskStore) -> list[Task]:
    """All tasks of a store.

    Raises:
        NothingToDoError: there is none (CR0604).
        InputError: the store is damaged (CR0411).
    """
    tasks = store.tasks()
    if not tasks:
        raise NothingToDoError(
            "CR0604",
            "the task store holds no task.",
            where=str(store.root),
            fix="composer-rl tasks build SOURCE --out DIR",
        )
    return list(tasks)


def one_hole_tasks(store: TaskStore) -> tuple[list[Task], int]:
    """The tasks that one answer can solve, and how many others the store holds.

    Single-turn rollouts splice one text into one file, so a class, a module, a feature or a
    removed definition is nothing for them.

    Raises:
        NothingToDoError: no task at all (CR0604), or only others (CR0604).
        InputError: the store is damaged (CR0411).
    """
    tasks = stored_tasks(store)
    found = [task for task in tasks if task.is_one_hole]
    if not found:
        raise NothingToDoError(
            "CR0604",
            f"none of the {len(tasks)} tasks is the body of one function, which a single answer needs.",
            where=str(store.root),
            fix="composer-rl tasks build SOURCE --out NEW_DIR --granularity function --removal body",
        )
    return found, len(tasks) - len(found)


def other_sizes_note(num_others: int) -> str:
    """One line about the tasks that were left out; empty when there are none."""
    if not num_others:
        return ""
    noun = "task is" if num_others == 1 else "tasks are"
    return f"tasks: {num_others} other {noun} left out: one answer fills the body of one function only"


def divide_tasks(config: RunConfig, store: TaskStore, recipe_folder: Path) -> RunTasks:
    """Train and held-out tasks, proven disjoint by id, content, near-duplicates and origin.

    Raises:
        SplitOverlapError: the two sides overlap.
        NothingToDoError: one side would be empty (CR0604), or no task is the body of one
            function (CR0604).
        UsageError: a held-out repository has no task (CR0452), or the tasks have nothing
            that could be compared (CR0504).
        InputError: the stored split is not usable (CR0504).
    """
    tasks, num_others, num_leaking = usable_tasks(config, store)
    section = config.heldout
    if section is None:
        if not tasks:
            raise NothingToDoError(
                "CR0604",
                "the prompt of every task shows the deleted code.",
                where=str(store.root),
                fix="set rollouts.context_lines to a smaller number, or build other tasks.",
            )
        return RunTasks(tuple(tasks), (), 0, None, num_leaking, num_others)
    split = _stored_or_drawn(config, store, recipe_folder, tasks)
    held_ids = set(split.heldout_ids) if split else _ids_of(section.repositories, store, tasks)
    train = [task for task in tasks if task.task_id not in held_ids]
    held = [task for task in tasks if task.task_id in held_ids]
    heldout = [task for task in held if task.has_hidden_tests]
    if not train or not heldout:
        side = "train on" if not train else "hold out"
        raise NothingToDoError(
            "CR0604",
            f"of {len(tasks)} tasks none is left to {side}.",
            where=str(store.root),
            fix="build more tasks; held-out tasks need hidden tests.",
        )
    if split is None:
        split = HeldoutSplit(split_items(store, train), split_items(store, heldout))
    _require_comparison(split, store)
    split = split.restricted_to({task.task_id for task in (*train, *heldout)})
    return RunTasks(tuple(train), tuple(heldout), len(held) - len(heldout), split, num_leaking, num_others)


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
    """The split of a file, or one drawn by repository where there are several; None: names decide."""
    section = config.heldout
    path = split_file(config, store, recipe_folder)
    if path is not None:
        return open_split(path, store)
    if section is None or section.repositories:
        return None
    return HeldoutSplit.split(
        split_items(store, tasks),
        DEFAULT_FRACTION if section.fraction is None else section.fraction,
        section.seed,
        by="repository" if len({_name(task) for task in tasks}) > 1 else "origin",
    )


def _ids_of(repositories: Sequence[str], store: TaskStore, tasks: Sequence[Task]) -> set[str]:
    """The tasks of the named repositories."""
    unknown = set(repositories) - {_name(task) for task in tasks}
    if unknown:
        raise UsageError(
            "CR0452",
            f"no task comes from {', '.join(sorted(unknown))}.",
            where="heldout.repositories",
            fix=f"composer-rl tasks show {quote(str(store.root))}",
        )
    return {task.task_id for task in tasks if _name(task) in repositories}


def _require_comparison(split: HeldoutSplit, store: TaskStore) -> None:
    missing = _NEEDED_KINDS - set(split.checked)
    if missing:
        raise UsageError(
            "CR0504",
            f"train and held-out tasks could not be compared by {', '.join(sorted(missing))}.",
            where=str(store.root),
            fix="build the tasks again with composer-rl tasks build.",
        )


def _name(task: Task) -> str:
    return task.repository.partition("==")[0]
