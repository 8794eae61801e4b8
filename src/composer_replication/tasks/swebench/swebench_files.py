"""Task sets in the shape of SWE-bench: JSON lines, read and written; one JSON list or Parquet, read.

We write a public row of each task, and one with the patch and the hidden tests. ``base_commit`` is not of git: it is the
sha256 of the base tree, which is what a rollout sees (hidden and paid test functions are not in it). In the secret row
``patch`` puts the code back, ``test_patch`` the tests as they were; both together give the original tree. The public row
has no ``patch``, an empty ``test_patch``, and knows of the tests that are shown alone. Lists of tests are JSON strings, as
in the published data sets.
"""

from __future__ import annotations

import ast
import io
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from composer_replication.errors import InputError, needs_extra
from composer_replication.records import Task
from composer_replication.run_folder import write_atomic
from composer_replication.tasks.build_state import Instance, Progress
from composer_replication.tasks.instructions.writing import plain_instruction
from composer_replication.tasks.instructions.written_instructions import written_instruction
from composer_replication.tasks.intake.cache import sha256_of
from composer_replication.tasks.intake.tree_rules import is_test_path
from composer_replication.tasks.patches import make_patch
from composer_replication.tasks.store import TaskStore
from composer_replication.tasks.syntax_trees import UNPARSABLE

KEYS = tuple(
    "instance_id repo base_commit patch test_patch FAIL_TO_PASS PASS_TO_PASS problem_statement".split()
)
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+-]*")
"""Names become parts of paths and addresses: none of them may climb or be an option."""
_NO_COMMA = re.compile(r"""['"]\s+['"]""")
"""As numpy prints a list; Python would read its texts as one."""
_INSTANCE = TypeAdapter(Instance)


def read_instances(path: Path) -> tuple[list[Instance], dict[str, str]]:
    """All rows of a set, in their order; and why others cannot be read, by their places.

    Names of columns are read in any case, and lists of tests as lists, or as the text of one: JSON, as in most published
    sets, or Python's. An InputError where the file cannot be read, or not one row of it (CR0460); a MissingError for
    Parquet without pyarrow (CR0101).
    """
    instances: dict[str, Instance] = {}
    unreadable: dict[str, str] = {}
    for place, row in _rows(path):
        value = row
        try:
            value = _parsed(row) if isinstance(row, str) else row
            instance = _instance(value)
            if instance.instance_id in instances:
                raise ValueError("its instance_id is that of an earlier one")
            instances[instance.instance_id] = instance
        except ValueError as error:
            name = value.get("instance_id") if isinstance(value, Mapping) else None
            is_named = isinstance(name, str) and _NAME.fullmatch(name)
            unreadable[f"{place} ({name})" if is_named else place] = str(error)
    if not instances:
        raise _unusable(path, ": ".join(next(iter(unreadable.items()), ("it holds no rows",))))
    return list(instances.values()), unreadable


def _rows(path: Path) -> Iterator[tuple[str, Any]]:
    """Each row with its place; those of JSON lines are not parsed yet."""
    rows: Any = None
    try:
        if path.exists() and not path.is_file():
            raise ValueError("it is no regular file")  # a pipe or a device may never end
        data = path.read_bytes()
        if path.suffix == ".parquet":
            rows = _read_parquet(data)
        elif (text := data.decode("utf-8-sig")).lstrip().startswith("["):
            rows = _parsed(text)
    except (OSError, ValueError) as error:
        raise _unusable(path, f"it cannot be read: {getattr(error, 'strerror', None) or error}") from error
    kind, found = ("line", text.split("\n")) if rows is None else ("row", rows)
    for number, row in enumerate(found, start=1):
        if kind == "row" or row.strip():
            yield f"{kind} {number}", row


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it is not JSON: {error}") from error


def _instance(row: Any) -> Instance:
    if not isinstance(row, Mapping):
        raise ValueError("it is not a JSON object")  # noqa: TRY004  its caller names the row
    by_name = {str(key).lower(): one.decode() if isinstance(one, bytes) else one for key, one in row.items()}
    if missing := [key for key in KEYS if key.lower() not in by_name]:
        raise ValueError(f"it has no {missing[0]}")
    for optional in ("test_patch", "problem_statement"):
        by_name[optional] = by_name[optional] or ""
    for tests in ("fail_to_pass", "pass_to_pass"):
        by_name[tests] = _tests(by_name[tests])
    try:
        found = _INSTANCE.validate_python(by_name)
        json.dumps(by_name, ensure_ascii=False, default=str).encode()
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(f"{first['loc'][0]} cannot be used: {first['msg']}") from error
    except UnicodeEncodeError as error:  # JSON may hold half a character
        raise ValueError(f"it cannot be written as UTF-8: {error.reason}") from error
    for name, max_parts in (("instance_id", 1), ("repo", 2), ("base_commit", 1)):
        parts = by_name[name].split("/")
        is_name = all(_NAME.fullmatch(part) and ".." not in part for part in parts)
        if not is_name or len(parts) > max_parts:
            raise ValueError(f"{name} is no name, {by_name[name][:80]!r}")
    return found


def _tests(value: Any) -> Any:
    """A list of tests, or what the text of one says; nothing is an empty one."""
    if not isinstance(value, str):
        return [] if value is None else value
    with suppress(ValueError, RecursionError):
        return json.loads(value)
    with suppress(*UNPARSABLE, TypeError):
        found = ast.literal_eval(value.strip())
        return found if repr(found) == value.strip() or not _NO_COMMA.search(value) else value
    return value


# --- Our own tasks as rows.

Row = dict[str, str | int | None]

OWN_COLUMNS = ("granularity", "removal", "symbol", "path", "num_body_lines", "licence")


def tree_sha256(digests: Mapping[str, str]) -> str:
    """One hash over a tree: sha256 of the lines ``SHA256 PATH`` in the order of the paths."""
    return sha256_of("\n".join(f"{digests[path]} {path}" for path in sorted(digests)).encode())


def iter_rows(store: TaskStore, progress: Progress | None = None) -> Iterator[tuple[Row, Row]]:
    """The public and the secret row of every task, in the order of their ids; ``progress`` is told after each."""
    tasks = store.tasks()
    for done, task in enumerate(tasks, start=1):
        yield rows_of(store, task)
        if progress is not None:
            progress(done, len(tasks), task.task_id)


def rows_of(store: TaskStore, task: Task) -> tuple[Row, Row]:
    """The public and the secret row of one task."""
    base, golden = store.files(task, "rollout"), store.files(task, "golden")
    repository = store.repository(store.record(task.task_id).repository_record)
    paid = {repository.places[test] for test in task.tests.paid}
    others = [test for test in task.tests.pass_to_pass if repository.places[test] not in paid]
    name, _, version = task.repository.partition("==")
    written = written_instruction(store, task.task_id)
    public: Row = {
        "instance_id": task.task_id,
        "repo": name,
        "base_commit": tree_sha256({path: sha256_of(data) for path, data in base.items()}),
        # None where even the shortest text would show code.
        "problem_statement": plain_instruction(store, task) if written is None else written.text,
        "hints_text": "",
        "test_patch": "",
        "FAIL_TO_PASS": _listed(task.tests.shown),
        "PASS_TO_PASS": _listed(others),
        "version": version,
        "created_at": "",  # the same input gives the same bytes: there is no time in a store
        "environment_setup_commit": task.environment,
        **{column: getattr(task, column) for column in OWN_COLUMNS[:-1]},
        "licence": repository.licence.spdx or "",
    }
    (tests, source), (golden_tests, golden_source) = map(_parted, (base, golden))
    secret = {
        **public,
        "patch": make_patch(source, golden_source),
        "test_patch": make_patch(tests, golden_tests),
        "FAIL_TO_PASS": _listed(task.fail_to_pass),
        "PASS_TO_PASS": _listed({*task.tests.pass_to_pass, *store.secret(task.task_id).withheld}),
        "broken_patch": make_patch(golden_source, source),
        "hidden_tests": _listed(task.tests.hidden),
        "paid_tests": _listed(task.tests.paid),
    }
    return public, secret


def _parted(tree: Mapping[str, bytes]) -> tuple[dict[str, bytes], dict[str, bytes]]:
    """The tests of a tree, and everything else."""
    tests = {path: data for path, data in tree.items() if is_test_path(path)}
    return tests, {path: data for path, data in tree.items() if path not in tests}


def _listed(tests: Iterable[str]) -> str:
    return json.dumps(sorted(tests))


def write_instances(
    store: TaskStore, path: Path, *, with_golden: bool, progress: Progress | None = None
) -> int:
    """Write the tasks of a store as JSON lines into one file, whole or not at all; how many.

    ``with_golden`` also patch, test patch and hidden tests, which no policy may see.
    """
    rows = [secret if with_golden else public for public, secret in iter_rows(store, progress)]
    write_atomic(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return len(rows)


def _read_parquet(data: bytes) -> list[dict[str, Any]]:
    """The rows of a Parquet file; a ValueError where it is none or damaged, a MissingError without pyarrow (CR0101)."""
    with needs_extra("parquet", "a Parquet file"):
        import pyarrow as pa
        import pyarrow.parquet as pq
    try:
        # A thread of pyarrow that still gives back a file of Python's when the interpreter ends aborts the process.
        rows: list[dict[str, Any]] = pq.read_table(io.BytesIO(data), use_threads=False).to_pylist()
    except (pa.ArrowException, OSError) as error:
        raise ValueError(str(error).splitlines()[0]) from error
    return rows


def _unusable(path: Path, detail: str) -> InputError:
    return InputError(
        "CR0460",
        f"the file is no task set of the SWE-bench shape: {detail}.",
        where=str(path),
        fix="one JSON object a line with " + ", ".join(KEYS) + ".",
    )
