"""The records of a task store and their JSON form."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass, fields
from functools import cache, cached_property
from pathlib import PurePosixPath
from typing import Annotated, Any, Self

from pydantic import AfterValidator, PlainSerializer, PlainValidator, TypeAdapter, ValidationError

from composer_replication.records import Edit, Task, TestSplit
from composer_replication.tasks.intake.cache import sha256_of
from composer_replication.tasks.intake.licences import Licence
from composer_replication.tasks.intake.tree_rules import folders_of_tests, is_test_path
from composer_replication.tasks.planning.body_cuts import Deletion
from composer_replication.tasks.planning.edits import Changes, holes_of
from composer_replication.tasks.test_functions import Place

SUITE_SECONDS = 30.0
"""Of the first run of a whole suite by the clock, where a build is not told otherwise; what it does not reach is left out."""

RUN_FACTOR = 6
"""A later run of the same tests has so many times as long."""


def inner_path(text: str) -> str:
    """A path of a record; ValueError where it would leave the tree: a store may come from anywhere."""
    path = PurePosixPath(text)
    if path.is_absolute() or ".." in path.parts or not path.parts or "\0" in text:
        raise ValueError(f"the path {text[:80]!r} leaves the tree")
    return text


InnerPath = Annotated[str, AfterValidator(inner_path)]


def _edit(row: Any) -> Edit:
    path, start, end, text = row
    return Edit(inner_path(path), start, end, text)


EditRow = Annotated[Edit, PlainValidator(_edit), PlainSerializer(lambda edit: list(astuple(edit)))]


_form: Callable[[Any], TypeAdapter[Any]] = cache(TypeAdapter)


class StoredRecord:
    """A dataclass with a form in JSON.

    A field with a default is younger than others, and left out where it has that value: records of earlier versions keep
    their hashes.
    """

    def to_json(self) -> dict[str, Any]:
        value: dict[str, Any] = _form(type(self)).dump_python(self, by_alias=True)
        usual = {one.name for one in fields(self) if one.default == getattr(self, one.name)}  # type: ignore[arg-type]
        return {name: each for name, each in value.items() if name not in usual}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """The record; ValueError where something is missing, or is not what ``to_json`` writes."""
        try:
            record: Self = _form(cls).validate_python(value)
        except ValidationError as error:
            first = error.errors()[0]
            raise ValueError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from error
        return record


@dataclass(frozen=True)
class RepositoryRecord(StoredRecord):
    """One repository: its files by hash, and what its whole suite did in the baseline runs.

    ``places`` maps each test that was green in every run to its function; ``num_collected`` counts all; ``flaky``
    are those that were green in some runs only, sorted; ``broken_files`` could not be collected from the start; ``called``
    are the functions (file, first line) that were called in it; none where nobody knows, None where nobody asked. ``commit`` is that of a git address, else empty. ``source`` is
    ``sdist:NAME==VERSION`` or the git address that it was fetched from, without the name of a user; empty for a folder
    or an archive. ``suite_seconds`` is how long a whole suite may run; records say it where it is not ``SUITE_SECONDS``.
    ``left_out`` are tests and files that end a run of the whole suite or were not reached in that time.
    """

    repository: str
    source_sha256: str
    environment: str
    files: Mapping[InnerPath, str]
    places: Mapping[str, Place]
    num_collected: int
    broken_files: tuple[str, ...]
    flaky: tuple[str, ...]
    licence: Licence
    commit: str
    called: Annotated[
        frozenset[tuple[str, int]] | None, PlainSerializer(lambda own: None if own is None else sorted(own))
    ] = None
    suite_seconds: float = SUITE_SECONDS
    source: str = ""
    left_out: tuple[str, ...] = ()

    @cached_property
    def green(self) -> frozenset[str]:
        return frozenset(self.places)

    @cached_property
    def folders_of_tests(self) -> frozenset[str]:
        """Folders that are there for tests whatever they are called: with all that lies in them they are the store's."""
        tests = {path for path, _, _ in self.places.values() if is_test_path(path)}  # no doctests
        return folders_of_tests(tests, self.files)

    def helps_tests(self, path: str) -> bool:
        """Whether a file lies in one of ``folders_of_tests``."""
        return not self.folders_of_tests.isdisjoint(map(str, PurePosixPath(path).parents))

    @cached_property
    def baseline_sha256(self) -> str:
        """A hash of the source, the environment and the tests that are green in it."""
        parts = [self.source_sha256, self.environment, sorted(self.places)]
        return sha256_of(json.dumps(parts).encode())

    def called_share(self, deletion: Deletion) -> float:
        """Which share of the lines that a deletion takes out of functions is in such that a test calls; 1 where nobody knows."""
        if not self.called or not deletion.bodies:
            return 1.0
        called = [cut for cut in deletion.bodies if (cut.path, cut.first_line) in self.called]
        num_called, num_lines = (sum(cut.num_body_lines for cut in own) for own in (called, deletion.bodies))
        return num_called / num_lines


@dataclass(frozen=True)
class TaskRecord(StoredRecord):
    """What may be known of a task; its hidden tests are in ``SecretRecord``.

    All edits are of the repository's original files, which the store keeps once for all
    tasks. ``edits`` and ``removed_files`` take the code out; ``stub_edits`` are the cuts of
    every function inside when they are not the edits themselves; ``test_edits`` let imports
    of deleted names fail in tests; ``visible_edits`` do that and take the
    hidden test functions out. ``statement`` is what a foreign task set asks for in its own
    words, ``instance_id`` its name there; both are empty for tasks of our own. ``paid_tests`` are those of ``visible``
    that the reward counts and no rollout shows, ``shown_edits`` are ``visible_edits`` that take these out, too; empty and
    None where all are shown. ``strength`` is how many small faults in the golden code were tried (``mutants``) and noticed
    by the visible tests (``killed_visible``) and by all (``killed_all``), or None where nobody measured.
    """

    task_id: str
    repository: str
    repository_record: str
    path: InnerPath
    symbol: str
    granularity: str
    removal: str
    edits: tuple[EditRow, ...]
    stub_edits: tuple[EditRow, ...]
    removed_files: tuple[InnerPath, ...]
    test_edits: tuple[EditRow, ...]
    visible_edits: tuple[EditRow, ...]
    visible: tuple[str, ...]
    environment: str
    num_body_lines: int
    statement: str
    instance_id: str
    strength: Mapping[str, int] | None
    paid_tests: tuple[str, ...] = ()
    shown_edits: tuple[EditRow, ...] | None = None

    @property
    def changes(self) -> Changes:
        return Changes(self.edits, self.removed_files, self.test_edits, self.visible_edits, self.shown_edits)

    def __post_init__(self) -> None:
        if not set(self.paid_tests) <= set(self.visible):
            raise ValueError("a paid test is not among the visible ones")
        figures = {"mutants", "killed_visible", "killed_all"}
        if self.strength is not None and not figures <= self.strength.keys():
            raise ValueError("a figure of strength is missing")

    def to_task(self, secret: SecretRecord, repository: RepositoryRecord) -> Task:
        out = {*self.visible, *secret.hidden, *secret.withheld}
        return Task(
            task_id=self.task_id,
            repository=self.repository,
            symbol=self.symbol,
            granularity=self.granularity,
            removal=self.removal,
            path=self.path,
            holes=holes_of(self.edits),
            tests=TestSplit(
                self.visible, secret.hidden, tuple(sorted(repository.green - out)), self.paid_tests
            ),
            environment=self.environment,
            num_body_lines=self.num_body_lines,
            removed_files=self.removed_files,
            num_twins=len(secret.twins or ()),
        )


@dataclass(frozen=True)
class SecretRecord(StoredRecord):
    """The hidden tests, and the tests that left the visible files with them (``withheld``).

    ``twins`` are the hashes of the recorded behaviour of its functions, by pin, or None where
    nobody looked; see ``twin``.
    """

    task_id: str
    hidden: tuple[str, ...]
    withheld: tuple[str, ...]
    twins: Mapping[str, str] | None
