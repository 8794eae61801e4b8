"""Which task should the policy try next?

Those on which it sometimes passes and sometimes fails: a group whose answers all pass or all fail teaches nothing.

    chooser.py    what is known of a task; Curriculum: draws, learns, gives replacements; the state of a checkpoint
"""

from __future__ import annotations

from composer_replication.rollouts.curriculum.chooser import Curriculum, Evidence, Standing, recorded_evidence

__all__ = ["Curriculum", "Evidence", "Standing", "recorded_evidence"]
