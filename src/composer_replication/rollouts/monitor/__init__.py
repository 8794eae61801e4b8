"""Was the reward earned, or taken? Every call of an episode and the tree that it left are read as text.

Nothing runs, no sandbox is needed, and the golden code is not known here. What grading and jail keep from paying is
reported; only code of the answer that can pay dishonestly masks.

    hack_monitor.py   an episode -> a report
    reported.py       patterns over calls, and changed tests: nothing of it can pay, it is counted
    solution.py       new code as facts; a table of rules: what detects tests, ends, patches, forges or equals everything masks
    answer_tables.py  new code that is a table of what the visible tests use: masks
"""

from composer_replication.rollouts.monitor.hack_monitor import inspect_episode, public_task

__all__ = ["inspect_episode", "public_task"]
