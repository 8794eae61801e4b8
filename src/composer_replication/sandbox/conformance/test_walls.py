"""What a command can see and change."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from composer_replication.interfaces import Sandbox, SandboxBackend
from composer_replication.records import SandboxSpec
from composer_replication.sandbox import base_interpreter, base_python
from composer_replication.sandbox.conformance.programs import open_to_all, python, run


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


def test_hidden_folders_beside_the_tree(jail: Sandbox, tmp_path: Path) -> None:
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    (hidden / "tests.txt").write_text("assert answer == 42")
    open_to_all(hidden)
    for script in (f"cat {hidden}/tests.txt", "cat ../hidden/tests.txt", f"ln {hidden}/tests.txt l && cat l",
                   f"ln -s {hidden}/tests.txt s; cat s", f"grep -r answer {tmp_path}", "cat /proc/1/root/etc/shadow"):  # fmt: skip
        result = run(jail, script)
        assert "42" not in result.stdout, script
        assert result.exit_code != 0, script


def test_masked_paths(backend: SandboxBackend, tree: Path, tmp_path: Path) -> None:
    shown = tmp_path / "shown"
    for name in ("a/keep", "a/hide", "b/c/keep", "b/c/d/hide"):
        (shown / name).parent.mkdir(parents=True, exist_ok=True)
        (shown / name).write_text(f"text of {name}")
    open_to_all(tmp_path)
    spec = SandboxSpec(tree, (shown,), (shown / "a" / "hide", shown / "b" / "c" / "d", shown / "absent"))
    with backend.open(spec) as sandbox:
        seen = {
            name: run(sandbox, ["cat", str(shown / name)]).stdout
            for name in ("a/keep", "a/hide", "b/c/keep", "b/c/d/hide")
        }
        link = run(sandbox, f"ln {shown}/a/hide l && cat l")
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
    open_to_all(tmp_path)
    with backend.open(SandboxSpec(tree, (tmp_path / "link",), (real / "packages",))) as sandbox:
        names = [f"{folder}/{name}" for folder in ("link", "real") for name in ("keep.py", "packages/old.py")]
        seen = [run(sandbox, ["cat", str(tmp_path / name)]).stdout for name in names]
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


def test_the_standard_library_works(jail: Sandbox) -> None:
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
