"""The last gates of a candidate: nothing that its policy is shown tells the deleted code."""

from __future__ import annotations

import re

from composer_replication.errors import InputError
from composer_replication.records import Task
from composer_replication.tasks.instructions.writing import write_instruction
from composer_replication.tasks.instructions.written_instructions import (
    read_secrets,
    refusal,
    written_instruction,
)
from composer_replication.tasks.leaks.installed_copies import installed_copies
from composer_replication.tasks.leaks.leak_scan import leaks_in_tree
from composer_replication.tasks.store import TaskStore
from composer_replication.tasks.subject import GateFailed


def check_secrecy(store: TaskStore, task: Task) -> None:
    """Search the tree of a task, installed sources, its instruction and what a model wrote of it for its golden code.

    Raises:
        GateFailed: leak, or instruction-leaks.
        InputError: the store is damaged (CR0411).
    """
    leaks = leaks_in_tree(store, task) or installed_copies(store, task)
    if leaks:
        raise GateFailed("leak", f"{_shown(leaks[0].path)} tells the code ({leaks[0].channel})")
    try:
        plain = write_instruction(store, task)
    except InputError as error:
        if error.code != "CR0429":
            raise
        raise GateFailed("instruction-leaks", "the instruction would contain the deleted code") from error
    written = written_instruction(store, task.task_id)
    reason = refusal(written.text, read_secrets(store, task, plain)) if written is not None else ""
    if reason:
        raise GateFailed("instruction-leaks", f"the instruction that a model wrote does not pass: {reason}")


def _shown(path: str) -> str:
    """As it is imported: where this machine keeps its packages is nobody's business."""
    return re.split(r"/(?:site-packages|lib/python[0-9.]+|lib)/", path, maxsplit=1)[-1]
