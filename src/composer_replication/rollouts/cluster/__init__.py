"""Where do attempts and gradings run when one machine is too small? In actors on the nodes of a Ray cluster.

opening.py          join a cluster for the time of some rollouts
store_parcel.py     a store as a few objects, and a copy of it on a node
rollout_actor.py    how many actors, and what lives on a node: a sandbox with its tools, and the grading
rollout_cluster.py  the actors, lent one at a time; placing, restarts and waiting are Ray's
ray_environment.py  an attempt whose sandbox is elsewhere, for the agent loop and every face
ray_grader.py       answers and trees graded elsewhere

Nothing here needs torch. The extra ``ray`` is needed from ``opening.open_cluster`` on.
"""
