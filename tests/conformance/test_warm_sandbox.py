"""What a warm jail must not let a command do to the next one: hostile commands, one after the other."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from ordinary_user import as_ordinary_user

from composer_replication.records import Limits, SandboxSpec
from composer_replication.sandbox import base_python, bubblewrap, folders
from composer_replication.sandbox.bubblewrap import WarmBubblewrap, WarmBubblewrapSandbox
from composer_replication.sandbox.process_tree import descendants

LONG = 60.0
IS_ROOT = os.geteuid() == 0
SHARED_MEMORY = (
    "import ctypes; c = ctypes.CDLL(None, use_errno=True)\nprint(c.shmget(4711, 4096, 0o1600) >= 0)"
)
QUEUE = (
    "import ctypes; c = ctypes.CDLL('librt.so.1', use_errno=True)\n"
    "print(c.mq_open(b'/left', 0o102, 0o600, None) >= 0)"
)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    folder = tmp_path / "tree"
    folder.mkdir()
    return folder


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


def test_the_jail_stays(jail: WarmBubblewrapSandbox) -> None:
    run(jail, "true")
    first = jail.jail_pid
    assert first is not None
    for _ in range(3):
        run(jail, "true")
    assert jail.jail_pid == first


def test_nothing_is_started_before_the_first_command(jail: WarmBubblewrapSandbox) -> None:
    assert jail.jail_pid is None
    run(jail, "true")
    assert jail.jail_pid is not None


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


def test_a_daemon_lives_as_long_as_its_command(jail: WarmBubblewrapSandbox) -> None:
    """The counterpart: it is the end of the command that ends them."""
    assert run(jail, "sleep 99 & sleep 0.2; ps -o comm= | grep -c sleep; pgrep -c sleep; true").strip() != "0"


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


def test_mount_points_that_were_moved_cost_a_new_jail_and_nothing_else(
    jail: WarmBubblewrapSandbox, tmp_path: Path
) -> None:
    outside = tmp_path / "readable-outside-only"
    outside.write_text("x")
    assert (
        jail.exec(["cat", str(outside)], timeout_seconds=LONG).exit_code != 0
    )  # or what follows hits the machine
    before = run(jail, "ls -A /tmp")
    first = jail.jail_pid
    moved = run(
        jail, "cd /tmp && for n in *; do mv $n moved-$n 2>/dev/null && ln -s / $n && echo moved; done; true"
    )
    assert (run(jail, "pwd; echo x > written; cat written"), run(jail, "ls -A /tmp")) == (
        f"{jail.tree}\nx\n",
        before,
    )
    assert (jail.jail_pid != first) == bool(moved)


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


def test_a_changed_priority_is_not_handed_on(jail: WarmBubblewrapSandbox) -> None:
    ask = python("import os; print(os.getpriority(os.PRIO_PROCESS, 0), len(os.sched_getaffinity(0)))")
    before = run(jail, ask)
    code = (
        "import os, contextlib\n"
        "with contextlib.suppress(OSError): os.setpriority(os.PRIO_PROCESS, 1, 19)\n"
        "with contextlib.suppress(OSError): os.sched_setaffinity(1, {min(os.sched_getaffinity(0))})"
    )
    run(jail, python(code))
    assert run(jail, ask) == before


# The process that keeps the jail.


def test_it_cannot_be_signalled_traced_or_opened(jail: WarmBubblewrapSandbox) -> None:
    run(jail, "true")
    first = jail.jail_pid
    code = (
        "import os, signal, ctypes\n"
        "reached = []\n"
        "for number in range(1, 65):\n"
        " try: os.kill(1, number)\n"
        " except OSError: pass\n"
        "for name in ('mem', 'environ', 'maps', 'fd', 'cwd', 'root', 'ns/net'):\n"
        " try:\n"
        "  path = '/proc/1/' + name\n"
        "  os.listdir(path) if name == 'fd' else os.readlink(path) if name in ('cwd', 'root', 'ns/net') "
        "else open(path, 'rb').read(1)\n"
        "  reached.append(name)\n"
        " except OSError: pass\n"
        "if ctypes.CDLL(None).ptrace(16, 1, 0, 0) == 0: reached.append('ptrace')\n"
        "print(reached)"
    )
    assert run(jail, python(code)) == "[]\n"
    assert (run(jail, "echo on"), jail.jail_pid) == ("on\n", first)


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


def test_a_command_that_closes_everything(jail: WarmBubblewrapSandbox) -> None:
    code = "import os, time; os.closerange(0, 256); time.sleep(0.3); os._exit(5)"
    assert jail.exec(python(code), timeout_seconds=LONG, stdin=b"x" * 100_000).exit_code == 5
    assert run(jail, "echo on") == "on\n"


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


def test_a_jail_that_has_ended_before_its_starter_goes_on(
    jail: WarmBubblewrapSandbox, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The order was taken whole and obeyed, and only then does the thread that gave it get the processor again."""
    run(jail, "true")
    sends = socket.send_fds

    def send(to: socket.socket, *what: object) -> int:
        sent = sends(to, *what)  # type: ignore[arg-type]
        while not (tree / "up").exists():
            time.sleep(0.01)
        os.kill(jail.jail_pid or 0, signal.SIGKILL)
        assert to.recv(1, socket.MSG_PEEK) == b""
        return sent

    monkeypatch.setattr(socket, "send_fds", send)
    assert jail.exec("echo > up; sleep 99", timeout_seconds=LONG).exit_code == 137
    monkeypatch.undo()
    assert run(jail, "echo on") == "on\n"


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


def test_a_script_without_an_interpreter_is_for_the_shell(jail: WarmBubblewrapSandbox) -> None:
    jail.write_file("script", b"echo $1 ran\n", is_executable=True)
    assert run(jail, ["./script", "it"]) == "it ran\n"


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


HOSTILE = """
import json, os, signal, sys, threading, time
from pathlib import Path
from composer_replication.records import SandboxSpec
from composer_replication.sandbox import base_python
from composer_replication.sandbox.bubblewrap import WarmBubblewrap, WarmBubblewrapSandbox
check = WarmBubblewrap().is_available()
if not check.ok:
    print(json.dumps({"skip": check.detail})); sys.exit()
tree = Path(os.environ["TMPDIR"]) / "tree"
tree.mkdir()
python = [str(base_python()), "-I", "-S", "-c"]
found = {}
with WarmBubblewrapSandbox(SandboxSpec(tree)) as jail:
    run = lambda code: jail.exec([*python, code], timeout_seconds=60)
    run("pass"); first = jail.jail_pid
    found["signals"] = run("import os\\nfor n in range(1, 65):\\n try: os.kill(1, n)\\n except OSError: pass").exit_code
    found["same"] = jail.jail_pid == first
    reach = run("import os\\nfor n in ('fd', 'mem', 'environ', 'root', 'cwd'):\\n try: os.listdir('/proc/1/' + n) if n == 'fd' else os.readlink('/proc/1/' + n) if n in ('root', 'cwd') else open('/proc/1/' + n, 'rb+' if n == 'mem' else 'rb').read(1); print(n)\\n except OSError: pass")
    found["reached"] = reach.stdout
    lowered = run("import resource\\nfor kind in (resource.RLIMIT_NOFILE, resource.RLIMIT_CPU):\\n try: resource.prlimit(1, kind, (3, 3)); print('done')\\n except PermissionError: print('refused')")
    found["lowered"] = [lowered.stdout, run("import resource; print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])").stdout, jail.jail_pid == first]
    # A fork fails while ended processes still count against the limit: then it is tried again.
    fork = "def fork():\\n while True:\\n  try: return os.fork()\\n  except BlockingIOError: time.sleep(0.001)\\n"
    orphans = run("import os, time\\n" + fork + "for _ in range(2000):\\n if fork() == 0:\\n  fork(); os._exit(0)\\n os.wait()\\nprint('whole')")
    found["orphans"] = [orphans.exit_code, orphans.stdout, orphans.stderr, jail.jail_pid == first]
    def end_it():
        while not (tree / "up").exists(): time.sleep(0.01)
        os.kill(first, signal.SIGKILL)
    ender = threading.Thread(target=end_it)
    ender.start()
    taken = run("import os, time; print('said', flush=True); open('up', 'w'); os.fork(); time.sleep(60)")
    ender.join()
    found["taken"] = [taken.exit_code, taken.stdout, taken.stderr.splitlines()[-1:]]
    found["on"] = [run("print('on')").stdout, jail.jail_pid != first]
    unreaped = run("import os, time\\nif os.fork() == 0: os._exit(0)\\ntime.sleep(1.5); print('lived')")
    found["unreaped"] = [unreaped.exit_code, unreaped.stdout]
from composer_replication.sandbox.process_folder import process_folder
found["left"] = os.listdir(process_folder())
print(json.dumps(found))
"""


@pytest.mark.long
@pytest.mark.skipif(not IS_ROOT, reason="the other tests run as an ordinary user already")
def test_the_same_user_id_inside_and_out_is_no_way_to_the_first_process() -> None:
    """An ordinary user has one user id only: what the kernel allows between equals is tried here."""
    found = as_ordinary_user(HOSTILE)
    assert (found["signals"], found["same"], found["reached"]) == (0, True, "")
    assert found["lowered"] == ["refused\nrefused\n", f"{Limits().num_open_files}\n", True]
    assert found["orphans"] == [0, "whole\n", "", True]  # every one gives it work
    took_the_jail = [137, "said\n", ["[sandbox] stopped: it ended the process that keeps the jail"]]
    assert (found["taken"], found["on"]) == (took_the_jail, ["on\n", True])
    assert found["unreaped"] == [0, "lived\n"]  # the kernel shows the files of an ended process to root alone
    assert found["left"] == []


def test_a_file_that_is_shown_below_a_temporary_folder(tree: Path, tmp_path: Path) -> None:
    if not (check := WarmBubblewrap().is_available()).ok:
        pytest.skip(check.detail)
    shown = tmp_path / "shown.txt"
    shown.write_text("seen\n")
    with WarmBubblewrapSandbox(SandboxSpec(tree, (shown,))) as sandbox:
        assert run(sandbox, f"cat {shown}") == run(sandbox, f"cat {shown}") == "seen\n"
