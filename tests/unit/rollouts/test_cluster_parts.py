"""What a Ray actor is made of, without Ray: the store that travels, the actor itself, its options, and who may be asked."""

from __future__ import annotations

import json
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from composer_replication.errors import InputError, MissingError, SandboxFailure, UsageError
from composer_replication.records import Task, ToolCall
from composer_replication.rollouts.cluster import open_cluster
from composer_replication.rollouts.cluster.rollout_actor import (
    ClusterOptions,
    Files,
    RolloutActor,
    files_of,
    fitted,
    open_copy,
)
from composer_replication.rollouts.environment.feature_deletion_env import FeatureDeletionEnv
from composer_replication.rollouts.grading import Grader, GradeRequest
from composer_replication.sandbox.process_folder import process_folder
from composer_replication.tasks.store import TaskStore
from composer_replication.tasks.workers.ray_cluster import needs_of

NUMBERS = "tinymath/numbers.py"


def actor_of(store: TaskStore, **options: Any) -> RolloutActor:
    return RolloutActor(store.fingerprint, lambda: files_of(store), ClusterOptions(**options), needs_of(None))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine that has nothing yet."""
    monkeypatch.setenv("COMPOSER_RL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


# --- the store ------------------------------------------------------------------------


def test_a_copy_is_the_store_and_is_made_once(sized_store: TaskStore, cache: Path) -> None:
    files, fingerprint = files_of(sized_store), sized_store.fingerprint
    assert [name for name, _ in files][-1] == "manifest.json", "with it a copy is whole"
    copy = open_copy(fingerprint, lambda: files, backend=None)
    copy.verify()
    assert copy.fingerprint == sized_store.fingerprint
    assert copy.root.parent.parent == cache.resolve()
    assert stat.S_IMODE(copy.root.stat().st_mode) == 0o700, "it has golden code and hidden tests"
    for task in sized_store.tasks():
        assert copy.get(task.task_id) == task
        for view in ("rollout", "visible", "hidden", "golden"):
            assert copy.files(task, view) == sized_store.files(task, view)

    def refuse() -> Files:
        raise AssertionError("it is here already")

    assert open_copy(fingerprint, refuse, backend=None).root == copy.root
    (copy.root / "manifest.json").unlink()  # as if its writer had been killed
    (copy.root / "tasks" / "left.json.zst").write_text("torn")
    again = open_copy(fingerprint, lambda: files, backend=None)
    assert not (again.root / "tasks" / "left.json.zst").exists()
    again.verify()


def test_files_of_another_store_are_refused(sized_store: TaskStore, cache: Path) -> None:
    with pytest.raises(InputError, match=r"CR0411: .* another one than was sent"):
        open_copy("f" * 64, lambda: files_of(sized_store), backend=None)


# --- the actor ------------------------------------------------------------------------


@pytest.fixture
def actor(store: TaskStore) -> Iterator[RolloutActor]:
    made = actor_of(store)
    yield made
    made.attempt("close")
    assert not list(process_folder().glob("attempt-*"))


def moves(store: TaskStore, task: Task) -> list[ToolCall]:
    golden = store.files(task, "golden")[NUMBERS].decode()
    return [
        ToolCall("bash", json.dumps({"command": "ls tinymath"})),
        ToolCall("fly", "{}"),
        ToolCall("write_file", json.dumps({"path": NUMBERS, "content": golden})),
        ToolCall("submit", "{}"),
    ]


@pytest.mark.long
def test_an_actor_does_what_an_environment_in_this_process_does(
    actor: RolloutActor, grader: Grader, store: TaskStore, clamp: Task
) -> None:
    with FeatureDeletionEnv(grader) as env:
        assert actor.attempt("reset", clamp.task_id) == (env.reset(clamp.task_id), False)
        for call in moves(store, clamp):
            here, there = env.call(call), actor.attempt("call", call)
            assert (there[0].text, there[0].is_error) == (here.text, here.is_error)
            assert there[1] == env.is_done
        assert actor.attempt("candidate") == (env.candidate(), True)
        (theirs, is_over), mine = actor.attempt("finish"), env.finish()
        assert theirs is not None and mine is not None and is_over
        assert theirs.score.outcomes == mine.score.outcomes
        assert (theirs.reward, mine.reward) == (1.0, 1.0)
        assert (theirs.regressions, theirs.graded_reward) == (mine.regressions, mine.graded_reward)
        assert theirs.report is not None and mine.report is not None
        assert theirs.report.findings == mine.report.findings == ()


@pytest.mark.long
def test_an_actor_inspects_as_it_is_told(store: TaskStore, clamp: Task) -> None:
    golden = store.files(clamp, "golden")[NUMBERS].decode()
    cheat = f"{golden}\n\ndef leave():\n    import os\n    os._exit(0)\n"
    written = ToolCall("write_file", json.dumps({"path": NUMBERS, "content": cheat}))
    for mode, expected in (("mask", 0.0), ("off", 1.0)):
        actor = actor_of(store, attempt={"monitor": mode})
        actor.attempt("reset", clamp.task_id)
        actor.attempt("call", written)
        paid, _ = actor.attempt("finish")
        assert paid is not None
        assert (paid.reward, paid.graded_reward) == (expected, 1.0)
        assert (paid.report is None) == (mode == "off")
        actor.attempt("close")


def test_an_actor_that_was_left_has_no_attempt(actor: RolloutActor, clamp: Task) -> None:
    listing = ToolCall("list_files", "{}")
    actor.attempt("reset", clamp.task_id)
    assert not actor.attempt("call", listing)[0].is_error
    actor.attempt("close")
    actor.attempt("close")
    with pytest.raises(UsageError, match="CR0800"):
        actor.attempt("call", listing)


@pytest.mark.long
def test_gradings_of_an_actor_are_those_of_a_grader(
    actor: RolloutActor, grader: Grader, store: TaskStore, clamp: Task
) -> None:
    right = GradeRequest(clamp, store.golden_body(clamp))
    wrong = GradeRequest(clamp, "\n    return low")
    for request, here in zip((right, wrong), grader.grade_many([right, wrong]), strict=True):
        assert here is not None
        assert actor.grade(request).outcomes == here.outcomes


def test_a_node_without_the_environment_of_a_task_is_named(sized_store: TaskStore, cache: Path) -> None:
    """The wheels of this store do not exist, as those of another architecture would not fit."""
    actor = actor_of(sized_store)
    with pytest.raises(
        MissingError, match=rf"CR0491: the node {socket.gethostname()} cannot be used"
    ) as caught:
        actor.attempt("reset", "t-function-body")
    assert not isinstance(caught.value, SandboxFailure), "no episode is tried again for it"
    actor.attempt("close")


def test_a_node_whose_sandbox_does_not_hold_prepares_nothing(
    store: TaskStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "unsafe_jail.py").write_text(
        "from composer_replication.errors import SandboxFailure\n\n\nclass Jail:\n    name = 'unsafe'\n\n"
        "    def is_available(self):\n        return None\n\n    def open(self, spec):\n        raise SandboxFailure('CR0302', 'planted')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))

    def refuse() -> Files:
        raise AssertionError("such a node gets no store")

    options = ClusterOptions(grader={"backend": "unsafe_jail:Jail"})
    actor = RolloutActor("f", refuse, options, needs_of("unsafe_jail:Jail"))
    with pytest.raises(SandboxFailure, match=r"CR0491: the node .* the sandbox unsafe does not hold"):
        actor.prepare()


# --- around it ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "num_actors"),
    [
        ({}, 3),  # one and a half of the first node are one
        ({"num_cpus": 0.5}, 7),
        ({"num_cpus": 0.0}, 9),
        ({"num_cpus": 0.5, "resources": {"jail": 1.0}}, 2),
        ({"num_drivers": 2}, 1),
        ({"num_cpus": 0.5, "num_drivers": 2}, 3),
        ({"resources": {"gone": 1.0}}, 1),
        ({"resources": {"gone": 1.0}, "fits_nodes": False}, 9),
    ],
)
def test_no_more_actors_than_the_nodes_have_room_for(asked: dict[str, Any], num_actors: int) -> None:
    nodes = [{"CPU": 1.5, "memory": 9.0}, {"CPU": 2.0, "jail": 2.0}, {"memory": 9.0}]
    options = ClusterOptions(**({"num_actors": 9, "fits_nodes": True} | asked))
    assert fitted(options, nodes) == replace(options, num_actors=num_actors)
    if options.fits_nodes:
        assert fitted(replace(options, num_actors=1), nodes).num_actors == 1


def test_what_runs_in_a_worker_loads_no_torch() -> None:
    program = (
        "import sys\nimport composer_replication.rollouts.cluster.rollout_cluster\n"
        "print([name for name in ('torch', 'transformers', 'trl', 'tokenizers', 'datasets') if name in sys.modules])"
    )
    pytest.importorskip("ray", reason="the extra ray is not installed")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("form", ["127.0.0.1:{}", "ray://127.0.0.1:{}"])
def test_a_cluster_that_is_not_there_is_one_sentence(form: str, sized_store: TaskStore) -> None:
    pytest.importorskip("ray", reason="the extra ray is not installed")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = form.format(probe.getsockname()[1])
    with (
        pytest.raises(MissingError, match=r"^CR0490: the Ray cluster cannot be joined: [^\n]*refused[^\n]*$"),
        open_cluster(address, sized_store, ClusterOptions()),
    ):
        pass
