"""Sums of killed mutants, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from composer_replication.errors import InputError
from composer_replication.tasks.store import TaskStore
from composer_replication.tasks.strength_sums import StrengthSum, sum_strength


def figures(mutants: int, visible: int, both: int) -> dict[str, int]:
    return {"mutants": mutants, "killed_visible": visible, "killed_all": both}


def test_sums_by_repository(sized_store: TaskStore) -> None:
    record = sized_store.record("t-class-body")
    records = [
        replace(record, repository="b==1", strength=figures(6, 3, 5)),
        replace(record, repository="a==1", strength=None),
        replace(record, repository="b==1", strength=figures(4, 4, 4)),
        replace(record, repository="b==1", strength=None),
        replace(record, repository="c==1", strength=figures(0, 0, 0)),
    ]
    sums = sum_strength(records)
    assert list(sums.items()) == [
        ("a==1", StrengthSum(not_measured=1)),
        ("b==1", StrengthSum(2, 1, 10, 7, 9)),
        ("c==1", StrengthSum(1, 0, 0, 0, 0)),
    ]
    assert sum(sums.values(), StrengthSum()) == StrengthSum(3, 2, 10, 7, 9)
    assert sum_strength([]) == {}


def test_a_strength_is_kept_and_read_back(sized_store: TaskStore) -> None:
    record = replace(sized_store.record("t-class-body"), strength=figures(6, 2, 3))
    sized_store.put_task(record, sized_store.secret("t-class-body"))
    assert TaskStore.open(sized_store.root).record("t-class-body") == record


@pytest.mark.parametrize("strength", [{"mutants": 1, "killed_all": 1}, figures(1, "x", 1), 3, [1, 2, 3]])  # type: ignore[arg-type]
def test_a_strength_that_is_none_is_damage(sized_store: TaskStore, strength: object) -> None:
    record = sized_store.record("t-class-body")
    value = {**record.to_json(), "strength": strength}
    sized_store.put_record("tasks/t-class-body.json", value)
    with pytest.raises(InputError, match="CR0411"):
        sized_store.record("t-class-body")
