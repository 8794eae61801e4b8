"""What a Ray actor is made of, without Ray: the store that travels, the actor itself, its options, and who may be asked."""

from __future__ import annotations

import socket
import stat
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
from composer_replication.sandbox.process_folder import process_folder
from composer_replication.tasks.store import TaskStore
from composer_replication.tasks.workers.ray_cluster import needs_of


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


def test_an_actor_that_was_left_has_no_attempt(store: TaskStore, clamp: Task) -> None:
    actor, listing = actor_of(store), ToolCall("list_files", "{}")
    actor.attempt("reset", clamp.task_id)
    assert not actor.attempt("call", listing)[0].is_error
    actor.attempt("close")
    actor.attempt("close")
    assert not list(process_folder().glob("attempt-*"))
    with pytest.raises(UsageError, match="CR0800"):
        actor.attempt("call", listing)


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
