"""How does a trainer's generation become episodes, and episodes rows?

episode_player.py   plays the episodes of one generation: seeds, counts, outcomes, figures for the log
kept_episodes.py    trajectories and findings of each step in the run folder; the episode that a trainer's row came from, for hints
"""
