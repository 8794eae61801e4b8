"""Which task should the policy try next?

Those on which it sometimes passes and sometimes fails: a group whose answers all pass or all fail teaches nothing.

    standing.py   active or retired, and why; the state of a checkpoint
    chooser.py    Curriculum: draws, learns, gives replacements
"""

from __future__ import annotations

from composer_replication.rollouts.curriculum.chooser import Curriculum
from composer_replication.rollouts.curriculum.standing import Evidence, Standing, recorded_evidence

__all__ = ["Curriculum", "Evidence", "Standing", "recorded_evidence"]
