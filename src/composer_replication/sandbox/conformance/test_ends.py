"""What is left when a command, a sandbox or the process that opened it has ended: nothing."""

from __future__ import annotations

import shutil
import signal
import uuid
from pathlib import Path

import pytest

from composer_replication.errors import SandboxFailure
from composer_replication.interfaces import Sandbox, SandboxBackend
from composer_replication.records import SandboxSpec
from composer_replication.sandbox.conformance.programs import LONG_SECONDS, living, start_ours, wait_until


def test_folders_that_the_jail_closed_are_open_again(backend: SandboxBackend, tree: Path) -> None:
    with backend.open(SandboxSpec(tree)) as sandbox:
        sandbox.exec(
            ["sh", "-c", "mkdir -p a/b; echo x > a/b/c; chmod 000 a/b a"], timeout_seconds=LONG_SECONDS
        )
    shutil.rmtree(tree / "a")
    assert not (tree / "a").exists()


def test_close_is_idempotent_and_leaves_no_folder(backend: SandboxBackend, tree: Path) -> None:
    sandbox = backend.open(SandboxSpec(tree))
    home = Path(
        sandbox.exec(
            ["sh", "-c", "echo $HOME; mkdir -p $HOME/a; chmod 0 $HOME/a"], timeout_seconds=LONG_SECONDS
        ).stdout.strip()
    )
    assert home.is_dir()
    sandbox.close()
    sandbox.close()
    assert not home.parent.exists()
    assert tree.is_dir()
    with pytest.raises(SandboxFailure) as caught:
        sandbox.exec(["true"], timeout_seconds=LONG_SECONDS)
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
            jail.exec(
                ["sh", "-c", f"setsid sh -c 'sleep 99; : {token}' & sleep 99"], timeout_seconds=LONG_SECONDS
            )
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert living(token) == []
    assert jail.exec(["echo", "on"], timeout_seconds=LONG_SECONDS).stdout == "on\n"


def test_the_jail_dies_with_us(
    backend: SandboxBackend, backend_name: str, tree: Path, tmp_path: Path
) -> None:
    token = uuid.uuid4().hex
    code = (
        "from pathlib import Path\n"
        "from composer_replication.records import SandboxSpec\n"
        "from composer_replication.sandbox import accept, choose_backend\n"
        "accept(['everything'])\n"
        f"sandbox = choose_backend({backend_name!r}).open(SandboxSpec(Path({str(tree)!r})))\n"
        f"sandbox.exec(['sh', '-c', 'setsid sh -c \"echo > up; sleep 99; : {token}\" & sleep 99'], timeout_seconds=90)\n"
    )
    with start_ours(code, tmp_path) as process:
        wait_until((tree / "up").exists)
        assert living(token)
        process.kill()
    wait_until(lambda: not living(token))


def test_nothing_is_left_to_collect_when_orphans_come_to_us(
    backend: SandboxBackend, backend_name: str, tree: Path, tmp_path: Path
) -> None:
    """As process 1 of a container: who is orphaned becomes our child, and a zombie if nobody asks for it."""
    code = (
        "import ctypes, os; from pathlib import Path\n"
        "from composer_replication.records import SandboxSpec\n"
        "from composer_replication.sandbox import accept, choose_backend\n"
        "accept(['everything'])\n"
        "ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # a subreaper\n"
        f"backend = choose_backend({backend_name!r})\n"
        f"with backend.open(SandboxSpec(Path({str(tree)!r}))) as sandbox:\n"
        " for script in ('true', 'sleep 99 & true', 'setsid sleep 99 & sleep 99'):\n"
        "  sandbox.exec(['sh', '-c', script], timeout_seconds=2)\n"
        "try: print(os.waitpid(-1, os.WNOHANG))\n"
        "except ChildProcessError: print('none')\n"
    )
    with start_ours(code, tmp_path) as process:
        assert process.stdout is not None
        assert process.stdout.read() == "none\n"
    assert process.returncode == 0
