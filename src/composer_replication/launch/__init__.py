"""Where does it run?

A job is made of a recipe, rendered for a target as files that a person can read, and then
submitted by the target's own client; ``--dry-run`` stops after the rendering.

    job.py         what runs: the recipe's files, the command, how many nodes, GPUs and replicas
    job_status.py  how a job stands, in the words of no scheduler
    targets.py     the names of the targets, their common options, and what each can do
    clients.py     programs of a target, and what they say where they refuse
    job_folder.py  what was submitted, in a small file for status, logs and stop
"""
