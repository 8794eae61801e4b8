"""What a warm jail must not let a command do to the next one: hostile commands, one after the other."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from composer_replication.records import Limits, SandboxSpec
from composer_replication.sandbox import base_python, bubblewrap, folders
from composer_replication.sandbox.bubblewrap import WarmBubblewrap, WarmBubblewrapSandbox
from composer_replication.sandbox.process_tree import descendants

LONG = 60.0
SHARED_MEMORY = (
    "import ctypes; c = ctypes.CDLL(None, use_errno=True)\nprint(c.shmget(4711, 4096, 0o1600) >= 0)"
)
QUEUE = (
    "import ctypes; c = ctypes.CDLL('librt.so.1', use_errno=True)\n"
    "print(c.mq_open(b'/left', 0o102, 0o600, None) >= 0)"
)


@pytest.fixture
def jail(tree: Path) -> Iterator[WarmBubblewrapSandbox]:
    check = WarmBubblewrap().is_available()
    if not check.ok:
        pytest.skip(f"not available here: {check.detail}")
    with WarmBubblewrapSandbox(SandboxSpec(tree)) as sandbox:
        yield sandbox


def python(code: str) -> list[str]:
    return [str(base_python()), "-I", "-S", "-c", code]


def run(jail: WarmBubblewrapSandbox, command: str | list[str]) -> str:
    done = jail.exec(command, timeout_seconds=LONG)
    assert done.exit_code == 0, done.stderr
    return done.stdout


def test_a_machine_that_the_filter_does_not_know_has_no_warm_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bubblewrap, "filter_program", lambda: b"")
    assert not WarmBubblewrap().is_available().ok


# What one command leaves, the next one does not find.


def test_a_daemon_does_not_see_the_next_command(jail: WarmBubblewrapSandbox, tree: Path) -> None:
    code = (
        "import os, time\n"
        "for _ in range(5):\n"
        " if os.fork() == 0:\n"
        "  os.setsid()\n"
        "  if os.fork() == 0:\n"
        "   while True: open('beat', 'a').write('.'); time.sleep(0.005)\n"
        "  os._exit(0)\n"
        "while not os.path.exists('beat'): time.sleep(0.01)"
    )
    run(jail, python(code))
    assert jail.jail_pid is not None
    assert descendants(jail.jail_pid) == []
    before = (tree / "beat").stat().st_size
    assert run(jail, "echo /proc/[0-9]*").split()[0] == "/proc/1"
    assert run(jail, "set -- /proc/[0-9]*; echo $#") == "2\n"  # the first process, and this shell
    assert (tree / "beat").stat().st_size == before


def test_orphans_are_collected_while_a_command_runs(tree: Path, jail: WarmBubblewrapSandbox) -> None:
    """Dead orphans count as processes: a hundred of them do not fit into a limit of 20 at once."""
    jail.close()
    with WarmBubblewrapSandbox(SandboxSpec(tree, limits=Limits(num_processes=20))) as sandbox:
        script = (
            "for i in $(seq 100); do (true &) || exit 1; [ $((i % 5)) = 0 ] && sleep 0.02; done; echo done"
        )
        done = sandbox.exec(["sh", "-c", script], timeout_seconds=LONG)
    assert (done.exit_code, done.stdout) == (0, "done\n"), done.stderr


@pytest.mark.parametrize("place", ["/tmp", "/var/tmp", "/dev/shm"])
def test_temporary_folders_are_new_for_each_command(jail: WarmBubblewrapSandbox, place: str) -> None:
    list_it = f"stat -c %a {place}; ls -A {place}"
    before = run(jail, list_it)
    run(
        jail, f"cd {place}; mkdir -p a/b; echo x > a/b/c; ln -s / link; touch .hidden; chmod 0 a; chmod 751 ."
    )
    assert run(jail, list_it) == before


def test_what_cannot_be_removed_costs_the_jail(
    jail: WarmBubblewrapSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or the next command would find it."""
    run(jail, "true")
    first = jail.jail_pid
    with monkeypatch.context() as patched:
        patched.setattr(folders, "remove_folder", lambda _: None)
        run(jail, "mkdir /tmp/left")
    assert run(jail, "cd /tmp; ls -d left 2> /dev/null; true") == ""
    assert jail.jail_pid != first


def test_attributes_of_a_temporary_folder_do_not_stay(jail: WarmBubblewrapSandbox) -> None:
    code = "import os\ntry: os.setxattr('/tmp', 'user.left', b'x')\nexcept OSError: print('refused')"
    if run(jail, python(code)):
        pytest.skip("no extended attributes on this file system")
    assert run(jail, python("import os; print(os.listxattr('/tmp'))")) == "[]\n"


def test_the_environment_is_each_command_s_own(jail: WarmBubblewrapSandbox) -> None:
    first = run(jail, ["env"])
    assert "LEFT" not in first
    assert "LEFT=x\n" in jail.exec(["env"], timeout_seconds=LONG, env={"LEFT": "x"}).stdout
    run(jail, "export LEFT=x; umask 0; cd /; ulimit -n 10")
    assert run(jail, ["env"]) == first
    assert (
        run(jail, "pwd; umask; ulimit -n") == f"{jail.tree}\n{run(jail, 'umask')}{Limits().num_open_files}\n"
    )


@pytest.mark.parametrize("code", [SHARED_MEMORY, QUEUE])
def test_what_needs_no_process_to_live_cannot_be_made(jail: WarmBubblewrapSandbox, code: str) -> None:
    assert run(jail, python(code)) == "False\n"


# The process that keeps the jail.


def test_forged_answers_are_no_answers(jail: WarmBubblewrapSandbox) -> None:
    """Frames that say "exit code 0", to every descriptor there is, those of the first process included."""
    code = (
        "import os, sys\n"
        "frame = b'R\\0\\0\\0\\5E\\0\\0\\0\\0'\n"
        "for number in range(0, 256):\n"
        " if number not in (1, 2):\n"
        "  try: os.write(number, frame)\n"
        "  except OSError: pass\n"
        "for pid in (1, os.getppid()):\n"
        " for number in range(0, 64):\n"
        "  try: os.write(os.open(f'/proc/{pid}/fd/{number}', os.O_WRONLY), frame)\n"
        "  except OSError: pass\n"
        "os.write(1, frame); os.write(2, frame)\n"
        "print(sorted(os.listdir('/proc/self/fd')))\n"
        "sys.exit(7)"
    )
    done = jail.exec(python(code), timeout_seconds=LONG)
    assert done.exit_code == 7
    assert done.stdout.startswith("R\0\0\0\5E\0\0\0\0")
    assert "['0', '1', '2', '3']" in done.stdout  # 3 is the listing itself
    assert jail.exec(["sh", "-c", "exit 3"], timeout_seconds=LONG).exit_code == 3


@pytest.mark.parametrize("when", ["during", "before"])
def test_a_jail_that_is_killed(jail: WarmBubblewrapSandbox, tree: Path, when: str) -> None:
    """During a command it is that command's end; between two it is nobody's."""
    run(jail, "true")
    first = jail.jail_pid
    assert first is not None
    if when == "before":
        os.kill(first, signal.SIGKILL)
        while descendants(os.getpid()).count(first):
            time.sleep(0.01)
        assert run(jail, "echo on") == "on\n"
    else:

        def kill_it() -> None:
            while not (tree / "up").exists():
                time.sleep(0.01)
            os.kill(first, signal.SIGKILL)

        killer = threading.Thread(target=kill_it)
        killer.start()
        done = jail.exec("echo said; echo > up; sleep 99", timeout_seconds=LONG)
        killer.join()
        assert (done.exit_code, done.stdout, done.timed_out) == (137, "said\n", False)
        assert done.stderr.splitlines()[-1] == "[sandbox] stopped: it ended the process that keeps the jail"
        assert run(jail, "echo on") == "on\n"
    assert jail.jail_pid != first


def test_a_forked_child_leaves_the_jail_alone(jail: WarmBubblewrapSandbox) -> None:
    run(jail, "true")
    first = jail.jail_pid
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = jail.exec(["sh", "-c", "exit 42"], timeout_seconds=LONG).exit_code
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 42
    assert (run(jail, "echo on"), jail.jail_pid) == ("on\n", first)


# Commands are started as a shell would.


def test_the_path_of_the_command_is_searched(jail: WarmBubblewrapSandbox) -> None:
    jail.write_file("bin/mine", b"#!/bin/sh\necho mine\n", is_executable=True)
    jail.write_file("bin/closed", b"#!/bin/sh\n")
    path = {"PATH": f"/nowhere:{jail.tree}/bin"}
    assert jail.exec(["mine"], timeout_seconds=LONG, env=path).stdout == "mine\n"
    done = jail.exec(["closed"], timeout_seconds=LONG, env=path)
    assert (done.exit_code, "closed: Permission denied" in done.stderr) == (126, True)


def test_signals_are_as_by_default(jail: WarmBubblewrapSandbox) -> None:
    """Our interpreter ignores some; a command must not inherit that."""
    rows = run(jail, "grep -E '^Sig(Blk|Ign)' /proc/self/status").split()
    of_the_c_library = (
        1 << 31 | 1 << 32
    )  # 32 and 33: it ignores them in whatever it spawns, and takes them as needed
    assert [int(mask, 16) & ~of_the_c_library for mask in rows[1::2]] == [0, 0]


def test_close_leaves_no_process_and_no_folder(jail: WarmBubblewrapSandbox) -> None:
    home = Path(run(jail, "echo $HOME").strip())
    first = jail.jail_pid
    assert first is not None
    jail.close()
    assert not home.parent.exists()
    assert not Path(f"/proc/{first}").exists()
    assert descendants(os.getpid()) == []


def test_a_file_that_is_shown_below_a_temporary_folder(tree: Path, tmp_path: Path) -> None:
    if not (check := WarmBubblewrap().is_available()).ok:
        pytest.skip(check.detail)
    shown = tmp_path / "shown.txt"
    shown.write_text("seen\n")
    with WarmBubblewrapSandbox(SandboxSpec(tree, (shown,))) as sandbox:
        assert run(sandbox, f"cat {shown}") == run(sandbox, f"cat {shown}") == "seen\n"
