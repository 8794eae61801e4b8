"""Which tests of a repository are used, and why the others are not: kept beside the tasks, for a person to read.

    baselines/<slug>.json    how many tests were skipped and never green, the first reason, files that were left out

What a test says when it fails may hold an address or a time, so it is no part of a record: manifest and fingerprint
do not know of it. Where the file is missing or of other bytes, as in a store of an earlier version, the
counts follow from the record, and the reason is unknown.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from composer_replication.errors import InputError
from composer_replication.run_folder import read_json, write_json
from composer_replication.tasks.store_records import RepositoryRecord
from composer_replication.tasks.test_run import TestReport

FOLDER = "baselines"
_REASON_CHARACTERS = 300
_NUM_NAMED = 20
_PYTEST_MARK = re.compile(r"^E(?=\s)")
"""Before the lines of an error."""


@dataclass(frozen=True, slots=True)
class UnusedTests:
    """The tests of a repository by what became of them.

    ``used`` are green in every run, ``flaky`` in some. ``never_green`` are the others but for skipped ones; None where
    nobody noted how many were skipped. ``broken_files`` could not be collected. ``first_reason`` is ``PLACE: TEXT``
    of the first of these two, else empty; ``left_out`` files that are not in the tree although a test might
    miss them.
    """

    collected: int
    used: int
    flaky: int
    never_green: int | None
    broken_files: int
    first_reason: str = ""
    left_out: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "left_out": list(self.left_out)}


def note_unused(
    store_root: Path, slug: str, record: RepositoryRecord, runs: Sequence[TestReport], left_out: Sequence[str]
) -> None:
    """Keep what the baseline runs say of the tests that are not used; the first run has their reasons."""
    first = runs[0]
    passed = frozenset[str]().union(*(run.passed for run in runs))
    silent = {test for test, outcome in first.outcomes.items() if outcome == "skipped"} - first.why.keys()
    red = [test for test in first.outcomes if test not in passed | silent]
    said = {**first.collect_errors, **{test: first.why.get(test, "") for test in red}}
    texts = (f"{place}: {_PYTEST_MARK.sub('', text).strip()}" for place, text in said.items())
    reason = next(texts, "").removesuffix(": ")
    write_json(
        store_root / FOLDER / f"{slug}.json",
        {
            "baseline_sha256": record.baseline_sha256,
            "never_green": len(red),
            "first_reason": reason[:_REASON_CHARACTERS],
            "left_out": list(left_out[:_NUM_NAMED]),
        },
    )


def read_unused(store_root: Path, slug: str, record: RepositoryRecord) -> UnusedTests:
    """What became of a repository's tests; without reasons where none are kept that fit the record."""
    counts = UnusedTests(
        collected=record.num_collected,
        used=len(record.green),
        flaky=len(record.flaky or ()),
        never_green=None,
        broken_files=len(record.broken_files),
    )
    if counts.collected == counts.used + counts.flaky and not counts.broken_files:
        return replace(counts, never_green=0)
    try:
        kept = read_json(store_root / FOLDER / f"{slug}.json")
        if kept["baseline_sha256"] != record.baseline_sha256:
            return counts
        num_red, reason, left_out = int(kept["never_green"]), kept["first_reason"], kept["left_out"]
        return replace(
            counts, never_green=num_red, first_reason=str(reason), left_out=tuple(map(str, left_out))
        )
    except (InputError, KeyError, TypeError, ValueError):
        return counts  # it explains and decides nothing: a reader without it goes on


def sweep_unused(store_root: Path, slugs: Collection[str]) -> None:
    """Remove what is kept of repositories that the store does not hold."""
    for path in (store_root / FOLDER).glob("*.json"):
        if path.stem not in slugs:
            path.unlink()
