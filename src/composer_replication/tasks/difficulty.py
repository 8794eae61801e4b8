"""How hard are the tasks for a policy? Pass rates that an evaluation measured, kept beside the tasks.

    difficulty/<policy>--<hash>.json    policy and settings; by seed, by task: samples, passes, hidden passes

A measurement is no part of a task: the store's manifest and fingerprint do not know of it. The same policy asked with the
same seed replaces what that seed gave before; another seed gives other samples, so its counts are added. There is no time
stamp in a file: the same evaluation writes the same bytes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import AfterValidator, ConfigDict, Field, StrictStr, TypeAdapter

from composer_replication.errors import InputError
from composer_replication.run_folder import read_json, write_json
from composer_replication.tasks.intake.cache import cache_lock, sha256_of

FOLDER = "difficulty"
Z_95 = 1.959963984540054


def wilson(num_passed: float, num_samples: int) -> tuple[float, float]:
    """Wilson score interval at 95% for a proportion.

    centre = (p + z^2/2n) / (1 + z^2/n), half = z sqrt(p(1-p)/n + z^2/4n^2) / (1 + z^2/n).
    Samples of a fixed list of tasks vary less than this pooled interval says, so it covers at least 95% over fresh samples;
    it says nothing about other tasks. Reference: Wilson, Probable inference, 1927.
    """
    n, p, z = num_samples, num_passed / num_samples, Z_95
    scale = 1 + z * z / n
    centre = (p + z * z / (2 * n)) / scale
    half = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n)) / scale
    # The ends are exactly 0 and 1 there; floating point misses them by one bit.
    low = 0.0 if num_passed == 0 else centre - half
    high = 1.0 if num_passed == num_samples else centre + half
    return low, high


def difference(first: Sequence[float], second: Sequence[float]) -> tuple[float, float]:
    """Interval at 95% of the difference of two means in [0, 1], from Wilson's intervals of both.

    d - sqrt((p1 - l1)^2 + (u2 - p2)^2) to d + sqrt((u1 - p1)^2 + (p2 - l2)^2), with d = p1 - p2. For scores between 0 and 1
    it is too wide rather than too narrow: their variance is at most that of a pass.
    Reference: Newcombe, Interval estimation for the difference between independent proportions, 1998, method 10.
    """
    (low1, high1), (low2, high2) = wilson(sum(first), len(first)), wilson(sum(second), len(second))
    p1, p2 = sum(first) / len(first), sum(second) / len(second)
    return p1 - p2 - math.hypot(p1 - low1, high2 - p2), p1 - p2 + math.hypot(high1 - p1, p2 - low2)


@dataclass(frozen=True, slots=True)
class MeasuredPolicy:
    """Who was asked, and how: another setting is another policy. Weights are known by their sha256, ``name`` is for reading."""

    name: str
    parameter_sha256: str
    temperature: float
    prompt_style: str
    context_lines: int
    max_new_tokens: int

    __pydantic_config__ = ConfigDict(extra="forbid")

    @property
    def file_name(self) -> str:
        """Readable, safe in a file name, and different for different policies."""
        readable = re.sub(r"[^A-Za-z0-9._+-]", "-", self.name).strip(".-")[:80] or "policy"
        return f"{readable}--{sha256_of(repr(sorted(asdict(self).items())).encode())[:12]}.json"


@dataclass(frozen=True, slots=True)
class Difficulty:
    """What one policy does on one task: samples that pass all visible tests, where partial credit is no pass, and samples
    that pass all hidden tests, None for a task without.
    """

    task_id: str
    policy: MeasuredPolicy
    num_samples: int
    num_passed: int
    num_hidden_passed: int | None

    def to_json(self) -> dict[str, Any]:
        """The record with its rates, and Wilson's intervals of them over fresh samples on this task."""
        hidden, num_samples = self.num_hidden_passed, self.num_samples
        return {
            **asdict(self),
            "pass_rate": self.num_passed / num_samples,
            "ci95": list(wilson(self.num_passed, num_samples)),
            "hidden_pass_rate": None if hidden is None else hidden / num_samples,
            "hidden_ci95": None if hidden is None else list(wilson(hidden, num_samples)),
        }


class _Row(NamedTuple):
    """What one evaluation counted on a task; earlier versions wrote a hash of the tests behind it."""

    num_samples: Annotated[int, Field(strict=True, gt=0)]
    num_passed: Annotated[int, Field(strict=True, ge=0)]
    num_hidden_passed: Annotated[int, Field(strict=True, ge=0)] | None
    tests: StrictStr = ""


def _possible(row: _Row) -> _Row:
    if max(row.num_passed, row.num_hidden_passed or 0) > row.num_samples:
        raise ValueError(f"{list(row)} has more passes than samples")
    return row


@dataclass(frozen=True, slots=True)
class _File:
    """What is kept of one policy: by seed and task what was counted."""

    policy: MeasuredPolicy
    evaluations: dict[int, dict[str, Annotated[_Row, AfterValidator(_possible)]]]


_FORM = TypeAdapter(_File)


def record_difficulty(store_root: Path, seed: int, measured: Sequence[Difficulty]) -> Path | None:
    """Write what one evaluation of one policy measured; the file, or None when it measured nothing.

    An InputError where the file that is there is damaged (CR0411).
    """
    rows = {one.task_id: _Row(one.num_samples, one.num_passed, one.num_hidden_passed) for one in measured}
    if not rows:
        return None
    policy = measured[0].policy
    path = store_root / FOLDER / policy.file_name
    with cache_lock(f"difficulty-{sha256_of(str(path.resolve()).encode())[:16]}"):
        kept = _read(path).evaluations if path.is_file() else {}
        kept[seed] = {**kept.get(seed, {}), **rows}
        evaluations = {str(number): by_task for number, by_task in kept.items()}
        write_json(path, {"policy": asdict(policy), "evaluations": evaluations})
    return path


def read_difficulty(store_root: Path) -> dict[str, tuple[Difficulty, ...]]:
    """By task id, what each policy does on it, seeds added up, in the order of files."""
    found: dict[str, tuple[Difficulty, ...]] = {}
    for path in sorted((store_root / FOLDER).glob("*.json")):
        measured = _read(path)
        by_task: dict[str, list[_Row]] = {}
        for task_id, row in (item for rows in measured.evaluations.values() for item in rows.items()):
            by_task.setdefault(task_id, []).append(row)
        for task_id, rows in sorted(by_task.items()):
            samples, passed = sum(row.num_samples for row in rows), sum(row.num_passed for row in rows)
            hidden = [row.num_hidden_passed for row in rows if row.num_hidden_passed is not None]
            num_hidden = sum(hidden) if len(hidden) == len(rows) else None
            total = Difficulty(task_id, measured.policy, samples, passed, num_hidden)
            found[task_id] = (*found.get(task_id, ()), total)
    return found


def _read(path: Path) -> _File:
    try:
        return _FORM.validate_python(read_json(path))
    except (InputError, ValueError, OSError) as error:
        problem = str(getattr(error, "message", error))
        raise InputError(
            "CR0411",
            f"the measured pass rates cannot be read: {' '.join(problem.split()).rstrip('.')}.",
            where=str(path),
            fix="delete that file, then composer-rl eval MODEL --tasks DIR --update-difficulty",
        ) from error
