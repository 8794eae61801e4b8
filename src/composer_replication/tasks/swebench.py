"""Task sets in the shape of SWE-bench: JSON lines, read and written; one JSON list or Parquet, read.

We write a public row of each task, and one with the patch and the hidden tests. ``base_commit`` is not of git: it is the
sha256 of the base tree, which is what a rollout sees (hidden and paid test functions are not in it). In the secret row
``patch`` puts the code back, ``test_patch`` the tests as they were; both together give the original tree. The public row
has no ``patch``, an empty ``test_patch``, and knows of the tests that are shown alone. Lists of tests are JSON strings, as
in the published data sets.

A foreign row goes through the gates that our own tasks pass. Its original tree is base + test patch + patch; its broken
tree is the original with the source edits of the patch undone, which is a deletion of a feature like any other. Files that
no task tree holds (documentation, version control) are left out of the patches. A file that the patch deletes stays
deleted: an edit of the original cannot bring it back.
"""

from __future__ import annotations

import ast
import io
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from itertools import product
from pathlib import Path, PurePosixPath
from typing import Any

from pydantic import TypeAdapter, ValidationError

from composer_replication.errors import InputError, UsageError, needs_extra
from composer_replication.records import Edit, Task
from composer_replication.run_folder import write_atomic
from composer_replication.tasks.build import BuildSummary, Progress, check_arguments, open_build, summary_of
from composer_replication.tasks.candidate import Candidate, Decision, Instance, Settings
from composer_replication.tasks.gates import GateFailed
from composer_replication.tasks.instructions import plain_instruction, written_instruction
from composer_replication.tasks.intake.archives import ARCHIVE_SUFFIXES
from composer_replication.tasks.intake.cache import sha256_of
from composer_replication.tasks.intake.sources import RepositorySource, open_source
from composer_replication.tasks.intake.tree_rules import (
    TreeRules,
    is_metadata_path,
    is_subject_path,
    is_test_path,
)
from composer_replication.tasks.leaks.shown_code import shows_any, spans_of
from composer_replication.tasks.patches import apply_patch, make_patch
from composer_replication.tasks.planning.body_cuts import BodyCut, Deletion, find_body_cuts
from composer_replication.tasks.planning.edits import line_edits, tree_sha256
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
    json.dumps(by_name, ensure_ascii=False, default=str).encode()  # JSON may hold half a character
    try:
        found = _INSTANCE.validate_python(by_name)
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(f"{first['loc'][0]} cannot be used: {first['msg']}") from error
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


# --- Foreign rows through our gates.

_FULL_ID = re.compile(r"[0-9a-f]{40}")
_SECTION = re.compile(r"^(?=diff --git )", re.MULTILINE)
_HEADER = re.compile(r'diff --git "?[a-z]/(.*?)"? "?[a-z]/(.*?)"?\r?$', re.MULTILINE)


def import_swebench(
    path: Path,
    out: Path,
    *,
    repositories: Path | None = None,
    jobs: int = 2,
    backend: str | None = None,
    progress: Progress | None = None,
    **settings: Any,
) -> BuildSummary:
    """Build a task store from a SWE-bench set.

    Rows with the same original tree share one repository, ``NAME==VERSION+HASH``. A row that cannot be used is counted
    under its reason, and the others go on: ``unreadable-row``, ``no-repository``, ``patch-fails``, ``nothing-to-undo``,
    ``not-text``, ``no-function``, ``statement-shows-code``, then the gates, where ``other-tests-fail`` says that the stated
    tests are not what was found, and the search for a truth beyond the reward (``no-truth``; see ``truth``).

    ``path`` is the set (``read_instances``), ``out`` the folder of the store, ``repositories`` one with the repositories
    (``base_source``). The other arguments and the errors are those of ``build_tasks``, but ``with_truth`` is usual here;
    without it rows are kept whose tests cannot be parted and whose functions cannot be recorded. CR0460 is a set of which
    no row can be read, or a folder that does not exist.
    """
    if repositories is not None and not repositories.is_dir():
        fix = "give an existing folder, or leave --repositories out to fetch them by git."
        problem = "the folder of repositories does not exist."
        raise UsageError("CR0460", problem, where=str(repositories), fix=fix)
    asked = Settings(**{"with_truth": True, **settings})
    check_arguments([str(path)], asked, jobs)
    instances, unreadable = read_instances(path)
    opened, proposals, refused = _propose_all(instances, repositories, progress)
    refused += [_refusal(row, "", row[0], "unreadable-row", row[1]) for row in unreadable.items()]
    # A pin that names no size: nothing is planned.
    asked = replace(asked, symbols={source.source: ("given@",) for source in opened})
    with open_build(out, asked, jobs=jobs, backend=backend, progress=progress) as run:
        ready = run.prepare_all(opened)
        run.decide(
            [
                Candidate(ready[source], deletion, asked, True, instance)
                for source, instance, deletion in proposals
                if source in ready
            ]
        )
        for source, instance, deletion in proposals:
            if source not in ready:
                digest, error = instance.digest(deletion), run.unusable[source]
                why = {"reason": error.reason, "detail": error.detail}
                run.decisions.append(Decision(digest, source, instance.instance_id, **why))
        run.decisions += refused
        run.unusable.clear()  # each of its candidates counts, not the repository
    return summary_of(run)


def _propose_all(
    instances: Sequence[Instance], repositories: Path | None, progress: Progress | None
) -> tuple[list[RepositorySource], list[tuple[str, Instance, Deletion]], list[Decision]]:
    """The repositories of all rows, each once; the candidates, with the names of their repositories; the rows that are none."""
    opened: dict[str, RepositorySource] = {}
    proposals: list[tuple[str, Instance, Deletion]] = []
    refused: list[Decision] = []
    pool: dict[bytes, bytes] = {}  # commits differ in few files: what two of them have is kept once
    # Rows of one commit stand together; a thousand trees need not stay in memory.
    open_once = lru_cache(maxsize=1)(open_source)
    for done, instance in enumerate(instances):
        if progress is not None:
            progress(done, len(instances), "rows")  # each may be fetched
        try:
            source, deletion = propose(instance, open_once(base_source(instance, repositories)), pool)
            proposals.append((opened.setdefault(source.source, source).source, instance, deletion))
        except (InputError, GateFailed) as error:
            reason = error.reason if isinstance(error, GateFailed) else "no-repository"
            detail = error.detail if isinstance(error, GateFailed) else str(error)
            refused.append(_refusal(instance, instance.repo, instance.instance_id, reason, detail))
    return list(opened.values()), proposals, refused


def _refusal(row: object, repository: str, name: str, reason: str, detail: str) -> Decision:
    return Decision(sha256_of(f"{row}".encode())[:32], repository, name, reason=reason, detail=detail)


def base_source(instance: Instance, folder: Path | None) -> str:
    """A SOURCE for the base tree of a row.

    In ``folder`` the row ``OWNER/NAME`` at ``COMMIT`` may be ``OWNER__NAME`` or ``NAME``, with or without ``-COMMIT``: a
    folder, an archive, or a clone with that commit in it. A name with the commit wins. A folder of anything else is taken
    at its word: what shows that it is the base is that the patches apply and the tests behave as stated.
    """
    commit, name = instance.base_commit, instance.repo.rpartition("/")[2]
    stems = dict.fromkeys([instance.repo.replace("/", "__"), name])
    parts = product((f"-{commit}", f"-{commit[:12]}", ""), stems, ("", ".git", *ARCHIVE_SUFFIXES))
    for path in (folder / f"{stem}{one}{suffix}" for one, stem, suffix in parts) if folder else ():
        if _FULL_ID.fullmatch(commit) and any((path / name).exists() for name in (".git", "HEAD")):
            return f"git+file://{path.resolve()}@{commit}"
        if path.is_dir() or path.is_file():
            return str(path)
    if instance.repo.count("/") == 1 and _FULL_ID.fullmatch(commit):
        return f"git+https://github.com/{instance.repo}@{commit}"  # where the published sets come from
    raise InputError(
        "CR0460",
        f"there is no repository for {instance.repo} at {commit[:12]}.",
        where=str(folder or ""),
        fix=f"--repositories FOLDER with {name}-{commit[:12]}, a folder, an archive or a clone.",
    )


def propose(
    instance: Instance, base: RepositorySource, pool: dict[bytes, bytes]
) -> tuple[RepositorySource, Deletion]:
    """The original repository of a row, and the deletion that it asks for; ``pool`` has every file that was seen."""
    broken = _patched(instance, "test_patch", {**base.metadata, **base.files})
    golden = _patched(instance, "patch", broken)
    source = _golden_source(
        base, {name: pool.setdefault(data, data) for name, data in sorted(golden.items())}
    )
    deletion = make_deletion(source.files, broken)
    texts = {name: source.files[name].decode() for name in deletion.changes.source_files}
    spans = spans_of(texts, deletion.changes, [cut.edit for cut in deletion.bodies])
    if shows_any(instance.problem_statement, spans):
        raise GateFailed("statement-shows-code", "the problem statement holds the code that is asked for")
    return source, deletion


def _patched(instance: Instance, name: str, files: dict[str, bytes]) -> dict[str, bytes]:
    """A tree, sources and metadata together, with one of the row's patches in it."""
    patch: str = getattr(instance, name)
    try:
        return apply_patch(files, _inside(patch and patch.removesuffix("\n") + "\n", files))
    except InputError as error:
        raise GateFailed("patch-fails", f"{instance.instance_id}, {name}: {error.message}") from error


def _inside(patch: str, files: Mapping[str, bytes]) -> str:
    """The parts of a patch whose files belong to a task tree; a part of another form stays, for git to say so."""
    parts = [(part, _HEADER.match(part)) for part in _SECTION.split(patch)]
    names = {name for _, found in parts if found for name in found.groups()}
    rules = TreeRules(names.union(files))
    kept = {one for one in names if rules.belongs(path := PurePosixPath(one)) or is_metadata_path(path)}
    return "".join(part for part, found in parts if not found or not kept.isdisjoint(found.groups()))


def _golden_source(base: RepositorySource, golden: Mapping[str, bytes]) -> RepositorySource:
    """The original tree as a repository of its own, named by its content."""
    rules = TreeRules(golden)
    files = {
        name: data
        for name, data in golden.items()
        if rules.belongs(PurePosixPath(name)) or (name in base.files and name not in base.metadata)
    }
    metadata = {name: data for name, data in golden.items() if is_metadata_path(PurePosixPath(name))}
    digest = tree_sha256({name: sha256_of(data) for name, data in {**metadata, **files}.items()})
    version = f"{base.version or '0'}+{digest[:8]}"
    return replace(
        base, source=f"{base.name}=={version}", version=version, sha256=digest, files=files, metadata=metadata
    )


def make_deletion(original: Mapping[str, bytes], broken: Mapping[str, bytes]) -> Deletion:
    """The deletion that leads from an original tree back to a broken one, tests left as they are.

    It is called after the first function that it touches.
    """
    changed = [name for name, data in sorted(original.items()) if data != broken.get(name)]
    sources = [name for name in changed if not is_test_path(name)]
    removed = tuple(name for name in sources if name not in broken)
    edits: list[Edit] = []
    bodies: list[BodyCut] = []
    for name in sources:
        try:
            text = original[name].decode()
            own = () if name in removed else line_edits(name, text, broken[name].decode())
        except UnicodeDecodeError as error:
            raise GateFailed("not-text", f"{name} is not UTF-8") from error
        edits += own
        spans = [(0, len(text))] if name in removed else [(edit.start, edit.end) for edit in own]
        cuts = find_body_cuts(name, text) if is_subject_path(name) else []
        # A line that the broken tree adds counts too.
        bodies += [cut for cut in cuts if any(start <= cut.end and end >= cut.start for start, end in spans)]
    if not sources:
        raise GateFailed("nothing-to-undo", "the patch changes no source file of the tree")
    if not bodies:
        raise GateFailed("no-function", "the patch changes no function, so no stub can be told from it")
    first = bodies[0]
    return Deletion(first.path, first.symbol, "feature", "whole", tuple(edits), tuple(bodies), removed)
