"""Read and write task sets in the shape of SWE-bench: JSON lines, one JSON list, or Parquet."""

from __future__ import annotations

import json
import re
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from composer_replication.errors import InputError
from composer_replication.run_folder import write_atomic
from composer_replication.tasks.parquet import read_parquet
from composer_replication.tasks.store import TaskStore
from composer_replication.tasks.swebench_rows import Progress, iter_rows

KEYS = (
    "instance_id",
    "repo",
    "base_commit",
    "patch",
    "test_patch",
    "FAIL_TO_PASS",
    "PASS_TO_PASS",
    "problem_statement",
)
_OPEN_FILES = ("/dev/fd/", "/dev/stdin", "/proc/self/fd/")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+-]*")
"""Names become parts of paths and addresses: none of them may climb or be an option."""


@dataclass(frozen=True, slots=True)
class Instance:
    """One row of a SWE-bench set; ``repo`` is ``OWNER/NAME`` or ``NAME``."""

    instance_id: str
    repo: str
    base_commit: str
    patch: str
    test_patch: str
    fail_to_pass: frozenset[str]
    pass_to_pass: frozenset[str]
    problem_statement: str


def read_instances(path: Path) -> list[Instance]:
    """All rows of a set, in their order.

    Args:
        path: ``.parquet``; ``.json`` with one list; anything else has one JSON object a line.

    Raises:
        InputError: it cannot be read, a line is not JSON, a key is missing or of another type,
            or two rows have one id (CR0460).
        MissingError: Parquet without pyarrow (CR0448).
    """
    try:
        if _never_ends(path):
            raise _unusable(path, "it is no regular file")
        data = path.read_bytes()
    except (OSError, ValueError) as error:
        raise _unusable(path, f"it cannot be read: {getattr(error, 'strerror', None) or error}") from error
    instances: dict[str, Instance] = {}
    for place, row in _rows(path, data):
        instance = _instance(path, place, row)
        if instance.instance_id in instances:
            raise _unusable(path, f"{place} has the instance_id of an earlier one, {instance.instance_id}")
        instances[instance.instance_id] = instance
    if not instances:
        raise _unusable(path, "it holds no rows")
    return list(instances.values())


def _never_ends(path: Path) -> bool:
    """A device, or a pipe with a name, to which nobody may ever write; what a shell makes of <(…) ends."""
    mode = path.stat().st_mode
    is_named_pipe = stat.S_ISFIFO(mode) and not str(path).startswith(_OPEN_FILES)
    return is_named_pipe or stat.S_ISCHR(mode) or stat.S_ISBLK(mode)


def _rows(path: Path, data: bytes) -> Iterator[tuple[str, Any]]:
    if path.suffix == ".parquet":
        try:
            rows = read_parquet(data)
        except ValueError as error:
            raise _unusable(path, f"it is not Parquet: {error}") from error
        yield from ((f"row {number}", row) for number, row in enumerate(rows, start=1))
        return
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise _unusable(path, f"byte {error.start} is not UTF-8") from error
    if path.suffix == ".json" and text.lstrip().startswith("["):
        yield from ((f"row {number}", row) for number, row in enumerate(_parsed(path, "it", text), start=1))
        return
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield f"line {number}", _parsed(path, f"line {number}", line)


def _parsed(path: Path, place: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _unusable(path, f"{place} is not JSON: {error}") from error


def _instance(path: Path, place: str, row: Any) -> Instance:
    if not isinstance(row, Mapping):
        raise _unusable(path, f"{place} is not a JSON object")
    missing = [key for key in KEYS if key not in row]
    if missing:
        raise _unusable(path, f"{place} has no {missing[0]}")
    texts = {key: row[key] for key in KEYS if not key.isupper()}
    for optional in ("test_patch", "problem_statement"):
        texts[optional] = texts[optional] or ""
    wrong = [key for key, value in texts.items() if not isinstance(value, str)]
    if wrong:
        raise _unusable(path, f"{place}: {wrong[0]} is not text")
    for key, parts in (
        ("instance_id", [texts["instance_id"]]),
        ("repo", texts["repo"].split("/")),
        ("base_commit", [texts["base_commit"]]),
    ):
        if len(parts) > 2 or not all(_NAME.fullmatch(part) and ".." not in part for part in parts):
            raise _unusable(path, f"{place}: {key} is no name, {texts[key][:80]!r}")
    return Instance(
        **texts,
        fail_to_pass=_tests(path, place, row, "FAIL_TO_PASS"),
        pass_to_pass=_tests(path, place, row, "PASS_TO_PASS"),
    )


def _tests(path: Path, place: str, row: Mapping[str, Any], key: str) -> frozenset[str]:
    """A list of tests, or the JSON text of one, as the published sets have it."""
    value = row[key]
    if isinstance(value, str):
        value = _parsed(path, f"{place}: {key}", value)
    if not isinstance(value, list) or not all(isinstance(test, str) for test in value):
        raise _unusable(path, f"{place}: {key} is not a list of tests")
    return frozenset(value)


def write_instances(
    store: TaskStore, path: Path, *, with_golden: bool, progress: Progress | None = None
) -> int:
    """Write the tasks of a store as JSON lines; how many.

    Args:
        store: the tasks.
        path: the file; it is written whole or not at all.
        with_golden: also patch, test patch and hidden tests, which no policy may see.
        progress: told after each task with (done, total, task id).

    Raises:
        InputError: the store is damaged (CR0411).
    """
    rows = [secret if with_golden else public for public, secret in iter_rows(store, progress)]
    write_atomic(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return len(rows)


def _unusable(path: Path, detail: str) -> InputError:
    return InputError(
        "CR0460",
        f"the file is no task set of the SWE-bench shape: {detail}.",
        where=str(path),
        fix="one JSON object a line with " + ", ".join(KEYS) + ".",
    )
