"""How does a trainer's generation become episodes, and episodes rows?

episode_player.py     plays the episodes of one generation: seeds, counts, outcomes, figures for the log
rollout_rows.py       an episode as the row that a trainer takes: ids, mask, log-probabilities, reward, effort
episode_sampler.py    plays episodes for evaluation: nothing is learned from them, hidden tests judge them
kept_episodes.py      trajectories and findings of each step in the run folder
observed_episodes.py  the episode that a trainer's row came from, for hints
"""
