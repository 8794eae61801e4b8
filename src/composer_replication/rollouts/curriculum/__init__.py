"""Which task should the policy try next?

Those on which it sometimes passes and sometimes fails: a group whose answers all pass or all fail teaches nothing.
"""

from composer_replication.rollouts.curriculum.chooser import Curriculum, Standing, recorded_standings

__all__ = ["Curriculum", "Standing", "recorded_standings"]
