"""Is the reward honest?

Two answers, both with the standard library alone, so that any trainer can embed them:

- ``HeldOutGuard`` watches a run: it halts when the reward that is trained on rises
  while a score that is never trained on does not.
- ``HeldoutSplit`` watches the data: train and held-out tasks share nothing, or
  nothing starts.
"""

from __future__ import annotations

from composer_replication.errors import CollapseStopError, SplitOverlapError
from composer_replication.safety.heldout_guard import HeldOutGuard, TripwireStatus, kl_token_trust_filter
from composer_replication.safety.heldout_split import HeldoutSplit

__all__ = [
    "CollapseStopError",
    "HeldOutGuard",
    "HeldoutSplit",
    "SplitOverlapError",
    "TripwireStatus",
    "kl_token_trust_filter",
]
