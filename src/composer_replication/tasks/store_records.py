"""The records of a task store and their JSON form."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, astuple, dataclass
from dataclasses import fields as fields_of
from functools import cached_property
from pathlib import PurePosixPath
from typing import Any

from composer_replication.records import Edit, Task, TestSplit
from composer_replication.tasks.call_contexts import UNKNOWN, Contexts, decode, encode, select_tests
from composer_replication.tasks.intake.cache import sha256_of
from composer_replication.tasks.intake.licences import Licence
from composer_replication.tasks.intake.tree_rules import folders_of_tests, is_test_path
from composer_replication.tasks.planning.deletion import Deletion
from composer_replication.tasks.planning.edits import holes_of
from composer_replication.tasks.test_functions import Place
from composer_replication.tasks.views import Changes

SUITE_SECONDS = 30.0
"""Of the first run of a whole suite by the clock, where a build is not told otherwise; what it does not reach is left out."""

RUN_FACTOR = 6
"""A later run of the same tests has so many times as long."""


def inner_path(text: str) -> str:
    """A path of a record, refused when it would leave the tree: a store may come from anywhere.

    Raises:
        ValueError: absolute, climbing, or empty.
    """
    path = PurePosixPath(text)
    if path.is_absolute() or ".." in path.parts or not path.parts or "\0" in text:
        raise ValueError(f"the path {text[:80]!r} leaves the tree")
    return text


@dataclass(frozen=True)
class RepositoryRecord:
    """One repository: its files by hash, and what its whole suite did in the baseline runs.

    ``places`` maps each test that was green in every run to its function; ``num_collected``
    counts all; ``flaky`` are those that were green in some runs and not in others, sorted, or
    None in a store of an earlier version, which did not look for them; ``broken_files`` could
    not be collected from the start; ``contexts`` are the functions (file, first line) that each
    test calls, or None where nobody asked. ``commit`` is that of a git address, else empty.
    ``source`` is ``sdist:NAME==VERSION`` or the git address that it was fetched from, without the name of
    a user; empty for a folder or an archive, and in stores of an earlier version.
    ``suite_seconds`` is how long a whole suite may run; records say it where it is not ``SUITE_SECONDS``.
    ``left_out`` are tests and files that end a run of the whole suite or were not reached in that time.
    """

    repository: str
    source_sha256: str
    environment: str
    files: Mapping[str, str]
    places: Mapping[str, Place]
    num_collected: int
    broken_files: tuple[str, ...]
    contexts: Contexts | None
    flaky: tuple[str, ...] | None
    licence: Licence
    commit: str = ""
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

    def tests_of(self, deletion: Deletion) -> tuple[str, ...] | None:
        """The tests that call something of what a deletion takes out; None where nobody knows."""
        if self.contexts is None or not deletion.functions:
            return None
        return select_tests(self.contexts, deletion.functions)

    def is_mostly_uncalled(self, deletion: Deletion) -> bool:
        """Whether no test calls more than half of the lines that a deletion takes out of functions."""
        if self.contexts is None or UNKNOWN in (called := frozenset().union(*self.contexts.values())):
            return False
        lines = [((cut.path, cut.first_line) in called, cut.num_body_lines) for cut in deletion.bodies]
        return sum(number for _, number in lines) > 2 * sum(
            number for is_called, number in lines if is_called
        )

    def to_json(self) -> dict[str, Any]:
        value: dict[str, Any] = {
            **{one.name: getattr(self, one.name) for one in fields_of(self)},
            "files": dict(self.files),
            "places": dict(self.places),
            "contexts": None if self.contexts is None else encode(self.contexts),
            "licence": self.licence.to_json(),
        }
        # Earlier versions had no word for these, and their records keep their hashes.
        for name, usual in (("source", ""), ("suite_seconds", SUITE_SECONDS), ("left_out", ())):
            if value[name] == usual:
                del value[name]
        return value

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> RepositoryRecord:
        return cls(
            repository=value["repository"],
            source_sha256=value["source_sha256"],
            environment=value["environment"],
            files={inner_path(path): digest for path, digest in value["files"].items()},
            places={test: (path, line, name) for test, (path, line, name) in value["places"].items()},
            num_collected=value["num_collected"],
            broken_files=tuple(value["broken_files"]),
            contexts=None if value["contexts"] is None else decode(value["contexts"]),
            flaky=_names(value.get("flaky")),
            licence=Licence.from_json(value["licence"]),
            commit=value["commit"],
            suite_seconds=float(value.get("suite_seconds", SUITE_SECONDS)),
            source=str(value.get("source", "")),
            left_out=_names(value.get("left_out")) or (),
        )


def _names(value: object) -> tuple[str, ...] | None:
    """Node ids of a record, or None where it has none.

    Raises:
        TypeError: something else.
    """
    if value is None:
        return None
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise TypeError("flaky is not a list of test names")
    return tuple(value)


@dataclass(frozen=True, slots=True)
class TaskRecord:
    """What may be known of a task; its hidden tests are in ``SecretRecord``.

    All edits are of the repository's original files, which the store keeps once for all
    tasks. ``edits`` and ``removed_files`` take the code out; ``stub_edits`` are the cuts of
    every function inside when they are not the edits themselves; ``test_edits`` move imports
    of deleted names into the tests that use them; ``visible_edits`` do that and take the
    hidden test functions out. ``statement`` is what a foreign task set asks for in its own
    words, ``instance_id`` its name there; both are empty for tasks of our own. ``paid_tests`` are those of ``visible``
    that the reward counts and no rollout shows, ``shown_edits`` are ``visible_edits`` that take these out, too; empty and
    None where all are shown, as in stores of an earlier version. ``strength`` is
    how many small faults in the golden code were tried (``mutants``) and noticed by the visible
    tests (``killed_visible``) and by all (``killed_all``), or None where nobody measured.
    """

    task_id: str
    repository: str
    repository_record: str
    path: str
    symbol: str
    granularity: str
    removal: str
    edits: tuple[Edit, ...]
    stub_edits: tuple[Edit, ...]
    removed_files: tuple[str, ...]
    test_edits: tuple[Edit, ...]
    visible_edits: tuple[Edit, ...]
    visible: tuple[str, ...]
    environment: str
    num_body_lines: int
    statement: str = ""
    instance_id: str = ""
    strength: Mapping[str, int] | None = None
    paid_tests: tuple[str, ...] = ()
    shown_edits: tuple[Edit, ...] | None = None

    @property
    def changes(self) -> Changes:
        return Changes(self.edits, self.removed_files, self.test_edits, self.visible_edits, self.shown_edits)

    def to_json(self) -> dict[str, Any]:
        fields = {name: getattr(self, name) for name in self.__slots__}
        if self.shown_edits is None:
            del fields["paid_tests"], fields["shown_edits"]
        edits = {name: [list(astuple(edit)) for edit in fields[name]] for name in _EDITS if name in fields}
        return {**fields, **edits}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> TaskRecord:
        fields = {"statement": "", "instance_id": "", "strength": None, "shown_edits": None, **value}
        fields["paid_tests"] = tuple(value.get("paid_tests", ()))
        fields = {name: fields[name] for name in cls.__slots__}
        for name in _EDITS:
            if fields[name] is not None:
                fields[name] = tuple(
                    Edit(inner_path(path), start, end, text) for path, start, end, text in fields[name]
                )
        if not set(fields["paid_tests"]) <= set(value["visible"]):
            raise ValueError("a paid test is not among the visible ones")
        fields["strength"] = _figures(fields["strength"])
        fields["removed_files"] = tuple(map(inner_path, value["removed_files"]))
        return cls(**{**fields, "path": inner_path(value["path"]), "visible": tuple(value["visible"])})

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


def _figures(value: Any) -> Mapping[str, int] | None:
    """The strength of a record, checked: a store may come from anywhere.

    Raises:
        KeyError: a figure is missing.
        TypeError: something else.
    """
    if value is not None and not all(isinstance(value[name], int) for name in _STRENGTH):
        raise TypeError("a strength is made of counts")
    return None if value is None else dict(value)


_STRENGTH = ("mutants", "killed_visible", "killed_all")
_EDITS = ("edits", "stub_edits", "test_edits", "visible_edits", "shown_edits")


@dataclass(frozen=True, slots=True)
class SecretRecord:
    """The hidden tests, and the tests that left the visible files with them (``withheld``).

    ``twins`` are the hashes of the recorded behaviour of its functions, by pin, or None where
    nobody looked; see ``twin``.
    """

    task_id: str
    hidden: tuple[str, ...]
    withheld: tuple[str, ...]
    twins: Mapping[str, str] | None = None

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "twins": None if self.twins is None else dict(sorted(self.twins.items()))}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> SecretRecord:
        return cls(
            value["task_id"],
            tuple(value["hidden"]),
            tuple(value["withheld"]),
            None if value["twins"] is None else dict(value["twins"]),
        )
