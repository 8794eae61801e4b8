"""The records of a task store and their JSON form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import PurePosixPath
from typing import Any

from composer_replication.records import Hole, Task, TestSplit
from composer_replication.tasks.test_functions import Place


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
    not be collected from the start; ``called`` are the functions (file, first line) called
    while tests ran, or None where nobody asked.
    """

    repository: str
    source_sha256: str
    environment: str
    files: Mapping[str, str]
    places: Mapping[str, Place]
    num_collected: int
    broken_files: tuple[str, ...]
    called: tuple[tuple[str, int], ...] | None
    flaky: tuple[str, ...] | None

    @cached_property
    def green(self) -> frozenset[str]:
        return frozenset(self.places)

    def to_json(self) -> dict[str, Any]:
        return {
            "repository": self.repository,
            "source_sha256": self.source_sha256,
            "environment": self.environment,
            "files": dict(self.files),
            "places": {test: list(place) for test, place in self.places.items()},
            "num_collected": self.num_collected,
            "broken_files": list(self.broken_files),
            "called": None if self.called is None else [list(function) for function in self.called],
            "flaky": None if self.flaky is None else list(self.flaky),
        }

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
            called=None if value["called"] is None else tuple((path, line) for path, line in value["called"]),
            flaky=_names(value.get("flaky")),
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
    """What may be known of a task; its hidden tests and golden body are in ``SecretRecord``.

    ``visible_files`` are the test files without their hidden functions, by hash.
    """

    task_id: str
    repository: str
    repository_record: str
    symbol: str
    granularity: str
    removal: str
    hole: Hole
    broken_sha256: str
    visible: tuple[str, ...]
    visible_files: Mapping[str, str]
    environment: str
    num_body_lines: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> TaskRecord:
        fields = {name: value[name] for name in cls.__slots__}
        for path in (value["hole"]["path"], *value["visible_files"]):
            inner_path(path)
        return cls(**{**fields, "hole": Hole(**value["hole"]), "visible": tuple(value["visible"])})

    def to_task(self, secret: SecretRecord, repository: RepositoryRecord) -> Task:
        out = {*self.visible, *secret.hidden, *secret.withheld}
        return Task(
            task_id=self.task_id,
            repository=self.repository,
            symbol=self.symbol,
            granularity=self.granularity,
            removal=self.removal,
            hole=self.hole,
            tests=TestSplit(self.visible, secret.hidden, tuple(sorted(repository.green - out))),
            environment=self.environment,
            num_body_lines=self.num_body_lines,
        )


@dataclass(frozen=True, slots=True)
class SecretRecord:
    """Golden body, hidden tests, and the tests that left the visible files with them (``withheld``)."""

    task_id: str
    golden_body: str
    hidden: tuple[str, ...]
    withheld: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> SecretRecord:
        return cls(value["task_id"], value["golden_body"], tuple(value["hidden"]), tuple(value["withheld"]))
