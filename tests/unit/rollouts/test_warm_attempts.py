"""Attempts in warm jails: proven by their own self-test, and nothing left for the next."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import pytest
from episode_parts import IdTalk, ScriptedPolicy, ask, attempt_folders, limits, paid

from composer_replication.config import AgentSection
from composer_replication.errors import SandboxFailure
from composer_replication.records import Check, StopReason, Task, ToolCall, ToolResult, Turn
from composer_replication.rollouts.environment.feature_deletion_env import FeatureDeletionEnv
from composer_replication.rollouts.episodes.agent_loop import EpisodeParts, run_episodes
from composer_replication.rollouts.grading import Grader
from composer_replication.sandbox import SandboxBackend, bubblewrap, selftest
from composer_replication.sandbox.bubblewrap import Bubblewrap, WarmBubblewrap, WarmBubblewrapSandbox
from composer_replication.sandbox.process_tree import descendants
from composer_replication.tasks.store import TaskStore

NUMBERS = "tinymath/numbers.py"


@pytest.fixture(autouse=True)
def works_here() -> None:
    check = WarmBubblewrap().is_available()
    if not check.ok:
        pytest.skip(f"not available here: {check.detail}")


@pytest.fixture(autouse=True)
def leaves_nothing() -> Iterator[None]:
    before, ours = attempt_folders(), set(descendants(os.getpid()))
    yield
    assert attempt_folders() == before
    assert set(descendants(os.getpid())) <= ours


def run(env: FeatureDeletionEnv, command: str) -> str:
    return ask(env, "bash", command=command).text


def jail_of(env: FeatureDeletionEnv) -> WarmBubblewrapSandbox:
    sandbox = env._running.toolbox.sandbox
    assert isinstance(sandbox, WarmBubblewrapSandbox)
    return sandbox


# Which jail, and its proof.


def test_attempts_are_warm_where_they_can_be_and_gradings_are_not(
    grader: Grader, store: TaskStore, clamp: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    grader.attempt_backend()  # the self-test opens jails of its own
    real = Bubblewrap.open  # of both kinds
    monkeypatch.setattr(Bubblewrap, "open", lambda self, spec: opened.append(self.name) or real(self, spec))
    with FeatureDeletionEnv(grader) as env:
        env.reset(clamp.task_id)
        run(env, "true")
        jail = jail_of(env).jail_pid
        golden = store.files(clamp, "golden")[NUMBERS].decode()
        ask(env, "write_file", path=NUMBERS, content=f"{golden}\n# nobody else's\n")
        run(env, "true")
        assert jail_of(env).jail_pid == jail is not None
        assert opened == ["bubblewrap-warm"]
        assert paid(env) == 1.0
    assert opened[0] == "bubblewrap-warm" and set(opened[1:]) == {"bubblewrap"}


@pytest.mark.parametrize("unheld", ["", "disk", "everything"])
def test_a_warm_jail_is_used_when_its_own_selftest_has_passed(
    grader: Grader,
    store: TaskStore,
    clamp: Task,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    unheld: str,
    tmp_path: Path,
) -> None:
    """It fails for one guard, that somebody has accepted too: the cold one, which holds it, is used."""
    tried: list[tuple[str, bool]] = []

    def one_guard(backend: SandboxBackend, *, unseen: Collection[Path] = (), **_: object) -> list[Check]:
        tried.append((backend.name, {store.root, tmp_path} <= {*unseen}))
        return [Check("disk", not (unheld and backend.name == "bubblewrap-warm"), "a planted answer")]

    monkeypatch.setattr(selftest, "run_selftest", one_guard)
    monkeypatch.setattr(selftest, "_passed", {})
    monkeypatch.setattr(selftest, "_closed", set())
    monkeypatch.setattr(selftest.acceptance, "accepted", lambda: (unheld,) if unheld == "disk" else ())
    own = Grader(store, backend="bubblewrap", unseen=[tmp_path])
    try:
        for _ in range(2):
            with FeatureDeletionEnv(own) as env:
                env.reset(clamp.task_id)
                assert isinstance(env._running.toolbox.sandbox, WarmBubblewrapSandbox) == (not unheld)
    finally:
        own.close()
    assert tried == [("bubblewrap", True), ("bubblewrap-warm", True)]
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == bool(unheld) and all("disk" in text for text in said)


# Nothing is left for the next episode.

PLANT = r"""
for folder in . $HOME $TMPDIR /tmp /var/tmp /dev/shm; do echo Qu4rk > $folder/left-Qu4rk; done
git config --global user.name Qu4rk; git config core.hooksPath Qu4rk; echo 'export LEFT=Qu4rk' > $HOME/.bashrc
python3 - <<'END'
import ctypes, os, socket, time
libc = ctypes.CDLL(None)
print("shared memory", libc.shmget(4711, 4096, 0o1600) >= 0)
if os.fork() == 0:
    os.setsid()
    servers = []
    for name in ("\0Qu4rk", os.environ["TMPDIR"] + "/socket-Qu4rk"):
        server = socket.socket(socket.AF_UNIX); server.bind(name); server.listen(); servers.append(server)
    server = socket.socket(); server.bind(("127.0.0.1", 4711)); server.listen()
    os.execvp("sleep", ["Qu4rk", "99"])
END
"""
LOOK = r"""
M=Qu""4rk
{ grep -rls $M . $HOME $TMPDIR /tmp /var/tmp /dev/shm; find . $HOME $TMPDIR /tmp /var/tmp /dev/shm -name "*$M*"; } | sort -u
env | grep $M; git config --list | grep $M
python3 - <<'END'
import os, pathlib, socket
places = ["/proc/net/unix", *(f"/proc/{name}/cmdline" for name in os.listdir("/proc") if name.isdigit())]
print([place for place in places if b"MA" b"RK" in pathlib.Path(place).read_bytes()])
print("reached" if socket.socket().connect_ex(("127.0.0.1", 4711)) == 0 else "refused")
END
"""


def test_an_episode_finds_nothing_of_those_before_and_beside_it(grader: Grader, clamp: Task) -> None:
    nothing = "[]\nrefused"
    with FeatureDeletionEnv(grader) as env, FeatureDeletionEnv(grader) as beside:
        env.reset(clamp.task_id)
        beside.reset(clamp.task_id)
        first = jail_of(env)
        assert "shared memory False" in run(env, PLANT)
        there = run(env, LOOK)  # files of tree, HOME and TMPDIR are the episode's own; all else has ended
        for place in ("./left-Qu4rk", "/home/left-Qu4rk", "/tmp/left-Qu4rk", "user.name=Qu4rk"):
            assert place in there
        assert there.endswith(nothing)
        assert run(beside, LOOK) == nothing
        env.reset(clamp.task_id)
        assert jail_of(env) is not first
        assert run(env, LOOK) == nothing


# Jails that break.


def kill_the_jail(env: FeatureDeletionEnv) -> int:
    pid = jail_of(env).jail_pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    while pid in descendants(os.getpid()):
        time.sleep(0.01)
    return pid


def test_an_episode_whose_jail_cannot_be_replaced_is_tried_again_and_never_scored(
    grader: Grader, store: TaskStore, clamp: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    golden = json.dumps({"path": NUMBERS, "content": store.files(clamp, "golden")[NUMBERS].decode()})
    moves = [("bash", '{"command": "echo first"}'), ("bash", '{"command": "echo second"}')]
    moves += [("write_file", golden), ("submit", "{}")]
    real, num_starts = bubblewrap.WarmJail, 0

    def start(*arguments: Any) -> Any:
        nonlocal num_starts
        num_starts += 1
        if num_starts == 2:
            raise SandboxFailure("CR0302", "a planted failure.")
        return real(*arguments)

    class Dying(FeatureDeletionEnv):
        def call(self, call: ToolCall) -> ToolResult:
            result = super().call(call)
            if num_starts == 1:
                kill_the_jail(self)
            return result

    def calls(turn: Turn, tools: object) -> tuple[ToolCall, ...]:
        return (ToolCall(*moves[int(turn.completion.text)]),)

    grader.attempt_backend()  # its self-test starts jails, too: the planted failure is not for them
    monkeypatch.setattr(bubblewrap, "WarmJail", start)
    policy = ScriptedPolicy(lambda asked: str(asked.text.count("|T:")))
    parts = EpisodeParts(policy, lambda: Dying(grader), IdTalk(find_calls=calls))
    options = AgentSection(max_context_tokens=10**6)
    with limits(MAX_TRIES=2):
        (episode,) = asyncio.run(run_episodes([clamp.task_id], parts, options=options))
    assert (episode.stop_reason, episode.reward, episode.num_tries) == (StopReason.SUBMITTED, 1.0, 2)
    assert num_starts == 3
