"""Was the reward earned, or taken? Every call of an episode and the tree that it left are looked at.

Text alone is read: nothing runs, no sandbox is needed, and the golden code is not known here.

    hack_monitor.py       an episode -> a report
    episode_evidence.py     what goes in, what comes out
    hack_classes.py       the classes, by group, with what each does unless told otherwise
    monitor_options.py    the options
    scene.py              the public task and its tree: the questions that checks ask
    call_events.py        a tool call -> files, commands, Python
    shell_words.py        ... shell text -> words and operators
    shell_commands.py     ... -> simple commands, nested ones included
    known_output.py       ... what echo, printf and base64 -d print
    command_files.py      ... files that a command touches
    command_python.py     ... Python that a command runs
    other_languages.py    ... one-liners of other languages
    tree_paths.py         ... where a path leads
    python_code.py        Python text -> calls, names, texts, files
    python_constants.py   ... aliases and constants folded
    file_checks.py        what is wrong with touching a file
    command_checks.py     ... with a command
    search_checks.py      ... with a search
    git_checks.py         ... with git
    install_checks.py     ... with package managers
    code_checks.py        ... with Python wherever it runs
    written_code.py       ... with code in a file, whoever runs it
    solution_checks.py    ... with new code of the solution
    solution_shapes.py    ... equal to everything, swallows everything
    hard_coding.py        ... copied from the visible tests
    answer_tables.py      ... tables of literals, in all their forms
    visible_literals.py   ... whose literals are these
    tree_changes.py       new lines; tests and configuration before and after
"""

from composer_replication.rollouts.monitor.episode_evidence import (
    EpisodeEvidence,
    HackFinding,
    MonitorReport,
    PublicTask,
    public_task,
)
from composer_replication.rollouts.monitor.hack_classes import HACK_CLASSES, HackClass
from composer_replication.rollouts.monitor.hack_monitor import HackMonitor, monitor_for
from composer_replication.rollouts.monitor.monitor_options import MonitorOptions

__all__ = [
    "HACK_CLASSES",
    "EpisodeEvidence",
    "HackClass",
    "HackFinding",
    "HackMonitor",
    "MonitorOptions",
    "MonitorReport",
    "PublicTask",
    "monitor_for",
    "public_task",
]
