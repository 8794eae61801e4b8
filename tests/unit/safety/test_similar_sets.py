"""The join finds what comparing all with all finds, no more and no less."""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from composer_replication.safety.split_overlaps import Alike, Member, containment_matches, jaccard_matches

SETS = st.lists(
    st.tuples(st.frozensets(st.integers(0, 12), max_size=9), st.sampled_from([None, "r", "s"])), max_size=9
)
WEIGHT = {element: element % 4 + 1 for element in range(13)}


def members(side: str, sets: list[tuple[frozenset[int], str | None]]) -> list[Member]:
    return [Member(f"{side}{number}", elements, realm) for number, (elements, realm) in enumerate(sets)]


def pairs(matches: Iterable[Alike]) -> set[tuple[str, str]]:
    return {(one, other) for ours, theirs in matches for one in ours for other in theirs}


def is_compared(one: Member, other: Member) -> bool:
    return bool(one.elements and other.elements) and (one.realm is None or one.realm != other.realm)


@pytest.mark.no_cover
@settings(max_examples=50)
@given(left=SETS, right=SETS, percent=st.integers(1, 100))
def test_jaccard_is_that_of_all_pairs(
    left: list[tuple[frozenset[int], str | None]],
    right: list[tuple[frozenset[int], str | None]],
    percent: int,
) -> None:
    ours, theirs = members("l", left), members("r", right)
    expected = {
        (one.owner, other.owner)
        for one in ours
        for other in theirs
        if is_compared(one, other)
        and Fraction(len(one.elements & other.elements), len(one.elements | other.elements))
        >= Fraction(percent, 100)
    }
    assert pairs(jaccard_matches(ours, theirs, percent)) == expected


@settings(max_examples=50)
@given(left=SETS, right=SETS, percent=st.integers(1, 100), least=st.integers(0, 12))
def test_containment_is_that_of_all_pairs(
    left: list[tuple[frozenset[int], str | None]],
    right: list[tuple[frozenset[int], str | None]],
    percent: int,
    least: int,
) -> None:
    ours, theirs = members("l", left), members("r", right)

    def weigh(elements: frozenset[int]) -> int:
        return sum(WEIGHT[element] for element in elements)

    expected = {
        (one.owner, other.owner)
        for one in ours
        for other in theirs
        if is_compared(one, other)
        and weigh(one.elements & other.elements) >= least
        and Fraction(weigh(one.elements & other.elements), min(weigh(one.elements), weigh(other.elements)))
        >= Fraction(percent, 100)
    }
    assert pairs(containment_matches(ours, theirs, percent, WEIGHT, least)) == expected


@pytest.mark.parametrize(("num_common", "expected"), [(6, True), (5, False)])
def test_the_threshold_itself_counts(num_common: int, expected: bool) -> None:
    """6 of 10 are 60%, 5 of 11 are 45%: both sets have 8."""
    one = Member("a", frozenset(range(8)))
    other = Member("b", frozenset(range(8 - num_common, 16 - num_common)))
    assert bool(pairs(jaccard_matches([one], [other], 60))) is expected
