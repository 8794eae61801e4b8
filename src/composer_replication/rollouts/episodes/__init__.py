"""How does an episode of many turns go, how does a generation become episodes, and episodes rows?

agent_loop.py        limits, parts, and the loop: sample, call, append, stop, grade; many at once, begun again for infrastructure
episode.py           the record: turns, tokens, seconds, reward; the row that a trainer takes
policies.py          a policy over a blocking sampler in this process, and one behind a vLLM server; whether the server fits
episode_player.py    the episodes of one generation: seeds, counts, outcomes, figures for the log
shortcut_judge.py    a model on a server is asked about some of what was paid, for a report
trajectories.py      what is kept of each step: files of the run folder (ATIF)
"""
