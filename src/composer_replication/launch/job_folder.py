"""What was submitted: a folder ``jobs/NAME`` with the rendered files and ``job.json``, by which status, logs and stop find it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from composer_replication.errors import InputError, UsageError
from composer_replication.run_folder import read_json, write_atomic, write_json

RECORD_NAME = "job.json"
RECIPE_FOLDER = "recipe"


def write_files(folder: Path, rendered: Mapping[str, str], recipe: Mapping[str, bytes]) -> None:
    """The rendered files, and the recipe's own below ``recipe/``; ``UsageError`` CR0231 where a job is there already."""
    if (folder / RECORD_NAME).exists():
        problem = "a job of this name has been launched, and its record is not overwritten."
        fix = "choose another --name, or delete that folder once the job is over."
        raise UsageError("CR0231", problem, where=str(folder), fix=fix)
    for name, text in rendered.items():
        write_atomic(folder / name, text)
    for name, content in recipe.items():
        write_atomic(folder / RECIPE_FOLDER / name, content)


def write_record(folder: Path, **record: Any) -> None:
    """Keep which job it is, on which target with which options, and under which id the target knows it."""
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    write_json(folder / RECORD_NAME, {**record, "submitted_at": now})


def read_record(folder: Path) -> dict[str, Any]:
    """The record of one job; ``InputError`` where there is none (CR0930) or it is damaged (CR0401)."""
    path = folder / RECORD_NAME
    if not path.is_file():
        known = ", ".join(sorted(entry.parent.name for entry in folder.parent.glob(f"*/{RECORD_NAME}")))
        problem = f"no job {folder.name} was launched from here" + (f"; there are {known}." if known else ".")
        fix = "give the name of a job in jobs/, or the folder of one with --jobs."
        raise InputError("CR0930", problem, where=str(path), fix=fix)
    return read_json(path)
