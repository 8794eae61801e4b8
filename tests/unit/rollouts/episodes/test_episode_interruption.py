"""Ctrl-C in the middle of calls: every environment is closed before the program ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import asyncio, signal, sys, threading
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs are begun without it
from episode_parts import Lives, ScriptedPolicy, parts
from composer_replication.rollouts.episodes.agent_loop import run_episodes

lives, has_told = Lives(), []

def tell():
    if not has_told:
        has_told.append(True)
        print("running", flush=True)

begun = threading.Barrier(4, action=tell)

def work(arguments):
    if not has_told:
        begun.wait(30)
    threading.Event().wait(0.3)
    return "late"

policy = ScriptedPolicy(lambda asked: f"<work>{asked.text[5]}</work>")
made = parts(policy, lives, how={"acts": {"work": work}})
try:
    asyncio.run(run_episodes([str(n) for n in range(4)], made))
except KeyboardInterrupt:
    print("interrupted", len(lives.opened), sum(each.num_closed for each in lives.opened), flush=True)
    sys.exit(130)
"""


def test_ctrl_c_leaves_no_environment_open() -> None:
    here = Path(__file__).parents[1]
    source = Path(__file__).parents[4] / "src"
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": f"{source}:{here}"},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "running\n"
    process.send_signal(signal.SIGINT)
    said, trouble = process.communicate(timeout=60)
    assert said == "interrupted 4 4\n", trouble
    assert process.returncode == 130
    assert trouble == ""
