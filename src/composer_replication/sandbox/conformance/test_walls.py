"""What a command can see and change; and what is left when it, or the process that opened its jail, has ended: nothing."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import uuid
from pathlib import Path

import pytest

from composer_replication.records import SandboxSpec
from composer_replication.sandbox import LocalSandbox, SandboxBackend, base_interpreter, base_python
from composer_replication.sandbox.conformance.plugin import (
    living,
    open_to_all,
    python,
    run,
    start_ours,
    wait_until,
)


def test_writes_reach_the_tree_and_only_the_tree(backend: SandboxBackend, tree: Path, tmp_path: Path) -> None:
    shown = tmp_path / "shown"
    (shown / "deep").mkdir(parents=True)
    (shown / "deep" / "file").write_text("shown")
    open_to_all(tmp_path)
    with backend.open(SandboxSpec(tree, read_only=(shown,))) as sandbox:
        script = f"cat {shown}/deep/file; echo mine > inside; mkdir sub; echo x > sub/y"
        result = run(sandbox, script)
        places = (shown / "new", shown / "deep" / "file", "/etc/new", "/usr/bin/new", "/new")
        refused = [run(sandbox, f"echo x > {place}").exit_code for place in places]
        run(sandbox, f"echo x > {tmp_path}/new")
    assert not (tmp_path / "new").exists()  # perhaps it was written to the private /tmp
    assert (result.exit_code, result.stdout) == (0, "shown")
    assert 0 not in refused
    assert (tree / "inside").read_text() == "mine\n"
    assert (shown / "deep" / "file").read_text() == "shown"
    owners = {path.lstat().st_uid for path in (tree, *tree.rglob("*"))}
    assert owners == {os.geteuid()}


_CHANGE_ALL = """
import ctypes, os, threading
from contextlib import suppress
PR_SET_DUMPABLE = 4
def attempt(function, *arguments, **options):
    with suppress(OSError):
        return function(*arguments, **options)
os.symlink(OUTSIDE, "door"), os.symlink(SHOWN, "glass"), os.mkfifo("pipe"), os.symlink("file", "own")
open("file", "w").close(), os.mkdir("sub")
for name in (OUTSIDE, SHOWN, os.path.dirname(SHOWN), "door", "glass"):
    for change in (lambda name: os.chmod(name, 0o777), lambda name: os.utime(name, (1, 1)), lambda name: os.chown(name, -1, -1)):
        attempt(change, name)
        with suppress(OSError):
            change(os.open(name, os.O_RDONLY))
def swap():
    while not ended.is_set():
        for target in ("file", OUTSIDE, SHOWN):
            os.symlink(target, "new")
            os.rename("new", "swapped")
ended = threading.Event()
swapper = threading.Thread(target=swap)
swapper.start()
for _ in range(200):
    attempt(os.chmod, "swapped", 0o777)
    attempt(os.utime, "swapped", (1, 1))
ended.set(), swapper.join()
os.chmod("file", 0o741), os.chmod("pipe", 0o640), os.chmod("sub", 0o750), os.utime("own", (3, 4))
os.utime("door", (5, 6), follow_symlinks=False)
opened = os.open("sub", os.O_RDONLY)
os.utime(opened, (7, 8)), os.chmod("../file", 0o740, dir_fd=opened), os.chown(opened, os.getuid(), os.getgid())
print(os.readlink("own"), attempt(os.readlink, POINTER), [path for path in ("none", "file/x") if attempt(os.chmod, path, 0)])
found = [os.lstat(name) for name in ("file", "pipe", "sub", "door")]
print([oct(info.st_mode & 0o777) for info in found[:3]], *(int(found[place].st_mtime) for place in (0, 2, 3)), flush=True)
ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0)  # now nobody may look into its memory
attempt(os.chmod, OUTSIDE, 0o777)
"""


def test_modes_times_and_links_are_its_own_inside_and_closed_outside(
    backend: SandboxBackend, tree: Path, tmp_path: Path
) -> None:
    (tmp_path / "shown").mkdir()
    shown, outside, pointer = tmp_path / "shown" / "file", tmp_path / "secret", tmp_path / "pointer"
    shown.write_text("shown")
    open_to_all(tmp_path)
    pointer.symlink_to("/a name that is not told")
    for path in (outside, shown):
        path.chmod(0o2754)

    def facts() -> list[tuple[int, float]]:
        found = [path.stat() for path in (outside, shown, shown.parent)]
        return [(info.st_mode, info.st_mtime) for info in found]

    before = facts()
    names = f"OUTSIDE, SHOWN, POINTER = {[str(path) for path in (outside, shown, pointer)]}\n"
    with backend.open(SandboxSpec(tree, read_only=(shown.parent,))) as sandbox:
        result = run(sandbox, python(names + _CHANGE_ALL))
    assert facts() == before
    assert result.exit_code == 0, result.stderr
    assert result.stdout == "file None []\n['0o740', '0o640', '0o750'] 4 8 6\n"


def test_a_tree_below_a_shown_folder_is_writable(backend: SandboxBackend, tmp_path: Path) -> None:
    shown = tmp_path / "shown"
    inner = shown / "tree"
    inner.mkdir(parents=True)
    open_to_all(tmp_path)
    with backend.open(SandboxSpec(inner, read_only=(shown,))) as sandbox:
        assert run(sandbox, "pwd; echo x > y").stdout == f"{inner}\n"
    assert (inner / "y").read_text() == "x\n"


def test_hidden_folders_beside_the_tree(jail: LocalSandbox, tmp_path: Path) -> None:
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    (hidden / "tests.txt").write_text("assert answer == 42")
    open_to_all(hidden)
    for script in (f"cat {hidden}/tests.txt", "cat ../hidden/tests.txt", f"ln {hidden}/tests.txt l && cat l",
                   f"ln -s {hidden}/tests.txt s; cat s", f"grep -r answer {tmp_path}", "cat /proc/1/root/etc/shadow"):  # fmt: skip
        result = run(jail, script)
        assert "42" not in result.stdout, script
        assert result.exit_code != 0, script


@pytest.mark.parametrize("shown", ["real", "link"])
def test_masked_paths(backend: SandboxBackend, tree: Path, tmp_path: Path, shown: str) -> None:
    real = tmp_path / "real"
    files = ("a/keep", "a/hide", "b/c/keep", "b/c/d/hide")
    for name in files:
        (real / name).parent.mkdir(parents=True, exist_ok=True)
        (real / name).write_text("text")
    (tmp_path / "link").symlink_to("real")
    open_to_all(tmp_path)
    spec = SandboxSpec(
        tree, (tmp_path / shown,), (real / "a" / "hide", real / "b" / "c" / "d", real / "absent")
    )
    with backend.open(spec) as sandbox:
        for folder in ("real", shown):
            seen = [run(sandbox, ["cat", str(tmp_path / folder / name)]).stdout for name in files]
            assert seen == ["text", "", "text", ""]
            assert "text" not in run(sandbox, f"ln -f {tmp_path}/{folder}/a/hide l && cat l").stdout


def test_installed_packages_of_the_base_interpreter_are_not_importable(jail: LocalSandbox) -> None:
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
    assert run(jail, python(code), stdin=names).stdout == "[]\n"
    result = run(jail, python("import pip"))
    assert "ModuleNotFoundError" in result.stderr


def test_a_virtual_environment_works_and_brings_its_own_packages_only(
    backend: SandboxBackend, tree: Path, tmp_path: Path
) -> None:
    environment = tmp_path / "environment"
    subprocess.run([str(base_python()), "-m", "venv", "--without-pip", str(environment)], check=True)
    (packages,) = environment.glob("lib/python3*/site-packages")
    (packages / "of_the_task.py").write_text("word = 'shown'")
    open_to_all(packages)
    for folder in (tmp_path, environment):
        folder.chmod(0o755)
    with backend.open(SandboxSpec(tree, (environment,))) as sandbox:
        python_of_it = str(environment / "bin" / "python")
        code = "import of_the_task, sys; print(of_the_task.word, sys.prefix)"
        result = run(sandbox, [python_of_it, "-c", code])
        absent = run(sandbox, [python_of_it, "-c", "import pip"])
    assert result.stdout == f"shown {environment}\n", result.stderr
    assert "ModuleNotFoundError" in absent.stderr


def test_the_standard_library_works(jail: LocalSandbox) -> None:
    code = "import asyncio, ctypes, json, sqlite3, ssl, subprocess, tempfile, threading, unittest, zoneinfo; print('ok')"
    result = run(jail, python(code))
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
        assert run(sandbox, script).exit_code == 0
        result = run(sandbox, "pwd; echo x > written")
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
        assert run(sandbox, "cat linked; echo changed > linked").stdout == "original"
    assert outside.read_text() == "original"
    assert (tree / "linked").read_text() == "changed\n"
    assert outside.stat().st_uid == os.geteuid()


OPENED = """
import ctypes, os
from pathlib import Path
from composer_replication.records import SandboxSpec
from composer_replication.sandbox import accept, choose_backend
accept(['everything'])
{before}
with choose_backend({name!r}).open(SandboxSpec(Path({tree!r}))) as sandbox:
    for script in {scripts!r}:
        sandbox.exec(['sh', '-c', script], timeout_seconds={seconds})
{after}
"""


def start(
    backend: str, tree: Path, scripts: list[str], seconds: int, *, before: str = "", after: str = ""
) -> subprocess.Popen[str]:
    """A process of ours that runs these in a sandbox."""
    given = {"name": backend, "tree": str(tree), "scripts": scripts, "seconds": seconds}
    return start_ours(OPENED.format(**given, before=before, after=after), tree.parent)


def test_an_interruption_kills_the_tree(jail: LocalSandbox) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    token = uuid.uuid4().hex
    gc.collect()  # an interruption is lost in a finaliser of what other tests have left
    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.7)
    try:
        with pytest.raises(KeyboardInterrupt):
            run(jail, f"setsid sh -c 'sleep 99; : {token}' & sleep 99")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert living(token) == []
    assert run(jail, ["echo", "on"]).stdout == "on\n"


def test_the_jail_dies_with_us(backend: SandboxBackend, backend_name: str, tree: Path) -> None:
    token = uuid.uuid4().hex
    script = f"setsid sh -c 'echo > up; sleep 99; : {token}' & sleep 99"
    with start(backend_name, tree, [script], 90) as process:
        wait_until((tree / "up").exists)
        assert living(token)
        process.kill()
    wait_until(lambda: not living(token))


def test_nothing_is_left_to_collect_when_orphans_come_to_us(
    backend: SandboxBackend, backend_name: str, tree: Path
) -> None:
    """As process 1 of a container: who is orphaned becomes our child, and a zombie if nobody asks for it."""
    subreaper = "ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)"
    ask = "try: print(os.waitpid(-1, os.WNOHANG))\nexcept ChildProcessError: print('none')"
    scripts = ["true", "sleep 99 & true", "setsid sleep 99 & sleep 99"]
    with start(backend_name, tree, scripts, 2, before=subreaper, after=ask) as process:
        assert process.stdout is not None
        assert process.stdout.read() == "none\n"
    assert process.returncode == 0
