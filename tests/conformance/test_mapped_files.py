"""Files that an ordinary user's command has deleted, closed and still mapped: the kernel tells their size to root alone."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from ordinary_user import as_ordinary_user

from composer_replication.records import Limits, SandboxSpec
from composer_replication.sandbox import choose_backend
from composer_replication.sandbox.conformance.plugin import LONG_SECONDS, MIB, python
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
import multiprocessing, os, time
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
MEMORY = """
import mmap, os, time
shared = mmap.mmap(-1, 90 << 20)
shared[::4096] = b'x' * len(shared[::4096])
{written}
time.sleep(8); print('lived')
"""
WRITTEN = "open('/dev/shm/file', 'wb').write(bytes(7 << 20))"


def run(
    name: str, program: str, guard: str = "on", then: str = "true", script: str = RUN
) -> tuple[int, str, str]:
    code, said, again = as_ordinary_user(script, name, guard, program, then)
    return code, said, again


@pytest.mark.long
@pytest.mark.parametrize("name", ["bubblewrap", "bubblewrap-warm", "sandlock"])
def test_they_are_no_way_past_the_limit_of_the_disk(name: str) -> None:
    code, said, again = run(name, HOLD, then="echo next")
    assert (code, said) == (
        137,
        "[sandbox] stopped: it keeps open or mapped files where no limit counts them\n",
    )
    assert again == "next\n"  # and the sandbox goes on


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
def test_locks_of_multiprocessing_are_such_files_and_no_offence(name: str) -> None:
    assert run(name, LOCKS)[:2] == (0, "lived 300 6 True\n")


@pytest.mark.long
@pytest.mark.parametrize(("written", "code"), [(WRITTEN, 137), ("", 0)])
def test_shared_memory_counts_as_memory(written: str, code: int) -> None:
    """Seven MiB that nobody maps, beside anonymous memory that fits without them."""
    found, said, _ = run("bubblewrap", MEMORY.format(written=written))
    assert found == code, said
    assert "memory" in said or code == 0


def test_a_tree_in_shared_memory_is_disk() -> None:
    if not os.access("/dev/shm", os.W_OK):
        pytest.skip("no shared memory here")
    in_memory = RUN.replace("TemporaryDirectory()", "TemporaryDirectory(dir='/dev/shm')")
    code, said, _ = run("bubblewrap", HOLD, script=in_memory)
    assert code == 137 and "mapped files" in said, said


# --- what no limit of the kernel counts ---


FILL = """
import socket, time
kept = []
for number in range({num}):
    pair = socket.socketpair()
    for end in pair:
        end.setblocking(False)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 18)
    for end in pair[:{num_writers}]:
        try:
            while True: end.send(bytes(1 << 16))
        except BlockingIOError: pass
    {close}
    kept.append(pair)
time.sleep({seconds})
print('whole')
"""


@pytest.mark.long
@pytest.mark.parametrize(
    "changes", [{"num_writers": 2, "close": "pass"}, {"num_writers": 1, "close": "pair[0].close()"}]
)
@pytest.mark.parametrize("name", ["bubblewrap", "bubblewrap-warm", "sandlock"])
def test_buffers_of_sockets_count_as_memory(tmp_path: Path, name: str, changes: dict[str, object]) -> None:
    """Of closed senders, too: what they sent waits at the receiver."""
    backend = choose_backend(name)
    if not (check := backend.is_available()).ok:
        pytest.skip(f"{name} is not available here: {check.detail}")
    with backend.open(SandboxSpec(tmp_path, limits=Limits(memory_bytes=32 * MIB))) as sandbox:
        code = FILL.format(num=110, seconds=30, **changes)
        over = sandbox.exec(python(code), timeout_seconds=LONG_SECONDS)
        fits = sandbox.exec(python(FILL.format(num=10, seconds=0.3, **changes)), timeout_seconds=LONG_SECONDS)
    assert (over.out_of_memory, over.exit_code) == (True, 137), over
    assert (fits.exit_code, fits.stdout) == (0, "whole\n"), fits.stderr
