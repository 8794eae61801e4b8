"""What a split keeps of each task, which tasks overlap, and which belong together.

Only ids, hashes and names are kept: no golden code and no test text outlives the check.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from composer_replication.errors import UsageError
from composer_replication.safety.content_digest import ContentDigest


class SplitRequestError(UsageError, ValueError):
    """The items or the request cannot make a split (CR0503)."""

    def __init__(self, message: str, *, where: str = "", fix: str = "") -> None:
        super().__init__("CR0503", message, where=where, fix=fix)


@dataclass(frozen=True, slots=True, order=True)
class Entry:
    """One task of a split; what is None was not given or not looked at.

    ``repository`` is the name without its version, in one spelling; ``symbol`` is the
    dotted name of the deleted definition.
    """

    task_id: str
    content_sha256: str | None = None
    repository: str | None = None
    symbol: str | None = None


def read_entries(items: Iterable[Any], side: str, digest: ContentDigest | None) -> list[Entry]:
    """Entries in order of their ids; without a digest no content is looked at.

    An item that is listed twice counts once.

    Raises:
        SplitRequestError: an item is neither an id nor has a ``task_id``, its content
            is not text, or one id stands for two different tasks.
    """
    if isinstance(items, str):
        raise SplitRequestError("one text is not a list of tasks.", where=side, fix=f"pass [{items!r}].")
    entries: dict[str, Entry] = {}
    for position, item in enumerate(items):
        entry = _read_entry(item, f"{side}[{position}]", digest)
        if entries.setdefault(entry.task_id, entry) != entry:
            raise SplitRequestError(
                f"two different tasks have the id {entry.task_id!r}.",
                where=side,
                fix="give each task its own id.",
            )
    return [entries[task_id] for task_id in sorted(entries)]


def _read_entry(item: Any, where: str, digest: ContentDigest | None) -> Entry:
    task_id = item if isinstance(item, str) else getattr(item, "task_id", None)
    if not isinstance(task_id, str) or not task_id:
        raise SplitRequestError(
            f"{type(item).__name__} is not a task.",
            where=where,
            fix="pass task ids, or objects with a task_id.",
        )
    if isinstance(item, str):
        return Entry(task_id)
    try:
        content = digest.of_task(item) if digest else None
    except TypeError as error:
        raise SplitRequestError(
            f"the content of {task_id!r} cannot be read: {error}.", where=where
        ) from error
    return Entry(
        task_id,
        content,
        _repository_name(getattr(item, "repository", None)),
        _dotted(getattr(item, "symbol", None)),
    )


def _repository_name(repository: object) -> str | None:
    """``Foo_Bar==1.2`` is ``foo-bar``: another version, or another spelling, is the same."""
    name = str(repository or "").partition("==")[0].strip()
    return re.sub(r"[-_.]+", "-", name).lower() or None


def _dotted(symbol: object) -> str | None:
    return ".".join(part for part in re.split(r"[.:\s]+", str(symbol or "")) if part) or None


def checked_kinds(entries: Iterable[Entry]) -> tuple[str, ...]:
    """The kinds of overlap that could be looked for on every task."""
    listed = list(entries)
    kinds = ["id"]
    if all(entry.content_sha256 for entry in listed):
        kinds.append("content")
    if all(entry.repository and entry.symbol for entry in listed):
        kinds.append("origin")
    return tuple(kinds)


def overlaps(train: list[Entry], heldout: list[Entry]) -> list[tuple[str, str, str]]:
    """``(kind, train id, held-out id)`` of each pair that shares something, sorted.

    A pair is listed once, under its strongest kind: id, then content, then origin.
    """
    found: dict[tuple[str, str], str] = {}
    train_index, heldout_index = _by_key(train), _by_key(heldout)
    for kind in ("id", "content", "origin"):
        for ours, theirs in _meetings(kind, train, heldout_index):
            found.setdefault((ours, theirs), kind)
        for theirs, ours in _meetings(kind, heldout, train_index):
            found.setdefault((ours, theirs), kind)
    rank = {"id": 0, "content": 1, "origin": 2}
    return sorted(((kind, *pair) for pair, kind in found.items()), key=lambda row: (rank[row[0]], row))


def groups_of(entries: list[Entry], *, by_repository: bool) -> list[list[str]]:
    """Ids that must stay on one side: joined by content, by origin, and through others.

    Groups and their members are sorted. With ``by_repository`` the tasks of one
    repository belong together too.
    """
    parent = {entry.task_id: entry.task_id for entry in entries}

    def root(task_id: str) -> str:
        while parent[task_id] != task_id:
            parent[task_id] = parent[parent[task_id]]
            task_id = parent[task_id]
        return task_id

    index = _by_key(entries)
    kinds = ("content", "origin", "repository") if by_repository else ("content", "origin")
    for kind in kinds:
        for one, other in _meetings(kind, entries, index, first_only=True):
            parent[root(one)] = root(other)
    members = defaultdict(list)
    for task_id in parent:
        members[root(task_id)].append(task_id)
    return sorted(sorted(group) for group in members.values())


def _own_key(kind: str, entry: Entry) -> tuple[str, ...] | None:
    """What this entry is found under, None where the kind cannot be looked at."""
    values = {
        "id": (entry.task_id,),
        "content": (entry.content_sha256,),
        "origin": (entry.repository, entry.symbol),
        "repository": (entry.repository,),
    }[kind]
    known = tuple(value for value in values if value)
    return (kind, *known) if len(known) == len(values) else None


def _by_key(entries: list[Entry]) -> dict[tuple[str, ...], list[str]]:
    index: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for entry in entries:
        for kind in ("id", "content", "origin", "repository"):
            key = _own_key(kind, entry)
            if key:
                index[key].append(entry.task_id)
    return dict(index)


def _meetings(
    kind: str, entries: list[Entry], index: dict[tuple[str, ...], list[str]], *, first_only: bool = False
) -> Iterator[tuple[str, str]]:
    """Pairs of an entry and an indexed id under one of the entry's keys.

    For an origin the shorter spellings of a symbol are looked up too: ``semver.Version.minor``
    meets ``Version.minor`` and ``minor``, since a re-export gives one code several names.
    """
    for entry in entries:
        key = _own_key(kind, entry)
        if not key:
            continue
        keys = [key]
        if kind == "origin":
            parts = key[2].split(".")
            keys = [(*key[:2], ".".join(parts[start:])) for start in range(len(parts))]
        for wanted in keys:
            met = index.get(wanted, [])
            yield from ((entry.task_id, other) for other in (met[:1] if first_only else met))
