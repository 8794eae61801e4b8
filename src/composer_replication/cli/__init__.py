"""How does a person or a script reach all of this?

Through one command, ``composer-rl VERB``. This is the only folder that joins the parts.

    main.py                 the frame: parse first, import a verb's parts only once it is chosen
    command_line.toml       the verbs and their arguments
    NAME_verb.py            a verb, or several that are close: run -> (result, exit code), render -> text
    assembly.py             the parts of a run, joined: checks, tasks, guard, sandboxes, attempts
    training_run.py         one run from its tasks to its report
    task_division.py        which tasks are trained on, and which are held out
    machine_troubles.py     what this machine refused, and what is written down when the fault is ours
    explanations/*.toml     what each error code means
"""
