"""Where do problems come from? Delete a function of a real repository, keep its tests, prove it is solvable.

    summary = build_tasks(["sdist:toolz==1.2.0"], Path("tasks"), max_tasks=8)  # of ``build``
    store = TaskStore.open(Path("tasks"))  # of ``store``
    store.write_tree(store.tasks()[0], Path("tree"))

A source is read (never run), its environment is locked to wheels and installed inside a
sandbox, its suite must be green in any order; then each candidate goes through the gates of
``gates``. Outside the sandbox nothing of a repository or a dependency is ever executed.
"""
