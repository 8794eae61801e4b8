"""Which other trainer can use our parts?

group_objective.py   advantages of groups and the clipped objective, as tensors: what our trainer has of TRL's
verl_plugin.py       registers them in verl, with a trainer that asks the guard
verl_agent_loop.py   verl's agent loop over our attempts
verl_guard.py        the guard in verl's job: its verdicts on disk, its exit code
prime_rl_loss.py     the same objective behind prime-rl's contract of a custom loss
verl_export.py       from a store of tasks to the folder with which verl trains on them
"""
