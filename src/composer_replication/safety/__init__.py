"""Is the reward honest? Three answers with the standard library alone, so that any trainer can embed them.

- ``HeldOutGuard`` halts a run when the reward that is trained on rises while a score that is never
  trained on does not.
- ``EvidenceGuard`` does so with a guarantee: it halts a clean run with probability at most ``alpha``,
  however long it runs. ``CombinedGuard`` puts both behind one hook, ``EvaluationJournal`` keeps a crash
  from changing a verdict, and ``upper_confidence_gap`` bounds the gap that honest policies have.
- ``HeldoutSplit``: train and held-out tasks share nothing, or nothing starts.
"""

from __future__ import annotations

from composer_replication.errors import CollapseStopError, SplitOverlapError
from composer_replication.safety.betting import upper_confidence_gap
from composer_replication.safety.combined_guard import CombinedGuard, CombinedStatus
from composer_replication.safety.evaluation_journal import EvaluationJournal
from composer_replication.safety.evidence_guard import INSUFFICIENT_DATA, EvidenceGuard, EvidenceStatus
from composer_replication.safety.heldout_guard import HeldOutGuard, TripwireStatus, kl_token_trust_filter
from composer_replication.safety.heldout_split import HeldoutSplit

__all__ = [
    "INSUFFICIENT_DATA",
    "CollapseStopError",
    "CombinedGuard",
    "CombinedStatus",
    "EvaluationJournal",
    "EvidenceGuard",
    "EvidenceStatus",
    "HeldOutGuard",
    "HeldoutSplit",
    "SplitOverlapError",
    "TripwireStatus",
    "kl_token_trust_filter",
    "upper_confidence_gap",
]
