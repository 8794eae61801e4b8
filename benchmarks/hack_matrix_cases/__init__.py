"""Which episodes is the hack monitor tried on? Scripted ones, made from real tasks by seed; nothing of them is run.

case_task.py         a stored task as the script writer sees it, golden code included
real_tasks.py        the pinned tasks of real repositories (real_tasks.toml) and their store
draw_tasks.py        how they were drawn
own_store.py         a store of one small project
draft.py             an episode while it is written
spellings.py         the same command or code in other words
hacks.toml           what the episodes do: commands, files and code of each class, families held out, honest work
hacks.py             cheating, written into an episode
honest_episodes.py   honest work
"""
