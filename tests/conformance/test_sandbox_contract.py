"""What ``interfaces.Sandbox`` promises, for every backend that works on this machine."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import composer_replication
from composer_replication.errors import SandboxFailure
from composer_replication.interfaces import Sandbox, SandboxBackend
from composer_replication.records import Limits, SandboxSpec
from composer_replication.sandbox import base_interpreter, base_python
from composer_replication.sandbox.choice import BACKENDS, ONLY_BY_NAME

MIB = 1 << 20
LONG = 60.0
SOURCE = Path(composer_replication.__file__).parents[1]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    folder = tmp_path / "tree"
    folder.mkdir()
    return folder


@pytest.fixture
def jail(backend: SandboxBackend, tree: Path) -> Iterator[Sandbox]:
    with backend.open(SandboxSpec(tree)) as sandbox:
        yield sandbox


def python(code: str) -> list[str]:
    return [str(base_python()), "-I", "-c", code]


def living(token: str) -> list[int]:
    """Processes anywhere whose command line holds the token."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if token in (entry / "cmdline").read_text(errors="replace"):
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


@pytest.mark.parametrize(
    ("script", "code"),
    [("exit 0", 0), ("exit 3", 3), ("kill -9 $$", 137), ("kill -15 $$", 143), ("no-such-command-x", 127)],
)
def test_exit_code(jail: Sandbox, script: str, code: int) -> None:
    result = jail.exec(["sh", "-c", script], timeout_seconds=LONG)
    assert (result.exit_code, result.timed_out, result.out_of_memory) == (code, False, False)


def test_a_command_that_does_not_exist_is_an_ordinary_result(jail: Sandbox) -> None:
    result = jail.exec(["no-such-command-x"], timeout_seconds=LONG)
    assert result.exit_code == 127
    assert "no-such-command-x" in result.stderr


def test_arguments_arrive_as_given(jail: Sandbox) -> None:
    words = ["a b", "$HOME", "", "-n", "'\"", "é\n"]
    result = jail.exec(
        [*python("import sys, json; print(json.dumps(sys.argv[1:]))"), *words], timeout_seconds=LONG
    )
    assert json.loads(result.stdout) == words


@pytest.mark.parametrize(
    "name", ["/etc/debian_version", "/etc/os-release", "/etc/lsb-release", "/etc/localtime"]
)
def test_what_programs_ask_the_system_is_readable_or_absent(jail: Sandbox, name: str) -> None:
    """An installer that finds such a file closed gives up."""
    code = f"import contextlib\nwith contextlib.suppress(FileNotFoundError): open({name!r}, 'rb').read()"
    assert jail.exec(python(code), timeout_seconds=LONG).exit_code == 0


@pytest.mark.parametrize("command", [[], "", "  \n"])
def test_a_command_must_not_be_empty(jail: Sandbox, command: list[str] | str) -> None:
    with pytest.raises(ValueError, match="command is empty"):
        jail.exec(command, timeout_seconds=LONG)


def test_one_text_is_for_the_shell(jail: Sandbox) -> None:
    result = jail.exec("printf %s a; printf %s b >&2; exit 5", timeout_seconds=LONG)
    assert (result.exit_code, result.stdout, result.stderr) == (5, "a", "b")


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan")])
def test_the_time_out_must_be_above_zero(jail: Sandbox, seconds: float) -> None:
    with pytest.raises(ValueError, match="timeout_seconds"):
        jail.exec(["true"], timeout_seconds=seconds)


def test_large_stdin_and_stdout_do_not_block_each_other(jail: Sandbox) -> None:
    data = os.urandom(3 * MIB // 2).hex().encode()
    result = jail.exec(["cat"], timeout_seconds=LONG, stdin=data)
    assert hashlib.sha256(result.stdout.encode()).digest() == hashlib.sha256(data).digest()
    assert not result.truncated


def test_stdin_that_nobody_reads(jail: Sandbox) -> None:
    assert jail.exec(["true"], timeout_seconds=LONG, stdin=b"x" * (8 * MIB)).exit_code == 0


def test_streams_can_be_opened_by_name(jail: Sandbox) -> None:
    script = "echo out > /dev/stdout; echo err > /dev/stderr; cat /dev/stdin"
    done = jail.exec(script, timeout_seconds=LONG, stdin=b"in")
    assert (done.stdout, done.stderr) == ("out\nin", "err\n")


def test_without_stdin_there_is_an_end_of_file(jail: Sandbox) -> None:
    result = jail.exec(["cat"], timeout_seconds=LONG)
    assert (result.exit_code, result.stdout) == (0, "")


def test_environment_holds_what_env_names_and_nothing_of_ours(
    jail: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COMPOSER_TEST_SECRET", "hush")
    code = "import os, json; print(json.dumps(dict(os.environ)))"
    result = jail.exec(python(code), timeout_seconds=LONG, env={"GIVEN": "a=b c", "LANG": "C"})
    seen = json.loads(result.stdout)
    assert "COMPOSER_TEST_SECRET" not in seen
    assert (seen["GIVEN"], seen["LANG"]) == ("a=b c", "C")
    assert set(seen) - {"PWD", "SHLVL", "_", "OLDPWD", "LC_CTYPE"} == {
        "GIVEN", "LANG", "PATH", "HOME", "TMPDIR", "USER", "LOGNAME", "PYTHONDONTWRITEBYTECODE", "PYTHONNOUSERSITE",
    }  # fmt: skip


def test_home_and_temporary_folder_are_private_and_writable(jail: Sandbox) -> None:
    code = "import os, tempfile; print(os.environ['HOME']); open(os.environ['HOME'] + '/x', 'w'); tempfile.mkdtemp()"
    result = jail.exec(python(code), timeout_seconds=LONG)
    assert result.exit_code == 0, result.stderr
    assert Path(result.stdout.strip()) != Path.home()


def test_binary_output_is_decoded_with_replacement(jail: Sandbox) -> None:
    result = jail.exec(python(r"import os; os.write(1, b'a\xff\x00b')"), timeout_seconds=LONG)
    assert result.stdout == "a\ufffd\x00b"


@pytest.mark.parametrize("stream", [1, 2])
def test_each_stream_is_cut(backend: SandboxBackend, tree: Path, stream: int) -> None:
    with backend.open(SandboxSpec(tree, limits=Limits(output_bytes=1000))) as sandbox:
        result = sandbox.exec(python(f"import os; os.write({stream}, b'x' * 5000)"), timeout_seconds=LONG)
        kept = sandbox.exec(python(f"import os; os.write({stream}, b'x' * 1000)"), timeout_seconds=LONG)
    assert result.truncated
    assert (result.stdout, result.stderr)[stream - 1] == "x" * 1000
    assert (result.stdout, result.stderr)[2 - stream] == ""
    assert not kept.truncated
    assert (kept.stdout, kept.stderr)[stream - 1] == "x" * 1000


def test_a_gigabyte_of_output_is_drained_and_not_kept(jail: Sandbox) -> None:
    result = jail.exec(["head", "-c", str(1 << 30), "/dev/zero"], timeout_seconds=LONG)
    assert (result.exit_code, result.truncated, len(result.stdout)) == (0, True, Limits().output_bytes)


def test_time_out_kills_daemons(jail: Sandbox) -> None:
    token = uuid.uuid4().hex
    daemon = (
        f"import os, time\nif os.fork() == 0:\n os.setsid()\n if os.fork() == 0:\n  time.sleep(99)  # {token}"
    )
    daemon += "\n os._exit(0)\ntime.sleep(99)"
    result = jail.exec(python(daemon), timeout_seconds=1.0)
    assert result.timed_out
    assert result.exit_code != 0
    assert result.seconds >= 0.5
    assert living(token) == []


def test_a_child_that_keeps_the_output_open_does_not_hold_us(jail: Sandbox) -> None:
    token = uuid.uuid4().hex
    result = jail.exec(["sh", "-c", f"sh -c 'sleep 99; : {token}' & echo done"], timeout_seconds=LONG)
    assert (result.stdout, result.exit_code, result.timed_out) == ("done\n", 0, False)
    assert living(token) == []


def test_memory_of_one_process(backend: SandboxBackend, tree: Path) -> None:
    with backend.open(SandboxSpec(tree, limits=Limits(memory_bytes=128 * MIB))) as sandbox:
        result = sandbox.exec(python("print(len(bytearray(300 << 20)))"), timeout_seconds=LONG)
        fits = sandbox.exec(python("print(len(bytearray(30 << 20)))"), timeout_seconds=LONG)
    assert result.exit_code != 0
    assert result.stdout == ""
    assert fits.stdout == f"{30 << 20}\n"


def test_memory_of_all_processes_together(backend: SandboxBackend, tree: Path) -> None:
    code = (
        "import os, time\n"
        "for _ in range(6):\n"
        " if os.fork() == 0:\n"
        "  held = bytearray(60 << 20)\n"
        "  held[::4096] = b'x' * len(held[::4096])\n"
        "  time.sleep(30)\n"
        "time.sleep(30)"
    )
    with backend.open(SandboxSpec(tree, limits=Limits(memory_bytes=128 * MIB))) as sandbox:
        result = sandbox.exec(python(code), timeout_seconds=LONG)
    assert result.out_of_memory
    assert not result.timed_out
    assert result.exit_code == 137


def test_memory_that_forked_processes_share_counts_once(backend: SandboxBackend, tree: Path) -> None:
    code = (
        "import os, time\n"
        "held = bytearray(60 << 20)\n"
        "held[::4096] = b'x' * len(held[::4096])\n"
        "for _ in range(6):\n"
        " if os.fork() == 0:\n"
        "  time.sleep(0.5)\n"
        "  os._exit(0)\n"
        "time.sleep(0.5); print('lived')"
    )
    with backend.open(SandboxSpec(tree, limits=Limits(memory_bytes=128 * MIB))) as sandbox:
        assert sandbox.exec(python(code), timeout_seconds=LONG).stdout == "lived\n"


def test_disk_in_total(backend: SandboxBackend, tree: Path) -> None:
    code = (
        "import time\nfor n in range(40): open(f'f{n}', 'wb').write(b'x' << 20 if 0 else b'x' * (1 << 20))\n"
    )
    code += "time.sleep(30); print('lived')"
    with backend.open(SandboxSpec(tree, limits=Limits(disk_bytes=8 * MIB))) as sandbox:
        result = sandbox.exec(python(code), timeout_seconds=LONG)
    assert result.exit_code == 137
    assert "disk" in result.stderr
    assert not (result.timed_out or result.out_of_memory)


def test_disk_of_one_file(backend: SandboxBackend, tree: Path) -> None:
    with backend.open(SandboxSpec(tree, limits=Limits(disk_bytes=8 * MIB))) as sandbox:
        result = sandbox.exec(["sh", "-c", "head -c 50000000 /dev/zero > big"], timeout_seconds=LONG)
    assert result.exit_code != 0
    assert (tree / "big").stat().st_size <= 8 * MIB


def test_disk_that_was_there_before_is_not_charged(backend: SandboxBackend, tree: Path) -> None:
    (tree / "old").write_bytes(b"x" * (16 * MIB))
    with backend.open(SandboxSpec(tree, limits=Limits(disk_bytes=8 * MIB))) as sandbox:
        assert sandbox.exec(["sh", "-c", "echo new > small"], timeout_seconds=LONG).exit_code == 0


def test_paths_too_long_to_measure_count_as_over_the_limit(backend: SandboxBackend, tree: Path) -> None:
    code = "import os\nfor _ in range(60): os.mkdir('d' * 100); os.chdir('d' * 100)"
    sandbox = backend.open(SandboxSpec(tree))
    result = sandbox.exec(python(code), timeout_seconds=LONG)
    sandbox.close()
    assert result.exit_code == 137
    assert "disk" in result.stderr
    subprocess.run(["rm", "-rf", str(tree)], check=True)


def test_processes_are_limited(backend: SandboxBackend, tree: Path) -> None:
    code = (
        "import os, time\nn = 1\ntry:\n"
        " while n < 60:\n  if os.fork() == 0: time.sleep(5); os._exit(0)\n  n += 1\n"
        "except OSError: pass\nprint(n)"
    )
    with backend.open(SandboxSpec(tree, limits=Limits(num_processes=20))) as sandbox:
        result = sandbox.exec(python(code), timeout_seconds=LONG)
    assert result.exit_code == 137 or 10 <= int(result.stdout) <= 20


def test_writes_reach_the_tree_and_only_the_tree(backend: SandboxBackend, tree: Path, tmp_path: Path) -> None:
    shown = tmp_path / "shown"
    (shown / "deep").mkdir(parents=True)
    (shown / "deep" / "file").write_text("shown")
    _open_to_all(tmp_path)
    with backend.open(SandboxSpec(tree, read_only=(shown,))) as sandbox:
        script = f"cat {shown}/deep/file; echo mine > inside; mkdir sub; echo x > sub/y"
        result = sandbox.exec(["sh", "-c", script], timeout_seconds=LONG)
        refused = [
            sandbox.exec(["sh", "-c", f"echo x > {place}"], timeout_seconds=LONG).exit_code
            for place in (
                shown / "new",
                shown / "deep" / "file",
                "/etc/new",
                "/usr/bin/new",
                "/new",
            )
        ]
        sandbox.exec(["sh", "-c", f"echo x > {tmp_path}/new"], timeout_seconds=LONG)
    assert not (tmp_path / "new").exists()  # perhaps it was written to the private /tmp
    assert (result.exit_code, result.stdout) == (0, "shown")
    assert 0 not in refused
    assert (tree / "inside").read_text() == "mine\n"
    assert (shown / "deep" / "file").read_text() == "shown"
    owners = {path.lstat().st_uid for path in (tree, *tree.rglob("*"))}
    assert owners == {os.geteuid()}


def test_a_tree_below_a_shown_folder_is_writable(backend: SandboxBackend, tmp_path: Path) -> None:
    shown = tmp_path / "shown"
    inner = shown / "tree"
    inner.mkdir(parents=True)
    _open_to_all(tmp_path)
    with backend.open(SandboxSpec(inner, read_only=(shown,))) as sandbox:
        assert sandbox.exec(["sh", "-c", "pwd; echo x > y"], timeout_seconds=LONG).stdout == f"{inner}\n"
    assert (inner / "y").read_text() == "x\n"


def test_hidden_folders_beside_the_tree(jail: Sandbox, tmp_path: Path) -> None:
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    (hidden / "tests.txt").write_text("assert answer == 42")
    _open_to_all(hidden)
    for script in (f"cat {hidden}/tests.txt", "cat ../hidden/tests.txt", f"ln {hidden}/tests.txt l && cat l",
                   f"ln -s {hidden}/tests.txt s; cat s", f"grep -r answer {tmp_path}", "cat /proc/1/root/etc/shadow"):  # fmt: skip
        result = jail.exec(["sh", "-c", script], timeout_seconds=LONG)
        assert "42" not in result.stdout, script
        assert result.exit_code != 0, script


def test_masked_paths(backend: SandboxBackend, tree: Path, tmp_path: Path) -> None:
    shown = tmp_path / "shown"
    for name in ("a/keep", "a/hide", "b/c/keep", "b/c/d/hide"):
        (shown / name).parent.mkdir(parents=True, exist_ok=True)
        (shown / name).write_text(f"text of {name}")
    _open_to_all(tmp_path)
    spec = SandboxSpec(tree, (shown,), (shown / "a" / "hide", shown / "b" / "c" / "d", shown / "absent"))
    with backend.open(spec) as sandbox:
        seen = {
            name: sandbox.exec(["cat", str(shown / name)], timeout_seconds=LONG).stdout
            for name in ("a/keep", "a/hide", "b/c/keep", "b/c/d/hide")
        }
        link = sandbox.exec(["sh", "-c", f"ln {shown}/a/hide l && cat l"], timeout_seconds=LONG)
    assert seen == {
        "a/keep": "text of a/keep",
        "a/hide": "",
        "b/c/keep": "text of b/c/keep",
        "b/c/d/hide": "",
    }
    assert "text" not in link.stdout


def test_a_mask_holds_for_a_shown_link_too(backend: SandboxBackend, tree: Path, tmp_path: Path) -> None:
    real = tmp_path / "real"
    (real / "packages").mkdir(parents=True)
    (real / "packages" / "old.py").write_text("leak")
    (real / "keep.py").write_text("keep")
    (tmp_path / "link").symlink_to("real")
    _open_to_all(tmp_path)
    with backend.open(SandboxSpec(tree, (tmp_path / "link",), (real / "packages",))) as sandbox:
        names = [f"{folder}/{name}" for folder in ("link", "real") for name in ("keep.py", "packages/old.py")]
        seen = [sandbox.exec(["cat", str(tmp_path / name)], timeout_seconds=LONG).stdout for name in names]
    assert seen == ["keep", "", "keep", ""]


def test_installed_packages_of_the_base_interpreter_are_not_importable(jail: Sandbox) -> None:
    masked = [path for path in base_interpreter().masked if path.is_dir() and any(path.iterdir())]
    if not masked:
        pytest.skip("the base interpreter has no packages and no bundled wheels")
    code = (
        "import os, sys, json\n"
        "found = []\n"
        "for folder in json.load(sys.stdin):\n"
        " for place, _, names in os.walk(folder):\n"
        "  for name in names[:20]:\n"
        "   try: found += [name] if open(os.path.join(place, name), 'rb').read() else []\n"
        "   except OSError: pass\n"
        "print(found)"
    )
    names = json.dumps([str(path) for path in masked]).encode()
    assert jail.exec(python(code), timeout_seconds=LONG, stdin=names).stdout == "[]\n"
    result = jail.exec(python("import pip"), timeout_seconds=LONG)
    assert "ModuleNotFoundError" in result.stderr


def test_a_virtual_environment_works_and_brings_its_own_packages_only(
    backend: SandboxBackend, tree: Path, tmp_path: Path
) -> None:
    environment = tmp_path / "environment"
    subprocess.run([str(base_python()), "-m", "venv", "--without-pip", str(environment)], check=True)
    (packages,) = environment.glob("lib/python3*/site-packages")
    (packages / "of_the_task.py").write_text("word = 'shown'")
    _open_to_all(packages)
    for folder in (tmp_path, environment):
        folder.chmod(0o755)
    with backend.open(SandboxSpec(tree, (environment,))) as sandbox:
        python_of_it = str(environment / "bin" / "python")
        code = "import of_the_task, sys; print(of_the_task.word, sys.prefix)"
        result = sandbox.exec([python_of_it, "-c", code], timeout_seconds=LONG)
        absent = sandbox.exec([python_of_it, "-c", "import pip"], timeout_seconds=LONG)
    assert result.stdout == f"shown {environment}\n", result.stderr
    assert "ModuleNotFoundError" in absent.stderr


def test_the_standard_library_works(jail: Sandbox) -> None:
    code = "import asyncio, ctypes, json, sqlite3, ssl, subprocess, tempfile, threading, unittest, zoneinfo; print('ok')"
    result = jail.exec(python(code), timeout_seconds=LONG)
    assert (result.stdout, result.exit_code) == ("ok\n", 0), result.stderr


def test_links_that_one_command_plants_do_not_lead_the_next_one_s_mounts_out(
    backend: SandboxBackend, tree: Path, tmp_path: Path
) -> None:
    if "none" in backend.name or "fake" in type(backend).__module__:
        pytest.skip("without a jail this command would rename everything in the host's /tmp: NEVER run it so")
    victim = tmp_path / "victim"
    victim.mkdir(mode=0o777)
    victim.chmod(0o777)
    outside = tmp_path / "readable-outside-only"
    outside.write_text("x")
    script = (
        f"cat {outside} && exit 99\n"  # never on a machine's own folders, whatever the backend is
        "for base in /tmp /var/tmp /dev/shm $TMPDIR $HOME; do cd $base || continue; for name in *; do"
        f" mv $name moved-$name; ln -s /oldroot{victim} $name; done; ln -s /oldroot{victim} planted; done; true"
    )
    with backend.open(SandboxSpec(tree)) as sandbox:
        assert sandbox.exec(["sh", "-c", script], timeout_seconds=LONG).exit_code == 0
        result = sandbox.exec(["sh", "-c", "pwd; echo x > written"], timeout_seconds=LONG)
    assert list(victim.iterdir()) == []
    assert (result.exit_code, result.stdout) == (0, f"{tree}\n")
    assert (tree / "written").read_text() == "x\n"


def test_a_hard_link_in_the_tree_does_not_reach_the_file_outside(
    backend: SandboxBackend, tree: Path, tmp_path: Path
) -> None:
    outside = tmp_path / "outside.txt"
    outside.write_text("original")
    os.link(outside, tree / "linked")
    with backend.open(SandboxSpec(tree)) as sandbox:
        assert (
            sandbox.exec(["sh", "-c", "cat linked; echo changed > linked"], timeout_seconds=LONG).stdout
            == "original"
        )
    assert outside.read_text() == "original"
    assert (tree / "linked").read_text() == "changed\n"
    assert outside.stat().st_uid == os.geteuid()


def test_folders_that_the_jail_closed_are_open_again(backend: SandboxBackend, tree: Path) -> None:
    with backend.open(SandboxSpec(tree)) as sandbox:
        sandbox.exec(["sh", "-c", "mkdir -p a/b; echo x > a/b/c; chmod 000 a/b a"], timeout_seconds=LONG)
    shutil.rmtree(tree / "a")
    assert not (tree / "a").exists()


def test_eight_sandboxes_at_once(backend: SandboxBackend, tmp_path: Path) -> None:
    def one(number: int) -> tuple[str, str]:
        tree = tmp_path / f"tree{number}"
        tree.mkdir()
        with backend.open(SandboxSpec(tree)) as sandbox:
            script = f"echo {number} > mine; sleep 0.2; cat mine; ls"
            return sandbox.exec(["sh", "-c", script], timeout_seconds=LONG).stdout, (
                tree / "mine"
            ).read_text()

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(one, range(8)))
    assert answers == [(f"{number}\nmine\n", f"{number}\n") for number in range(8)]


def test_several_commands_in_one_sandbox_at_once(jail: Sandbox) -> None:
    with ThreadPoolExecutor(4) as pool:
        results = list(
            pool.map(lambda n: jail.exec(["sh", "-c", f"exit {n}"], timeout_seconds=LONG), range(6))
        )
    assert [result.exit_code for result in results] == list(range(6))


def test_close_is_idempotent_and_leaves_no_folder(backend: SandboxBackend, tree: Path) -> None:
    sandbox = backend.open(SandboxSpec(tree))
    home = Path(
        sandbox.exec(
            ["sh", "-c", "echo $HOME; mkdir -p $HOME/a; chmod 0 $HOME/a"], timeout_seconds=LONG
        ).stdout.strip()
    )
    assert home.is_dir()
    sandbox.close()
    sandbox.close()
    assert not home.parent.exists()
    assert tree.is_dir()
    with pytest.raises(SandboxFailure) as caught:
        sandbox.exec(["true"], timeout_seconds=LONG)
    assert caught.value.code == "CR0303"


def test_the_tree_must_be_a_folder(backend: SandboxBackend, tmp_path: Path) -> None:
    with pytest.raises(SandboxFailure) as caught:
        backend.open(SandboxSpec(tmp_path / "absent"))
    assert caught.value.code == "CR0304"


def test_a_missing_read_only_path(backend: SandboxBackend, tree: Path, tmp_path: Path) -> None:
    with pytest.raises(SandboxFailure) as caught:
        backend.open(SandboxSpec(tree, (tmp_path / "absent",)))
    assert caught.value.code == "CR0304"


@pytest.mark.parametrize("kind", ["read_only", "masked"])
def test_the_tree_holds_nothing_read_only_or_masked(backend: SandboxBackend, tree: Path, kind: str) -> None:
    (tree / "inner").mkdir()
    paths = (tree / "inner",)
    spec = SandboxSpec(tree, read_only=paths) if kind == "read_only" else SandboxSpec(tree, masked=paths)
    with pytest.raises(SandboxFailure) as caught:
        backend.open(spec)
    assert caught.value.code == "CR0304"


def test_an_interruption_kills_the_tree(jail: Sandbox) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    token = uuid.uuid4().hex
    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.7)
    try:
        with pytest.raises(KeyboardInterrupt):
            jail.exec(["sh", "-c", f"setsid sh -c 'sleep 99; : {token}' & sleep 99"], timeout_seconds=LONG)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert living(token) == []
    assert jail.exec(["echo", "on"], timeout_seconds=LONG).stdout == "on\n"


def test_the_jail_dies_with_us(backend: SandboxBackend, tree: Path) -> None:
    token = uuid.uuid4().hex
    code = (
        "import sys; from pathlib import Path\n"
        "from composer_replication.records import SandboxSpec\n"
        "from composer_replication.sandbox import accept, choose_backend\n"
        "accept(['everything'])\n"
        f"sandbox = choose_backend({backend.name!r}).open(SandboxSpec(Path({str(tree)!r})))\n"
        "print(sandbox._jailed.scratch.root, flush=True)\n"
        f"sandbox.exec(['sh', '-c', 'setsid sh -c \"echo > up; sleep 99; : {token}\" & sleep 99'], timeout_seconds=90)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        [sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        scratch = process.stdout.readline().strip()
        _wait(lambda: (tree / "up").exists())
        assert living(token)
        process.kill()
    _wait(lambda: not living(token))
    shutil.rmtree(scratch)


def test_nothing_is_left_to_collect_when_orphans_come_to_us(backend: SandboxBackend, tree: Path) -> None:
    """As process 1 of a container: who is orphaned becomes our child, and a zombie if nobody asks for it."""
    code = (
        "import ctypes, os; from pathlib import Path\n"
        "from composer_replication.records import SandboxSpec\n"
        "from composer_replication.sandbox import accept, choose_backend\n"
        "accept(['everything'])\n"
        "ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # a subreaper\n"
        f"backend = choose_backend({backend.name!r})\n"
        f"with backend.open(SandboxSpec(Path({str(tree)!r}))) as sandbox:\n"
        " for script in ('true', 'sleep 99 & true', 'setsid sleep 99 & sleep 99'):\n"
        "  sandbox.exec(['sh', '-c', script], timeout_seconds=2)\n"
        "try: print(os.waitpid(-1, os.WNOHANG))\n"
        "except ChildProcessError: print('none')\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout == "none\n"


def _wait(condition: object, patience_seconds: float = 30.0) -> None:
    assert callable(condition)
    deadline = time.monotonic() + patience_seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.02)


def _open_to_all(path: Path) -> None:
    """As root the jail runs as another user: only the jail may be what stops it."""
    for entry in (path, *path.rglob("*")):
        entry.chmod(0o755 if entry.is_dir() else 0o644)


@pytest.mark.skipif(os.geteuid() != 0, reason="the other tests run as an ordinary user already")
@pytest.mark.parametrize("name", sorted(set(BACKENDS) - set(ONLY_BY_NAME)))
def test_every_guard_holds_for_an_ordinary_user(name: str) -> None:
    """The self-test again, without root: other code paths protect an ordinary user."""
    as_user = ["setpriv", "--reuid", "64123", "--regid", "64123", "--clear-groups"]
    ask = "import os, sys; sys.exit(sys.version_info < (3, 11) or not os.access(sys.executable, os.R_OK))"
    candidates = [str(base_python()), "/usr/local/bin/python3", "/usr/bin/python3"]
    usable = [
        p
        for p in candidates
        if subprocess.run([*as_user, p, "-c", ask], check=False, capture_output=True).returncode == 0
    ]
    if not usable:
        pytest.skip("no Python 3.11 here that an ordinary user may start")
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "source"
        shutil.copytree(SOURCE / "composer_replication", source / "composer_replication")
        if name == "sandlock":
            sandlock = pytest.importorskip("sandlock")
            shutil.copytree(Path(sandlock.__file__).parent, source / "sandlock")
        (Path(folder) / "tmp").mkdir()
        _open_to_all(Path(folder))
        (Path(folder) / "tmp").chmod(0o777)
        code = (
            "import json; from composer_replication.sandbox import choose_backend, run_selftest\n"
            f"backend = choose_backend({name!r}); check = backend.is_available()\n"
            "print(json.dumps([check.ok, check.detail, [(c.name, c.ok, c.detail) for c in run_selftest(backend)]]))"
        )
        environment = {
            "PYTHONPATH": str(source),
            "PATH": os.defpath,
            "TMPDIR": f"{folder}/tmp",
            "HOME": f"{folder}/tmp",
        }
        done = subprocess.run(
            [*as_user, usable[0], "-B", "-c", code],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            cwd="/",
        )
        assert done.returncode == 0, done.stderr
        is_available, detail, checks = json.loads(done.stdout)
        if not is_available:
            pytest.skip(f"{name} is not available to an ordinary user here: {detail}")
        assert [check for check in checks if not check[1]] == []
        assert len(checks) >= 12
        assert list((Path(folder) / "tmp").iterdir()) == []
