"""In which order the candidates of a repository are tried."""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Collection, Iterable, Sequence
from itertools import product, zip_longest
from typing import TypeVar

from composer_replication.errors import InputError
from composer_replication.tasks.call_contexts import EVERY_TEST
from composer_replication.tasks.planning.deletion import Deletion
from composer_replication.tasks.repository import PreparedRepository
from composer_replication.tasks.store_records import RepositoryRecord

Item = TypeVar("Item")
_HOW_TO_NAME = "write PATH::NAME, or PATH::NAME@SIZE/WAY: SIZE one of function, class, module, feature, WAY body or whole."


def drawn(repository: PreparedRepository, seed: int) -> tuple[list[Deletion], list[Deletion]]:
    """All candidates in an order drawn by the seed, and apart from them the doubtful ones; sizes and ways take turns.

    Of features those come first that delete functions in several files: nothing smaller asks for that, and they
    are rare.
    """

    def rank(deletion: Deletion) -> tuple[bool, str]:
        is_in_one_file = len({cut.path for cut in deletion.bodies}) < 2
        drawn_place = hashlib.sha256(f"{seed}/{repository.slug}/{deletion.pin}".encode()).hexdigest()
        return deletion.granularity == "feature" and is_in_one_file, drawn_place

    ranked = sorted(repository.deletions, key=rank)
    doubtful = [one for one in ranked if is_doubtful(repository.record, one)]
    pins = {one.pin for one in doubtful}
    return _sizes_in_turn([one for one in ranked if one.pin not in pins]), _sizes_in_turn(doubtful)


def is_doubtful(record: RepositoryRecord, deletion: Deletion) -> bool:
    """Whether what is known of the tests speaks against a candidate, so that it is tried when the others are used up.

    Fewer than two test functions call it: then none can be hidden. Or it is called for all tests, while modules
    are imported or by fixtures of wider scope: without it no test would be left.
    """
    selected = record.tests_of(deletion)
    if selected is None or record.contexts is None:
        return False
    test_functions = {record.places[test] for test in record.green.intersection(selected)}
    is_for_all = not record.contexts.get(EVERY_TEST, frozenset()).isdisjoint(deletion.functions)
    return len(test_functions) < 2 or is_for_all


def _sizes_in_turn(deletions: Sequence[Deletion]) -> list[Deletion]:
    groups: dict[tuple[str, str], list[Deletion]] = {}
    for deletion in deletions:
        groups.setdefault((deletion.granularity, deletion.removal), []).append(deletion)
    return in_turn(groups[key] for key in sorted(groups))


def in_turn(columns: Iterable[Sequence[Item]]) -> list[Item]:
    """The first of each column, then the second of each, and so on."""
    return [item for row in zip_longest(*columns) for item in row if item is not None]


def sizes_of(
    pins: Sequence[str], granularities: Collection[str], removals: Collection[str]
) -> frozenset[tuple[str, str]]:
    """The (size, way) pairs to plan: those that the pins name, or without pins all that are asked for."""
    if not pins:
        return frozenset(product(granularities, removals))
    named = (pin.rpartition("@")[2].split("/") if "@" in pin else ("function", "body") for pin in pins)
    return frozenset((size[0], size[-1]) for size in named)


def pinned(repository: PreparedRepository, pins: Sequence[str]) -> list[Deletion]:
    """The candidates that pins name, in their order.

    Raises:
        InputError: a pin is not in the repository; the nearest is named (CR0402).
    """
    chosen = []
    for pin in pins:
        deletion = repository.by_pin(pin)
        if deletion is None:
            near = difflib.get_close_matches(pin, [d.pin for d in repository.deletions], n=1, cutoff=0.0)
            raise InputError(
                "CR0402",
                f"{repository.record.repository} has no {pin!r} that can be deleted.",
                where=pin,
                fix=f"the nearest is {near[0]}." if near else _HOW_TO_NAME,
            )
        chosen.append(deletion)
    return chosen
