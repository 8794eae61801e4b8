"""How many small faults in the golden code do the tests notice, repository by repository?"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import astuple, dataclass
from operator import add

from composer_replication.tasks.store_records import TaskRecord


@dataclass(frozen=True, slots=True)
class StrengthSum:
    """Sums over tasks of the figures that ``attach_strength`` keeps with each.

    ``mutants`` faults were tried in the golden code of ``tasks`` tasks; the visible tests alone notice
    (kill) ``killed_visible`` of them, the visible and hidden tests with the recorded behaviour
    ``killed_all``. ``not_measured`` tasks have no figures and are in no other sum.
    """

    tasks: int = 0
    not_measured: int = 0
    mutants: int = 0
    killed_visible: int = 0
    killed_all: int = 0

    def __add__(self, other: StrengthSum) -> StrengthSum:
        return StrengthSum(*map(add, astuple(self), astuple(other)))


def sum_strength(records: Iterable[TaskRecord]) -> dict[str, StrengthSum]:
    """The sums of each repository, sorted by its name; repositories without a task are not in it."""
    sums: dict[str, StrengthSum] = {}
    for record in records:
        sums[record.repository] = sums.get(record.repository, StrengthSum()) + _strength_of(record.strength)
    return dict(sorted(sums.items()))


def _strength_of(figures: Mapping[str, int] | None) -> StrengthSum:
    if figures is None:
        return StrengthSum(not_measured=1)
    return StrengthSum(1, 0, figures["mutants"], figures["killed_visible"], figures["killed_all"])
