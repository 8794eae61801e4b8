"""Which tasks overlap and which belong together: a join of sets, and groups of what it joins.

The join is exact, and compares not all with all, by prefix filtering: let the elements of a set be in
the order of how many sets have them, rarest first. Another set that shares at least a part ``p`` of its
weight shares one of its first elements, namely of those that are left when the most frequent ones,
together below ``p``, are taken away. So an index over the elements finds every pair by its rare
elements, and each pair found is compared in full.
(Chaudhuri, Ganti, Kaushik, A primitive operator for similarity joins, 2006.)
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from composer_replication.safety.split_tasks import Entry, ReadTask

NEAR_DUPLICATE_PERCENT = 60
MIN_SHARED_WORDS = 8
SHARED_WORDS_PERCENT = 50
MIN_SAME_CODE_WORDS = 5
KINDS = ("id", "content", "near-duplicate", "origin")  # the plainest first

Elements = frozenset[int]
Key = tuple[str | int | None, ...]
Alike = tuple[list[str], list[str]]
"""Each owner of the first list is like each of the second."""


def checked_kinds(entries: Sequence[Entry]) -> tuple[str, ...]:
    """The kinds of overlap that could be looked for on every task."""
    given = {
        "id": True,
        "content": all(entry.content_sha256 for entry in entries),
        "near-duplicate": all(entry.has_golden for entry in entries),
        "origin": all(entry.repository and entry.symbol for entry in entries),
    }
    return tuple(kind for kind in KINDS if given[kind])


def overlaps(train: Sequence[ReadTask], heldout: Sequence[ReadTask]) -> list[tuple[str, str, str]]:
    """``(kind, train id, held-out id)`` of each pair that shares something, by kind, then by ids.

    A pair of one id, or of the same content, is listed under that alone.
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
    """Sorted groups of ids that must stay on one side: joined by anything but the id, also through others."""
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
        for part in ("golden_shapes", "test_shapes"):
            yield from jaccard_matches(_sets(left, part), _sets(right, part), NEAR_DUPLICATE_PERCENT)
    elif kind == "origin":
        yield from _same_key(left, right, _symbols, _symbol)
        yield from _same_key(left, right, _symbol, _symbols)
        yield from _same_key(left, right, _code, _code)
        weight = {line: words for task in (*left, *right) for line, words in task.golden_lines.items()}
        lines = _sets(left, "golden_lines"), _sets(right, "golden_lines")
        yield from containment_matches(*lines, SHARED_WORDS_PERCENT, weight, MIN_SHARED_WORDS)
    else:
        own = _OWN[kind]
        yield from _same_key(left, right, own, own)


def _sets(tasks: Sequence[ReadTask], part: str) -> list[Member]:
    """Functions of one repository share the tests that call them all, and are no copies for that."""
    is_test = part == "test_shapes"
    return [
        Member(task.entry.task_id, frozenset(getattr(task, part)), task.entry.repository if is_test else None)
        for task in tasks
    ]


def _same_key(
    left: Sequence[ReadTask],
    right: Sequence[ReadTask],
    left_keys: Callable[[ReadTask], list[Key]],
    right_keys: Callable[[ReadTask], list[Key]],
) -> Iterator[Alike]:
    """Ids with a key in common; a key that has an empty part is none."""
    indexes: list[dict[Key, list[str]]] = []
    for side, keys_of in ((left, left_keys), (right, right_keys)):
        indexes.append(defaultdict(list))
        for task in side:
            for key in keys_of(task):
                if all(key):
                    indexes[-1][key].append(task.entry.task_id)
    for key in indexes[0].keys() & indexes[1].keys():
        yield indexes[0][key], indexes[1][key]


_OWN: dict[str, Callable[[ReadTask], list[Key]]] = {
    "id": lambda task: [(task.entry.task_id,)],
    "content": lambda task: [(task.entry.content_sha256,)],
    "repository": lambda task: [(task.entry.repository,)],
}


def _symbol(task: ReadTask) -> list[Key]:
    return [(task.entry.repository, task.entry.symbol)]


def _symbols(task: ReadTask) -> list[Key]:
    """``Version.minor`` is looked up as ``minor`` too: a re-export gives one code several names."""
    parts = (task.entry.symbol or "").split(".")
    return [(task.entry.repository, ".".join(parts[start:])) for start in range(len(parts))]


def _code(task: ReadTask) -> list[Key]:
    """The golden as a whole: with its name however short it is, and alone when it says enough."""
    is_enough = sum(task.golden_lines.values()) >= MIN_SAME_CODE_WORDS
    return [(task.golden_code, task.entry.symbol), *([(task.golden_code,)] if is_enough else [])]


class Member(NamedTuple):
    """One set and its owner; sets of one realm are not compared with each other (None: no realm)."""

    owner: str
    elements: Elements
    realm: str | None = None


def jaccard_matches(left: Sequence[Member], right: Sequence[Member], percent: int) -> Iterator[Alike]:
    """Owners from left and right whose sets have a Jaccard index of at least ``percent`` / 100.

    Empty sets are like nothing. Where ``right`` is ``left``, each match comes both ways, and each
    owner is like itself.
    """
    return _matches(
        left, right, percent, len, lambda common, one, other: 100 * common >= percent * (one + other - common)
    )


def containment_matches(
    left: Sequence[Member], right: Sequence[Member], percent: int, weight: Mapping[int, int], least: int
) -> Iterator[Alike]:
    """Owners whose sets share at least ``percent`` of the weight of the lighter set, and ``least``.

    Otherwise as ``jaccard_matches``; a match may come twice.
    """

    def size(elements: Collection[int]) -> int:
        return sum(weight[element] for element in elements)

    def agree(common: int, one: int, other: int) -> bool:
        return common >= least and 100 * common >= percent * min(one, other)

    yield from _matches(left, right, percent, size, agree)
    for theirs, ours in _matches(right, left, percent, size, agree):
        yield ours, theirs


def _matches(
    left: Sequence[Member],
    right: Sequence[Member],
    percent: int,
    size: Callable[[Collection[int]], int],
    agree: Callable[[int, int, int], bool],
) -> Iterator[Alike]:
    """Those whose sizes in common and each agree, out of those that share ``percent`` of a set on the left."""
    ours, theirs = _owners_by_set(left), _owners_by_set(right)
    frequency = Counter(element for elements, _ in (*ours, *theirs) for element in elements)
    index: dict[int, dict[str | None, list[Elements]]] = defaultdict(lambda: defaultdict(list))
    for elements, realm in theirs:
        for element in elements:
            index[element][realm].append(elements)
    for (elements, own_realm), owners in ours.items():
        ordered = sorted(elements, key=lambda element: (frequency[element], element))
        left_out, total = 0, size(elements)
        while 100 * (left_out + size(ordered[-1:])) < percent * total:
            left_out += size((ordered.pop(),))
        candidates = {
            (other, realm)
            for element in ordered
            for realm, sets in index.get(element, {}).items()
            if realm is None or realm != own_realm
            for other in sets
        }
        for other, realm in candidates:
            if agree(size(elements & other), total, size(other)):
                yield owners, theirs[other, realm]


def _owners_by_set(members: Sequence[Member]) -> dict[tuple[Elements, str | None], list[str]]:
    """Distinct sets by realm, so that what many tasks share is compared once."""
    found: dict[tuple[Elements, str | None], list[str]] = defaultdict(list)
    for member in members:
        if member.elements:
            found[member.elements, member.realm].append(member.owner)
    return found
