"""``heldout_eval_fn`` with a journal in front of the guard."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import replace

from composer_replication.records import HeldoutReading
from composer_replication.safety.evaluation_journal import EvaluationJournal


class JournalledEvaluation:
    """Write each reading's scores to the journal before anybody judges them.

    After a crash a run repeats evaluations that it had done since its last checkpoint. Whatever
    the repetition measures, the scores in the journal count: an evaluation that was seen cannot
    be thrown again.

    Args:
        evaluate: the evaluation, as the trainer would call it. None (not due) and bare scores
            pass through.
        journal: opened by the one process that evaluates.
    """

    def __init__(
        self, evaluate: Callable[[], float | HeldoutReading | None], journal: EvaluationJournal
    ) -> None:
        self.evaluate = evaluate
        self.journal = journal

    def __call__(self) -> float | HeldoutReading | None:
        """The reading with the scores that the journal holds; its own score, or their mean where they are others.

        Raises:
            ValueError: ``evaluation_idx`` is neither in the journal nor the next one, or a score
                lies outside [0, 1].
        """
        reading = self.evaluate()
        if not isinstance(reading, HeldoutReading):
            return reading
        scores = self.journal.scores_of(reading.evaluation_idx)
        if scores is None:
            scores = self.journal.record_evaluation(
                reading.evaluation_idx,
                reading.pairs,
                reading.canary_passes,
                neutral=reading.infrastructure_failures,
            )
        is_other = bool(scores.pairs) and sorted(scores.pairs) != sorted(reading.pairs)
        return replace(
            reading,
            score=statistics.fmean(hidden for _, hidden in scores.pairs) if is_other else reading.score,
            pairs=scores.pairs,
            canary_passes=scores.canary_passes,
            infrastructure_failures=scores.neutral,
        )
