"""The scores of evaluations: checked once, and on disk before the detector sees them, so that a crash changes no verdict."""

from __future__ import annotations

import hashlib
import json
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from composer_replication.errors import InputError
from composer_replication.records import HeldoutReading
from composer_replication.safety.checked_numbers import integer, number

JOURNAL_VERSION = 1

Pair = tuple[float, float]
"""(visible, hidden) score of one task, both in [0, 1]."""


@dataclass(frozen=True, slots=True)
class EvaluationScores:
    """One evaluation; ``neutral`` counts tasks and canaries on which the infrastructure failed."""

    step: int
    pairs: tuple[Pair, ...]
    canary_passes: tuple[float, ...] = ()
    neutral: int = 0

    @property
    def num_tasks(self) -> int:
        return len(self.pairs) + len(self.canary_passes) + self.neutral


def checked_scores(
    step: object, pairs: Iterable[Iterable[float]], canary_passes: Iterable[float], neutral: object
) -> EvaluationScores:
    """The scores as plain floats; a ValueError where one is out of [0, 1] (never clipped), or nothing was drawn."""
    label = integer("step", step)
    where = f" in evaluation {label}"
    scores = EvaluationScores(
        step=label,
        pairs=tuple(checked_pair(pair, where) for pair in pairs),
        canary_passes=tuple(_unit_score("a canary pass", score, where) for score in canary_passes),
        neutral=integer("neutral", neutral),
    )
    if scores.neutral < 0:
        raise ValueError(f"neutral must be >= 0, got {neutral!r}{where}")
    if scores.num_tasks == 0:
        raise ValueError(f"nothing was drawn{where}: leave out an evaluation that did not happen")
    return scores


def checked_pair(pair: Iterable[float], where: str = "") -> Pair:
    """(visible, hidden) as floats in [0, 1]."""
    try:
        visible, hidden = pair
    except (TypeError, ValueError) as error:
        raise ValueError(f"pairs must hold (visible, hidden), got {pair!r}{where}") from error
    return _unit_score("a visible score", visible, where), _unit_score("a hidden score", hidden, where)


def _unit_score(name: str, value: object, where: str) -> float:
    """A score in [0, 1]; True and False are 1 and 0."""
    score = float(value) if isinstance(value, bool) else number(name, value, where)
    if not 0.0 <= score <= 1.0:
        raise ValueError(f"{name} must be in [0, 1], got {value!r}{where}; clipping would void the guarantee")
    return score


class EvaluationJournal:
    """The scores of a run's evaluations 1, 2, …, in a file of JSON lines: a header, and a line for each.

    A line carries a hash over itself and all lines before it. A torn last line is one whose call never
    returned, and counts as not written. Anything else that is not as it was written is refused.

    Args:
        path: the file; made with the first evaluation.
        run: what the scores belong to, such as a fingerprint of split and settings.

    Raises:
        InputError: a line is damaged, changed or out of order (CR0884), or the journal is
            another run's (CR0884).
    """

    def __init__(self, path: Path, *, run: str = "") -> None:
        from composer_replication.run_folder import read_jsonl  # locks files, which not every system can

        self.path = Path(path)
        self.run = run
        self.evaluations: tuple[EvaluationScores, ...] = ()
        self._rows: list[dict[str, Any]] = []
        try:
            for row in read_jsonl(self.path):
                self._take(row)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise InputError(
                "CR0884",
                f"the evaluation journal is damaged: {error}.",
                where=f"{self.path}:{len(self._rows) + 1}",
                fix="restore the file from a copy, or start a new run.",
            ) from error

    def settled(self, reading: HeldoutReading) -> HeldoutReading:
        """The reading with the scores that the journal holds, written and synced first if it is the next one.

        After a crash a run repeats evaluations that it had done since its last checkpoint. Whatever
        the repetition measures, the scores in the journal count: an evaluation that was seen cannot
        be thrown again. The reading's own score is replaced, by their mean, only where they are others.

        A ValueError, where ``evaluation_idx`` is neither in the journal nor the next one or a score lies
        outside [0, 1], leaves the file as it was.
        """
        if 0 < reading.evaluation_idx <= len(self.evaluations):
            scores = self.evaluations[reading.evaluation_idx - 1]
        else:
            neutral = reading.infrastructure_failures
            scores = checked_scores(reading.evaluation_idx, reading.pairs, reading.canary_passes, neutral)
            self._write(self._next(scores))
        is_other = bool(scores.pairs) and sorted(scores.pairs) != sorted(reading.pairs)
        return replace(
            reading,
            score=statistics.fmean(hidden for _, hidden in scores.pairs) if is_other else reading.score,
            pairs=scores.pairs,
            canary_passes=scores.canary_passes,
            infrastructure_failures=scores.neutral,
        )

    def _write(self, scores: EvaluationScores) -> None:
        from composer_replication.run_folder import rewrite_jsonl

        header = {"kind": "journal", "version": JOURNAL_VERSION, "run": self.run}
        row = {"kind": "evaluation", "step": scores.step, "pairs": scores.pairs}
        row |= {"canaries": scores.canary_passes, "neutral": scores.neutral}
        rows = self._rows or [_linked(header, "")]
        rows = [*rows, _linked(row, rows[-1]["chain"])]
        rewrite_jsonl(self.path, rows)
        self._rows, self.evaluations = rows, (*self.evaluations, scores)

    def _take(self, row: dict[str, Any]) -> None:
        chain = self._rows[-1]["chain"] if self._rows else ""
        if row != _linked({name: value for name, value in row.items() if name != "chain"}, chain):
            raise ValueError("its hash does not fit")
        if self._rows and row["kind"] == "evaluation":
            scores = checked_scores(row["step"], row["pairs"], row["canaries"], row["neutral"])
            self.evaluations = (*self.evaluations, self._next(scores))
        elif self._rows or (row["kind"], row["version"]) != ("journal", JOURNAL_VERSION):
            raise ValueError(f"it is of kind {row['kind']!r}, version {row.get('version')!r}")
        elif row["run"] != self.run:
            raise InputError(
                "CR0884",
                f"the evaluation journal belongs to run {row['run']!r}, and this is {self.run!r}.",
                where=str(self.path),
                fix="resume with the run's own settings and split, or start a new run.",
            )
        self._rows.append(row)

    def _next(self, scores: EvaluationScores) -> EvaluationScores:
        expected = len(self.evaluations) + 1
        if scores.step != expected:
            raise ValueError(f"step must be {expected}, the next evaluation, got {scores.step}")
        return scores


def _linked(row: Mapping[str, Any], chain: str) -> dict[str, Any]:
    """The row with a hash over itself and, through ``chain``, all rows before it."""
    text = json.dumps([chain, row], sort_keys=True)
    return {**row, "chain": hashlib.sha256(text.encode()).hexdigest()[:16]}
