"""Which groups of tasks are held out: near the wanted share, drawn by the seed alone."""

from __future__ import annotations

import hashlib
import json

from composer_replication.safety.split_entries import SplitRequestError


def choose_heldout(groups: list[list[str]], barred: set[str], fraction: float, seed: int) -> set[str]:
    """Ids to hold out; a group goes as a whole.

    The groups are put in the order of a keyed hash, and the first combination whose
    size is nearest to ``fraction`` of all tasks wins.

    Args:
        groups: sorted ids that must stay together.
        barred: ids that must not be held out; their groups stay in train.
        fraction: wanted share of all tasks.
        seed: key of the order.

    Raises:
        SplitRequestError: no combination comes near enough, with the reason (CR0503).
    """
    num_tasks = sum(map(len, groups))
    allowed = [group for group in groups if barred.isdisjoint(group)]
    num_wanted = fraction * num_tasks
    _require_room(len(groups), num_tasks, sum(map(len, allowed)), len(barred), num_wanted)
    chosen = _nearest(sorted(allowed, key=lambda group: _rank(group, seed)), num_wanted, num_tasks)
    is_too_small = len(chosen) < num_wanted / 2
    is_too_large = len(chosen) > 2 * num_wanted and 2 * len(chosen) > num_tasks
    if is_too_small or is_too_large:
        raise SplitRequestError(
            f"tasks that belong together allow {len(chosen)} of {num_tasks} held out, "
            f"not about {num_wanted:.3g}.",
            where="heldout_fraction",
            fix=f"ask for {len(chosen) / num_tasks:.3f}, or add tasks of other origins.",
        )
    return chosen


def _require_room(
    num_groups: int, num_tasks: int, num_allowed: int, num_barred: int, num_wanted: float
) -> None:
    if num_groups <= 1:
        raise SplitRequestError(
            f"{num_tasks} task(s) that all belong together cannot be parted.",
            where="tasks",
            fix="add tasks of another origin or repository.",
        )
    if num_allowed == 0 or num_allowed <= num_wanted - 1:
        raise SplitRequestError(
            f"only {num_allowed} of {num_tasks} tasks can be held out and about {num_wanted:.3g} were "
            f"asked for: {num_barred} have no hidden tests and stay in train with all that belongs to them.",
            where="heldout_fraction",
            fix="ask for less, or leave out the tasks without hidden tests first.",
        )


def _rank(group: list[str], seed: int) -> str:
    return hashlib.sha256(json.dumps([seed, group]).encode()).hexdigest()


def _nearest(ordered: list[list[str]], num_wanted: float, num_tasks: int) -> set[str]:
    """Subset of groups, neither empty nor everything, whose size is nearest to the wanted one."""
    # size reached -> indices of the groups that reach it first, as a linked list
    reached: dict[int, tuple[int, int]] = {0: (-1, 0)}
    for index, group in enumerate(ordered):
        for size in sorted(reached, reverse=True):
            total = size + len(group)
            if total < num_tasks:
                reached.setdefault(total, (index, size))
        if any(2 * abs(size - num_wanted) <= 1 for size in reached if size):  # no whole number is nearer
            break
    best = min((size for size in reached if size), key=lambda size: (abs(size - num_wanted), size))
    chosen: set[str] = set()
    while best:
        index, best = reached[best]
        chosen.update(ordered[index])
    return chosen
