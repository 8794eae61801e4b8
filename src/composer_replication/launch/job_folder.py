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
_KEYS = {"name", "target", "options", "replicas", "id", "submitted_at"}


def write_files(folder: Path, rendered: Mapping[str, str], recipe: Mapping[str, bytes]) -> None:
    """The rendered files, and the recipe's own below ``recipe/``.

    Raises:
        UsageError: a job is there already (CR0231).
    """
    if (folder / RECORD_NAME).exists():
        raise UsageError(
            "CR0231",
            "a job of this name has been launched, and its record is not overwritten.",
            where=str(folder),
            fix="choose another --name, or delete that folder once the job is over.",
        )
    for name, text in rendered.items():
        write_atomic(folder / name, text)
    for name, content in recipe.items():
        write_atomic(folder / RECIPE_FOLDER / name, content)


def write_record(
    folder: Path, *, name: str, target: str, options: Mapping[str, Any], replicas: int, job_id: str
) -> None:
    """Keep under which id the target knows the job."""
    record = {"name": name, "target": target, "options": dict(options), "replicas": replicas, "id": job_id}
    write_json(
        folder / RECORD_NAME, {**record, "submitted_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
    )


def read_record(folder: Path) -> dict[str, Any]:
    """The record of one job.

    Raises:
        InputError: there is none (CR0933), or it cannot be used (CR0401).
    """
    path = folder / RECORD_NAME
    if not path.is_file():
        known = sorted(entry.parent.name for entry in folder.parent.glob(f"*/{RECORD_NAME}"))
        raise InputError(
            "CR0933",
            f"no job {folder.name} was launched from here"
            + (f"; there are {', '.join(known)}." if known else "."),
            where=str(path),
            fix="give the name of a job in jobs/, or the folder of one with --jobs.",
        )
    record = read_json(path)
    missing = sorted(_KEYS - record.keys())
    if missing:
        raise InputError("CR0401", f"{missing[0]} is missing.", where=str(path), fix="launch the job again.")
    return record
