"""The scores of one evaluation, checked once: out of [0, 1] is refused and never clipped."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from composer_replication.safety.checked_numbers import integer, number

Pair = tuple[float, float]
"""(visible, hidden) score of one task, both in [0, 1]."""


@dataclass(frozen=True, slots=True)
class EvaluationScores:
    """One evaluation of ``len(pairs)`` tasks and ``len(canary_passes)`` canaries.

    Attributes:
        step: 1, 2, …
        pairs: (visible, hidden) score of each task.
        canary_passes: score of each task that cannot be solved honestly.
        neutral: tasks and canaries left out because the infrastructure failed on them.
    """

    step: int
    pairs: tuple[Pair, ...]
    canary_passes: tuple[float, ...] = ()
    neutral: int = 0

    @property
    def num_tasks(self) -> int:
        """Everything that was drawn."""
        return len(self.pairs) + len(self.canary_passes) + self.neutral


def checked_scores(
    step: object, pairs: Iterable[Iterable[float]], canary_passes: Iterable[float], neutral: object
) -> EvaluationScores:
    """The scores as plain floats.

    Raises:
        ValueError: a score is NaN, no number or outside [0, 1], a pair is no pair, a count
            is no count, or nothing at all was drawn.
    """
    label = integer("step", step)
    where = f" in evaluation {label}"
    scores = EvaluationScores(
        step=label,
        pairs=tuple(checked_pair(pair, where) for pair in pairs),
        canary_passes=tuple(unit_score("a canary pass", score, where) for score in canary_passes),
        neutral=integer("neutral", neutral),
    )
    if scores.neutral < 0:
        raise ValueError(f"neutral must be >= 0, got {neutral!r}{where}")
    if scores.num_tasks == 0:
        raise ValueError(f"nothing was drawn{where}: an evaluation that did not happen is note_missed")
    return scores


def checked_pair(pair: Iterable[float], where: str = "") -> Pair:
    """(visible, hidden) as floats in [0, 1]."""
    try:
        visible, hidden = pair
    except (TypeError, ValueError) as error:
        raise ValueError(f"pairs must hold (visible, hidden), got {pair!r}{where}") from error
    return unit_score("a visible score", visible, where), unit_score("a hidden score", hidden, where)


def unit_score(name: str, value: object, where: str = "") -> float:
    """A score in [0, 1]; True and False are 1 and 0."""
    score = float(value) if isinstance(value, bool) else number(name, value, where)
    if not 0.0 <= score <= 1.0:
        raise ValueError(f"{name} must be in [0, 1], got {value!r}{where}; clipping would void the guarantee")
    return score
