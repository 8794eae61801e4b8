"""Does the jail hold? Scripted attempts to get out of it, judged from outside.

    python -m benchmarks.escapes                        # every backend here, as root and as an ordinary user
    python -m benchmarks.escapes --backend sandlock --family keyrings

Run it from the root of the repository. Each attempt is a small program that runs inside a sandbox. Before
it something is planted outside: a secret word that it is not told, a file that it must not change, a listener,
a process. Whether it succeeded is decided afterwards from those facts and never from what the attempt says.

That the judge can see a success is shown by the control: the same attempt as a plain process that nothing holds.
Attempts that would hurt this very machine there are not run without a jail, each with its reason.
"""
