"""The process that opens a sandbox is killed at the worst moments: the command does not run without it."""

from __future__ import annotations

import uuid
from contextlib import suppress
from pathlib import Path

import pytest

from composer_replication.sandbox import choose_backend
from composer_replication.sandbox.conformance.programs import living, start_ours, wait_until

DIES = """
import os, signal
from pathlib import Path
from composer_replication.records import SandboxSpec
from composer_replication.sandbox import bubblewrap, choose_backend
def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)
{patch}
with choose_backend({name!r}).open(SandboxSpec(Path({tree!r}))) as sandbox:
    sandbox.exec("touch ran; : {token}; sleep 600", timeout_seconds=600)
"""
MOMENTS = {
    "bwrap is started and not yet bound to us": "bubblewrap.HeldJail.release = die",
    "the jail is released and its first process perhaps not bound": "bubblewrap.read_until = die",
    "never": "",
}


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("name", ["bubblewrap", "bubblewrap-warm"])
def test_a_command_does_not_run_without_its_owner(name: str, moment: str, tmp_path: Path) -> None:
    check = choose_backend(name).is_available()
    if not check.ok:
        pytest.skip(f"not available here: {check.detail}")
    if name.endswith("warm") and "read_until" in MOMENTS[moment]:
        pytest.skip("a warm jail is not started in this way")
    tree = tmp_path / "tree"
    tree.mkdir()
    token = uuid.uuid4().hex
    code = DIES.format(patch=MOMENTS[moment], name=name, tree=str(tree), token=token)
    with start_ours(code, tmp_path) as process:
        if not MOMENTS[moment]:  # the counterpart: with a living owner it runs
            wait_until((tree / "ran").exists)
            process.kill()
    assert process.returncode == -9
    with suppress(AssertionError):  # one that was caught between two calls waits for ever, for the next start
        wait_until(lambda: not living(str(tree)), 3.0)
    with start_ours("from composer_replication.sandbox.process_folder import sweep; sweep()", tmp_path):
        pass
    wait_until(lambda: not living(token) and not living(str(tree)))
    assert (tree / "ran").exists() == (not MOMENTS[moment])
    assert list(tmp_path.glob("composer-rl-*")) == []
