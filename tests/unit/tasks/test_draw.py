"""The order in which candidates are tried."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest

from composer_replication.errors import InputError
from composer_replication.tasks.build import drawn, pinned
from composer_replication.tasks.intake.licences import Licence
from composer_replication.tasks.planning.candidates import find_deletions
from composer_replication.tasks.repository import PreparedRepository
from composer_replication.tasks.store_records import RepositoryRecord

# Five features in one file each, and one whose helper lies in another file: ``total``.
ONE_FILE = "".join(
    f"def {name}(x):\n    return _{name}(x) + 1\n\n\ndef _{name}(x):\n    return x * 2\n\n\n"
    for name in ("first", "second", "third", "fourth", "fifth")
)
FILES = {
    "pkg/__init__.py": b"",
    "pkg/alone.py": ONE_FILE.encode(),
    "pkg/sums.py": b"from pkg.parts import plus\n\n\ndef total(xs):\n    return plus(xs, 0)\n",
    "pkg/parts.py": b"def plus(xs, start):\n    return sum(xs, start)\n",
}


RECORD = RepositoryRecord.from_json(
    {
        "repository": "pkg==1", "source_sha256": "", "environment": "", "files": {}, "places": {}, "num_collected": 0,
        "broken_files": [], "flaky": [], "licence": Licence("MIT", "LICENSE", "file", is_copyleft=False, note="").to_json(), "commit": "",
    }
)  # fmt: skip


def prepared(record: RepositoryRecord = RECORD) -> PreparedRepository:
    return PreparedRepository("pkg-1", record, cast("Any", None), tuple(find_deletions(FILES)))


def order(seed: int) -> list[tuple[str, str, str]]:
    return [(one.granularity, one.removal, one.symbol) for one in drawn(prepared(), seed)]


def test_features_over_several_files_come_first_whatever_the_seed() -> None:
    for seed in range(8):
        found = order(seed)
        for removal in ("body", "whole"):
            features = [symbol for size, way, symbol in found if (size, way) == ("feature", removal)]
            assert features[0] == "total"
            assert len(features) == 6


def test_the_seed_draws_the_rest() -> None:
    assert order(0) == order(0)
    assert len({tuple(order(seed)) for seed in range(6)}) == 6
    assert sorted(order(0)) == sorted(order(1))


def test_a_pin_that_is_not_there_names_the_nearest() -> None:
    assert [one.symbol for one in pinned(prepared(), 2 * ["pkg/sums.py::total"])] == ["total"]
    with pytest.raises(InputError, match="CR0402") as caught:
        pinned(prepared(), ["pkg/sums.py::totl"])
    assert "pkg/sums.py::total" in caught.value.fix
    with pytest.raises(InputError, match="CR0402") as caught:
        pinned(replace(prepared(), deletions=()), ["pkg/sums.py::total@huge/whole"])
    assert "SIZE one of function, class, module, feature" in caught.value.fix
