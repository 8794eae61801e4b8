"""A worker that is killed with its children leaves no folder for long, and nothing that waits."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from composer_replication.sandbox.process_tree import descendants

WORKER = """\
import time
from composer_replication.sandbox.process_folder import process_folder
from composer_replication.tasks.workers.last_sweep import sweep_after_this_process
sweep_after_this_process()
sweep_after_this_process()
(process_folder() / "tree").mkdir()
print(process_folder(), flush=True)
time.sleep(600)
"""


def test_what_a_killed_worker_leaves_is_removed(tmp_path: Path) -> None:
    ours = {"TMPDIR": str(tmp_path)}
    program = [sys.executable, "-c", WORKER]
    with subprocess.Popen(
        program, env={**os.environ, **ours}, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as worker:
        assert worker.stdout is not None
        folder = Path(worker.stdout.readline().strip())
        made, children, waiting = (folder / "tree").is_dir(), descendants(worker.pid), waiting_in(tmp_path)
        os.killpg(worker.pid, signal.SIGKILL)
    assert made
    assert children == [], "Ray kills the children of a worker"
    assert len(waiting) == 1
    while folder.exists() or waiting_in(tmp_path):  # the test's time-out ends it
        time.sleep(0.02)


def waiting_in(folder: Path) -> list[int]:
    """Processes that wait for the end of another one and sweep this folder then."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            words = (entry / "cmdline").read_bytes() if entry.name.isdigit() else b""
            if (
                b"import sweep\n" in words
                and f"TMPDIR={folder}\0".encode() in (entry / "environ").read_bytes()
            ):
                found.append(int(entry.name))
        except OSError:
            continue
    return found
