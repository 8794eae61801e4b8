"""Which tasks overlap, and which belong together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from composer_replication.safety.similar_sets import (
    Alike,
    Member,
    containment_matches,
    jaccard_matches,
)
from composer_replication.safety.split_entries import Entry, ReadTask
from composer_replication.safety.task_sketch import (
    MIN_SAME_CODE_WORDS,
    MIN_SHARED_WORDS,
    NEAR_DUPLICATE_PERCENT,
    SHARED_WORDS_PERCENT,
)

KINDS = ("id", "content", "near-duplicate", "origin")
"""From the plainest to the one that needs most explaining."""

Key = tuple[str | int, ...]


def overlaps(train: Sequence[ReadTask], heldout: Sequence[ReadTask]) -> list[tuple[str, str, str]]:
    """``(kind, train id, held-out id)`` of each pair that shares something, by kind, then by ids.

    A pair of one id, or of the same content, is listed under that alone; another one
    under each kind that holds.
    """
    found: dict[tuple[str, str], set[str]] = defaultdict(set)
    for kind in KINDS:
        for ours, theirs in _alike(kind, train, heldout):
            for pair in ((one, other) for one in ours for other in theirs):
                if not {"id", "content"} & found[pair]:
                    found[pair].add(kind)
    rows = [(kind, *pair) for pair, kinds in found.items() for kind in kinds]
    return sorted(rows, key=lambda row: (KINDS.index(row[0]), row))


def groups_of(tasks: Sequence[ReadTask], *, by_repository: bool) -> list[list[str]]:
    """Ids that must stay on one side: joined by content, near-duplicate or origin, also through others.

    Groups and their members are sorted. With ``by_repository`` the tasks of one
    repository belong together too.
    """
    parent = {task.entry.task_id: task.entry.task_id for task in tasks}

    def root(task_id: str) -> str:
        while parent[task_id] != task_id:
            parent[task_id] = parent[parent[task_id]]
            task_id = parent[task_id]
        return task_id

    for kind in (*KINDS[1:], "repository") if by_repository else KINDS[1:]:
        for ours, theirs in _alike(kind, tasks, tasks):
            for task_id in (*ours, *theirs):
                parent[root(task_id)] = root(ours[0])
    members = defaultdict(list)
    for task_id in parent:
        members[root(task_id)].append(task_id)
    return sorted(sorted(group) for group in members.values())


def _alike(kind: str, left: Sequence[ReadTask], right: Sequence[ReadTask]) -> Iterator[Alike]:
    """Ids from left and right that are alike in this way."""
    if kind == "near-duplicate":
        yield from jaccard_matches(_golden_shapes(left), _golden_shapes(right), NEAR_DUPLICATE_PERCENT)
        yield from jaccard_matches(_test_shapes(left), _test_shapes(right), NEAR_DUPLICATE_PERCENT)
        return
    yield from _same_key(kind, left, right)
    if kind != "origin":
        return
    for theirs, ours in _same_key(kind, right, left):  # the shorter spelling may be on either side
        yield ours, theirs
    yield from _same_key("code", left, right)
    weight = {line: words for task in (*left, *right) for line, words in task.sketch.golden_lines.items()}
    yield from containment_matches(
        _golden_lines(left), _golden_lines(right), SHARED_WORDS_PERCENT, weight, MIN_SHARED_WORDS
    )


def _golden_shapes(tasks: Sequence[ReadTask]) -> list[Member]:
    return [Member(task.entry.task_id, task.sketch.golden_shapes) for task in tasks]


def _test_shapes(tasks: Sequence[ReadTask]) -> list[Member]:
    """Functions of one repository share the tests that call them all, and are no copies for that."""
    return [Member(task.entry.task_id, task.sketch.test_shapes, task.entry.repository) for task in tasks]


def _golden_lines(tasks: Sequence[ReadTask]) -> list[Member]:
    return [Member(task.entry.task_id, frozenset(task.sketch.golden_lines)) for task in tasks]


def _same_key(kind: str, left: Sequence[ReadTask], right: Sequence[ReadTask]) -> Iterator[Alike]:
    index: dict[Key, list[str]] = defaultdict(list)
    for task in right:
        for key in _own_keys(kind, task):
            index[key].append(task.entry.task_id)
    asking: dict[Key, list[str]] = defaultdict(list)
    for task in left:
        for key in _own_keys(kind, task):
            for wanted in _spellings(key) if kind == "origin" else (key,):
                asking[wanted].append(task.entry.task_id)
    for key, owners in asking.items():
        if key in index:
            yield owners, index[key]


def _own_keys(kind: str, task: ReadTask) -> list[Key]:
    """What this task is found under; none where the kind cannot be looked at."""
    if kind == "code":
        return _code_keys(task)
    entry: Entry = task.entry
    values = {
        "id": (entry.task_id,),
        "content": (entry.content_sha256,),
        "origin": (entry.repository, entry.symbol),
        "repository": (entry.repository,),
    }[kind]
    known = tuple(value for value in values if value)
    return [known] if len(known) == len(values) else []


def _code_keys(task: ReadTask) -> list[Key]:
    """The golden as a whole: with its name however short it is, and alone when it says enough."""
    code, symbol = task.sketch.golden_code, task.entry.symbol
    if code is None:
        return []
    keys: list[Key] = [(code, symbol)] if symbol else []
    if task.sketch.num_golden_words >= MIN_SAME_CODE_WORDS:
        keys.append((code,))
    return keys


def _spellings(key: Key) -> list[Key]:
    """``Version.minor`` is looked up as ``minor`` too: a re-export gives one code several names."""
    repository, symbol = key
    parts = str(symbol).split(".")
    return [(repository, ".".join(parts[start:])) for start in range(len(parts))]
