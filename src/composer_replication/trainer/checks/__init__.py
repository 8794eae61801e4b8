"""Does the run still train what it says? Checks that speak, on by default.

    judgement      what is too much and why that much; from the numbers of a step to findings, with a memory that survives a resume
    speaking       the trainer's side: the numbers of each micro-step, where findings go, a bad step is skipped

Each check has a stable code (``composer-rl explain CR0765``), one sentence and what to do. None changes a gradient or
draws a random number; only a loss or gradient that is not finite has a consequence.
"""
