"""What is left when a command, a sandbox or the process that opened it has ended: nothing."""

from __future__ import annotations

import shutil
import signal
import subprocess
import uuid
from pathlib import Path

import pytest

from composer_replication.errors import SandboxFailure
from composer_replication.interfaces import Sandbox, SandboxBackend
from composer_replication.records import SandboxSpec
from composer_replication.sandbox.conformance.programs import living, run, start_ours, wait_until

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
    code = OPENED.format(
        name=backend, tree=str(tree), scripts=scripts, seconds=seconds, before=before, after=after
    )
    return start_ours(code, tree.parent)


def test_folders_that_the_jail_closed_are_open_again(backend: SandboxBackend, tree: Path) -> None:
    with backend.open(SandboxSpec(tree)) as sandbox:
        run(sandbox, "mkdir -p a/b; echo x > a/b/c; chmod 000 a/b a")
    shutil.rmtree(tree / "a")
    assert not (tree / "a").exists()


def test_close_is_idempotent_and_leaves_no_folder(backend: SandboxBackend, tree: Path) -> None:
    sandbox = backend.open(SandboxSpec(tree))
    home = Path(run(sandbox, "echo $HOME; mkdir -p $HOME/a; chmod 0 $HOME/a").stdout.strip())
    assert home.is_dir()
    sandbox.close()
    sandbox.close()
    assert not home.parent.exists()
    assert tree.is_dir()
    with pytest.raises(SandboxFailure) as caught:
        run(sandbox, ["true"])
    assert caught.value.code == "CR0303"


def require_refused(backend: SandboxBackend, spec: SandboxSpec) -> None:
    """It cannot be opened."""
    with pytest.raises(SandboxFailure) as caught:
        backend.open(spec)
    assert caught.value.code == "CR0304"


def test_the_tree_must_be_a_folder(backend: SandboxBackend, tmp_path: Path) -> None:
    require_refused(backend, SandboxSpec(tmp_path / "absent"))


def test_a_missing_read_only_path(backend: SandboxBackend, tree: Path, tmp_path: Path) -> None:
    require_refused(backend, SandboxSpec(tree, (tmp_path / "absent",)))


@pytest.mark.parametrize("kind", ["read_only", "masked"])
def test_the_tree_holds_nothing_read_only_or_masked(backend: SandboxBackend, tree: Path, kind: str) -> None:
    inner = (tree / "inner",)
    inner[0].mkdir()
    require_refused(
        backend, SandboxSpec(tree, inner) if kind == "read_only" else SandboxSpec(tree, (), inner)
    )


def test_an_interruption_kills_the_tree(jail: Sandbox) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    token = uuid.uuid4().hex
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
