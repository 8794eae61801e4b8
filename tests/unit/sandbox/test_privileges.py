"""What still runs with privileges is chosen by nobody but us; where there are none, a jail goes without."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from finished import finished

from composer_replication.records import SandboxSpec
from composer_replication.sandbox import choose_backend, open_sandbox, privileges, run_selftest
from composer_replication.sandbox.bubblewrap import BubblewrapSandbox, HeldJail
from composer_replication.sandbox.privileges import drops_uid

BACKENDS = ["bubblewrap", "bubblewrap-warm", "sandlock"]
PROGRAMS = ["setpriv", "sh", "env", "bwrap", "python3"]
TELLING = '#!/bin/sh\n{ id -u; grep CapEff /proc/self/status || echo CapEff: 0; } >> said\nexec "/usr/bin/${0##*/}" "$@"\n'
needs_privileges = pytest.mark.skipif(not drops_uid(), reason="only root changes the user id of a jail")


def is_here(name: str) -> None:
    check = choose_backend(name).is_available()
    if not check.ok:
        pytest.skip(check.detail)


@pytest.fixture
def poisoned(tmp_path: Path) -> Path:
    """A tree with programs that tell who runs them."""
    tree = tmp_path / "tree"
    (tree / "bin").mkdir(parents=True)
    for name in PROGRAMS:
        (tree / "bin" / name).write_text(TELLING)
        (tree / "bin" / name).chmod(0o755)
    return tree


@pytest.mark.parametrize("name", BACKENDS)
def test_the_path_of_a_command_chooses_no_program_of_ours(name: str, poisoned: Path) -> None:
    is_here(name)
    with open_sandbox(SandboxSpec(poisoned), name) as sandbox:
        path = f"{poisoned}/bin:/usr/bin:/bin"
        done = sandbox.exec("id -u", timeout_seconds=20, env={"PATH": path})
        who = done.stdout.strip()
        assert done.exit_code == 0, done.stderr
        sandbox.exec(
            "env true", timeout_seconds=20, env={"PATH": path}
        )  # the command's own choice is its own
        lines = sandbox.read_file("said").decode().split("\n")
    seen = list(zip(lines[::2], lines[1::2], strict=False))
    assert seen
    assert all(user == who and re.fullmatch(r"CapEff:\s*0+", capabilities) for user, capabilities in seen)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("variable", ["LD_LIBRARY_PATH", "LD_PRELOAD"])
def test_libraries_of_a_command_are_no_business_of_ours(name: str, variable: str, tmp_path: Path) -> None:
    is_here(name)
    library = tmp_path / "libcap-ng.so.0"
    library.write_bytes(b"junk")
    value = str(library if variable == "LD_PRELOAD" else tmp_path)
    with open_sandbox(SandboxSpec(tmp_path), name) as sandbox:
        done = sandbox.exec(["/bin/echo", "ran"], timeout_seconds=20, env={variable: value})
    assert (done.exit_code, done.stdout) == (0, "ran\n")


@needs_privileges
@pytest.mark.parametrize("name", BACKENDS[:2])
def test_what_starts_a_jail_can_change_the_user_id_and_nothing_else(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_here(name)
    seen: list[str] = []
    release = HeldJail.release

    def look(jail: HeldJail, limits: list[tuple[int, int]]) -> None:
        release(jail, limits)
        for _ in range(200):  # until bwrap has set itself up
            text = Path(f"/proc/{jail.init_pid}/status").read_text()
            if "CapBnd:\t00000000000000c0" in text:
                break
            os.sched_yield()
        seen.append(text)

    monkeypatch.setattr(HeldJail, "release", look)
    with open_sandbox(SandboxSpec(tmp_path), name) as sandbox:
        done = sandbox.exec("sleep 0.2; grep Cap /proc/self/status", timeout_seconds=20)
    assert seen
    for line in done.stdout.splitlines():
        allowed = {"0000000000000000", "00000000000000c0"} if line.startswith("CapBnd") else {"0" * 16}
        assert line.split()[1] in allowed, line


@pytest.mark.skipif(shutil.which("unshare") is None, reason="unshare (util-linux) is not installed")
@pytest.mark.parametrize("name", BACKENDS)
def test_root_of_a_namespace_with_no_other_user(name: str, tmp_path: Path) -> None:
    """As in ``unshare -r`` and containers of an ordinary user."""
    is_here(name)
    (tmp_path / "tree").mkdir()
    code = (
        "import sys\nfrom pathlib import Path\nfrom composer_replication.records import SandboxSpec\n"
        "from composer_replication.sandbox import open_sandbox\n"
        "with open_sandbox(SandboxSpec(Path(sys.argv[1])), sys.argv[2]) as sandbox:\n"
        "    done = sandbox.exec('echo a > b; cat b', timeout_seconds=20)\n"
        "print(done.exit_code, done.stdout, done.stderr)\n"
    )
    words = ["unshare", "-Ur", sys.executable, "-c", code, str(tmp_path / "tree"), name]
    if finished(["unshare", "-Ur", "true"]).returncode:
        pytest.skip("user namespaces are forbidden here")
    done = finished(words, timeout=100)
    assert done.stdout.startswith("0 a\n"), done.stdout + done.stderr


def test_two_jails_never_share_a_user_of_a_container(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(privileges, "_are_mapped", lambda ids: ids is privileges._SMALL)
    monkeypatch.setattr(privileges, "_SMALL", range(31234, 31237))
    monkeypatch.setattr(privileges, "_NUM_TRIES", 200)
    drawn = [privileges.reserve_uid() for _ in range(3)]
    assert sorted(drawn) == [31234, 31235, 31236]
    with pytest.raises(OSError, match="no user id is free"):
        privileges.reserve_uid()
    code = (
        "from composer_replication.sandbox import privileges\n"
        "privileges._are_mapped = lambda ids: ids is privileges._SMALL\n"
        "privileges._SMALL = range(31234, 31237)\nprint(privileges.reserve_uid())\n"
    )
    other = [sys.executable, "-c", code]
    assert "no user id is free" in finished(other).stderr
    privileges.release_uid(31235)
    assert finished(other).stdout == "31235\n"
    assert privileges.reserve_uid() == 31235
    for uid in drawn:
        privileges.release_uid(uid)
    privileges.release_uid(None)
    assert not privileges._reserved


@pytest.mark.parametrize("name", BACKENDS[:2])
def test_the_user_of_a_jail_is_free_again_after_it(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_here(name)
    if not drops_uid():
        pytest.skip("only root changes the user id of a jail")
    monkeypatch.setattr(privileges, "_are_mapped", lambda ids: ids is privileges._SMALL)
    with open_sandbox(SandboxSpec(tmp_path), name) as sandbox:
        assert len(privileges._reserved) == 1
        done = sandbox.exec("id -u", timeout_seconds=20)
        assert int(done.stdout) in privileges._reserved
    assert not privileges._reserved
    (tmp_path / "file").write_text("")
    with pytest.raises(Exception, match="CR0304"):
        open_sandbox(SandboxSpec(tmp_path / "file"), name)
    assert not privileges._reserved


@pytest.mark.parametrize("name", BACKENDS)
def test_whoever_may_have_less_gives_less(name: str, tmp_path: Path) -> None:
    is_here(name)
    code = (
        "import resource, sys; from pathlib import Path\n"
        "from composer_replication.records import SandboxSpec\n"
        "from composer_replication.sandbox import open_sandbox\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (120, 120))\n"
        "with open_sandbox(SandboxSpec(Path(sys.argv[1])), sys.argv[2]) as sandbox:\n"
        " print(sandbox.exec('ulimit -n', timeout_seconds=20).stdout)"
    )
    done = finished([sys.executable, "-c", code, tmp_path, name])
    assert done.stdout.strip() == "120", done.stderr


@needs_privileges
def test_the_self_test_sees_a_jail_that_is_started_by_a_program_of_its_tree(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    is_here("bubblewrap")
    command = BubblewrapSandbox._command

    def found_by_name(
        self: BubblewrapSandbox, argv: Sequence[str], env: Mapping[str, str], *rest: Any, **options: Any
    ) -> list[str]:
        words = command(self, argv, env, *rest, **options)
        words[words.index("--cap-drop") + 1] = "CAP_SYS_TIME"
        at = words.index("--")
        return [*words[:at], "--setenv", "PATH", env["PATH"], "--", "setpriv", *words[at + 2 :]]

    with monkeypatch.context() as patch:
        patch.setattr(BubblewrapSandbox, "_command", found_by_name)
        (check,) = run_selftest(choose_backend("bubblewrap"), names=["privilege"])
    assert (check.ok, check.detail) == (False, "setpriv of its tree ran with capabilities")
    (check,) = run_selftest(choose_backend("bubblewrap"), names=["privilege"])
    assert check.ok, check.detail
