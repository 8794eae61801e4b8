"""How does an episode of many turns go?

agent_loop.py            limits, parts, and the loop: sample, call, append, stop, grade; many episodes at once, begun again for infrastructure
episode.py               the record: turns, tokens, seconds, reward; a segment as a trainer takes it
ledger_talk.py           conversations over a chat template: ids in a ledger, calls in its dialect
served_policy.py         a policy behind a vLLM server, with ids and log-probabilities; whether the server fits
batching_policy.py       a policy over a blocking sampler in this process
trajectories.py          episodes on disk, in the Agent Trajectory Interchange Format; their calls once more
"""
