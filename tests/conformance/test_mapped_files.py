"""Files that an ordinary user's command has deleted, closed and still mapped: the kernel tells their size to root alone."""

from __future__ import annotations

import os

import pytest
from ordinary_user import as_ordinary_user

from composer_replication.sandbox.conformance.test_limits import HIDDEN_IN_MAPPINGS

RUN = """
import dataclasses, json, sys, tempfile
from pathlib import Path
from composer_replication.records import Limits, SandboxSpec
from composer_replication.sandbox import base_python, choose_backend, process_memory
name, guard, program, warm_again = sys.argv[1:]
backend = choose_backend(name)
check = backend.is_available()
if not check.ok:
    print(json.dumps({"skip": check.detail}))
    raise SystemExit
if guard == "off":  # what the watch was before it: the mapped part counts, and that is all
    look = process_memory.unlinked_files
    process_memory.unlinked_files = lambda *given, **named: dataclasses.replace(look(*given, **named), is_whole=True)
with tempfile.TemporaryDirectory() as folder:
    spec = SandboxSpec(Path(folder), limits=Limits(disk_bytes=8 << 20, memory_bytes=96 << 20))
    with backend.open(spec) as sandbox:
        command = [str(base_python()), "-I", "-c", program]
        done = sandbox.exec(command, timeout_seconds=120)
        again = sandbox.exec(warm_again, timeout_seconds=120).stdout
print(json.dumps([done.exit_code, done.stdout + done.stderr, again]))
"""
HOLD = HIDDEN_IN_MAPPINGS.replace("time.sleep(30)", "time.sleep(8)")
IN_SHARED_MEMORY = HOLD.replace("import ctypes", "import os; os.chdir('/dev/shm')\nimport ctypes")
LOCKS = """
import mmap, multiprocessing, os, time
held = os.open('kept', os.O_CREAT | os.O_RDWR)
os.write(held, bytes(1 << 20))
kept = mmap.mmap(held, 4096)  # which keeps it open, so that it can be measured
os.close(held)
os.unlink('kept')
fork = multiprocessing.get_context('fork')
def add(value):
    for _ in range(100):
        with value.get_lock():
            value.value += 1
value, queue, pool = fork.Value('i', 0), fork.Queue(), fork.Pool(2)
processes = [fork.Process(target=add, args=(value,)) for _ in range(3)]
for process in processes: process.start()
for process in processes: process.join()
queue.put('lived')
time.sleep(5)
print(queue.get(), value.value, sum(pool.map(abs, range(4))), any(' (deleted)' in line for line in open('/proc/self/maps')))
"""


def run(
    name: str, program: str, guard: str = "on", then: str = "true", script: str = RUN
) -> tuple[int, str, str]:
    code, said, again = as_ordinary_user(script, name, guard, program, then)
    return code, said, again


@pytest.mark.long
@pytest.mark.skipif(os.geteuid() != 0, reason="once is enough")
@pytest.mark.parametrize("name", ["bubblewrap", "sandlock"])
def test_without_the_guard_they_are(name: str) -> None:
    assert run(name, HOLD, guard="off")[:2] == (0, "lived\n")


@pytest.mark.parametrize("name", ["bubblewrap", "bubblewrap-warm"])
def test_the_kernel_bounds_them_in_shared_memory(name: str) -> None:
    """Which is empty for the next command, and as it was."""
    code, said, again = run(name, IN_SHARED_MEMORY, then="ls -A /dev/shm; stat -c %a /dev/shm")
    assert "lived" not in said
    assert (code, "No space left on device" in said) == (1, True) or (code, "disk" in said) == (137, True), (
        said
    )
    assert again == "755\n"


@pytest.mark.parametrize("name", ["bubblewrap", "bubblewrap-warm"])
def test_what_a_command_leaves_in_shared_memory_is_gone(name: str) -> None:
    leave = "import os; open('/dev/shm/left', 'w').write('x'); os.chmod('/dev/shm', 0o711)"
    assert run(name, leave, then="ls -A /dev/shm; stat -c %a /dev/shm") == (0, "", "755\n")


@pytest.mark.parametrize("name", ["bubblewrap", pytest.param("bubblewrap-warm", marks=pytest.mark.long)])
def test_locks_of_multiprocessing_and_mapped_files_that_are_open_are_no_offence(name: str) -> None:
    assert run(name, LOCKS)[:2] == (0, "lived 300 6 True\n")


def test_a_tree_in_shared_memory_is_disk() -> None:
    if not os.access("/dev/shm", os.W_OK):
        pytest.skip("no shared memory here")
    in_memory = RUN.replace("TemporaryDirectory()", "TemporaryDirectory(dir='/dev/shm')")
    code, said, _ = run("bubblewrap", HOLD, script=in_memory)
    assert code == 137 and "mapped files" in said, said
