"""Is the reward honest?

Three answers, all with the standard library alone, so that any trainer can embed them:

- ``HeldOutGuard`` watches a run: it halts when the reward that is trained on rises
  while a score that is never trained on does not.
- ``EvidenceGuard`` watches it with a guarantee: it halts a clean run with probability
  at most ``alpha``, however long it runs. ``CombinedGuard`` puts both behind one hook,
  ``EvaluationJournal`` keeps a crash from changing a verdict, and
  ``choose_tolerated_gap`` finds the gap that honest policies have.
- ``HeldoutSplit`` watches the data: train and held-out tasks share nothing, or
  nothing starts.
"""

from __future__ import annotations

from composer_replication.errors import CollapseStopError, SplitOverlapError
from composer_replication.safety.combined_guard import CombinedGuard, CombinedStatus
from composer_replication.safety.evaluation_journal import EvaluationJournal, evaluation_seed
from composer_replication.safety.evaluation_scores import EvaluationScores
from composer_replication.safety.evidence_guard import EvidenceGuard
from composer_replication.safety.evidence_status import INSUFFICIENT_DATA, EvidenceStatus
from composer_replication.safety.gap_bound import choose_tolerated_gap, upper_confidence_gap
from composer_replication.safety.heldout_guard import HeldOutGuard, TripwireStatus, kl_token_trust_filter
from composer_replication.safety.heldout_split import HeldoutSplit
from composer_replication.safety.journalled_evaluation import JournalledEvaluation

__all__ = [
    "INSUFFICIENT_DATA",
    "CollapseStopError",
    "CombinedGuard",
    "CombinedStatus",
    "EvaluationJournal",
    "EvaluationScores",
    "EvidenceGuard",
    "EvidenceStatus",
    "HeldOutGuard",
    "HeldoutSplit",
    "JournalledEvaluation",
    "SplitOverlapError",
    "TripwireStatus",
    "choose_tolerated_gap",
    "evaluation_seed",
    "kl_token_trust_filter",
    "upper_confidence_gap",
]
