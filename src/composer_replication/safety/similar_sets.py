"""Which sets are alike, exactly and without comparing all with all.

Prefix filtering: let the elements of a set be in the order of how many sets have them,
rarest first. Another set that shares at least a part ``p`` of its weight shares one of its
first elements, namely of those that are left when the most frequent ones, together below
``p``, are taken away. So an index over the elements finds every pair by its rare elements,
and each pair found is then compared in full: no pair is missed and none is estimated.
(Chaudhuri, Ganti, Kaushik, A primitive operator for similarity joins, 2006.)
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

Elements = frozenset[int]
Alike = tuple[list[str], list[str]]
"""Each owner of the first list is like each of the second."""


@dataclass(frozen=True, slots=True)
class Member:
    """One set and its owner; sets of one realm are not compared with each other (None: no realm)."""

    owner: str
    elements: Elements
    realm: str | None = None


@dataclass(frozen=True, slots=True)
class _Distinct:
    """One set of one realm, with all its owners."""

    elements: Elements
    realm: str | None
    owners: list[str]


def jaccard_matches(left: Sequence[Member], right: Sequence[Member], percent: int) -> Iterator[Alike]:
    """Owners from left and right whose sets have a Jaccard index of at least ``percent`` / 100.

    Empty sets are like nothing. The order means nothing. Where ``right`` is ``left``, each
    match comes both ways, and each owner is like itself.
    """

    def is_near(one: Elements, other: Elements) -> bool:
        small, large = sorted((len(one), len(other)))
        if 100 * small < percent * large:
            return False
        common = len(one & other)
        return 100 * common >= percent * (small + large - common)

    yield from _matches(_distinct(left), _distinct(right), percent, lambda _: 1, is_near)


def containment_matches(
    left: Sequence[Member], right: Sequence[Member], percent: int, weight: Mapping[int, int], least: int
) -> Iterator[Alike]:
    """Owners whose sets share at least ``percent`` of the weight of the lighter set, and ``least``.

    Otherwise as ``jaccard_matches``; a match may come twice.
    """

    def total(elements: Elements) -> int:
        return sum(weight[element] for element in elements)

    def shares_enough(one: Elements, other: Elements) -> bool:
        common = total(one & other)
        return common >= least and 100 * common >= percent * min(total(one), total(other))

    ours, theirs = _distinct(left), _distinct(right)
    yield from _matches(ours, theirs, percent, weight.__getitem__, shares_enough)
    for others, owners in _matches(theirs, ours, percent, weight.__getitem__, shares_enough):
        yield owners, others


def _distinct(members: Sequence[Member]) -> list[_Distinct]:
    found: dict[tuple[Elements, str | None], list[str]] = defaultdict(list)
    for member in members:
        if member.elements:
            found[member.elements, member.realm].append(member.owner)
    return [_Distinct(elements, realm, owners) for (elements, realm), owners in found.items()]


def _matches(
    ours: list[_Distinct],
    theirs: list[_Distinct],
    percent: int,
    weight: Callable[[int], int],
    agree: Callable[[Elements, Elements], bool],
) -> Iterator[Alike]:
    """Those that agree, out of those that share ``percent`` of the weight of our set."""
    frequency = Counter(element for each in (*ours, *theirs) for element in each.elements)
    index: dict[int, dict[str | None, list[int]]] = defaultdict(lambda: defaultdict(list))
    for number, each in enumerate(theirs):
        for element in each.elements:
            index[element][each.realm].append(number)
    for one in ours:
        candidates: set[int] = set()
        for element in _prefix(one.elements, percent, weight, frequency):
            for realm, numbers in index.get(element, {}).items():
                if realm is None or realm != one.realm:
                    candidates.update(numbers)
        for number in candidates:
            if agree(one.elements, theirs[number].elements):
                yield one.owners, theirs[number].owners


def _prefix(
    elements: Elements, percent: int, weight: Callable[[int], int], frequency: Mapping[int, int]
) -> list[int]:
    """The rarest elements, without a tail of frequent ones that weighs less than ``percent`` of all."""
    ordered = sorted(elements, key=lambda element: (frequency[element], element))
    left_out, total = 0, sum(map(weight, elements))
    while 100 * (left_out + weight(ordered[-1])) < percent * total:
        left_out += weight(ordered.pop())
    return ordered
