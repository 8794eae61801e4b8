"""What lives on a node: one attempt with its sandbox, or one grading, at a time. Runs in a worker of Ray.

A store travels as one object, and is copied into the cache of a node, which need not share a disk. The copy is called by
the store's fingerprint, is made once a node and checked like any store: every record and file that is read has the hash
that the manifest says. It holds golden code and hidden tests, as the store does: nobody but its owner may read it, and no
sandbox mounts it.
"""

from __future__ import annotations

import math
import os
import shutil
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from composer_replication.errors import InputError
from composer_replication.records import Score, Task
from composer_replication.rollouts.environment.feature_deletion_env import FeatureDeletionEnv
from composer_replication.rollouts.grading import Grader, GradeRequest
from composer_replication.tasks.intake.cache import cache_folder, cache_lock, put_file, sha256_of
from composer_replication.tasks.store import TaskStore
from composer_replication.tasks.store_manifest import FOLDERS, NAME, UNSETTLED, damaged
from composer_replication.tasks.workers.ray_cluster import (
    NodeNeeds,
    check_node,
    unfit_node,
)

Files = list[tuple[str, bytes]]
"""Path below the store, content as it lies on the disk; the manifest last: with it a copy is whole."""


def files_of(store: TaskStore) -> Files:
    """What a store is made of again on another machine: all of it, and not written to meanwhile."""
    names = ("objects", *FOLDERS, UNSETTLED)
    found = (path for name in names for path in (store.root / name, *sorted((store.root / name).rglob("*"))))
    paths = (*(path for path in found if path.is_file()), store.root / NAME)
    return [(path.relative_to(store.root).as_posix(), path.read_bytes()) for path in paths]


def open_copy(fingerprint: str, fetch: Callable[[], Files], *, backend: str | None) -> TaskStore:
    """The store on this machine, made of what is fetched where it is absent; another one is refused (CR0411)."""
    key = sha256_of(f"copy of {fingerprint}".encode())[:16]
    root = cache_folder() / "task-stores" / key
    with cache_lock(f"task-store-{key}"):
        if not (root / NAME).is_file():
            shutil.rmtree(root, ignore_errors=True)  # what a writer left that was killed
            root.mkdir(parents=True)
            root.chmod(0o700)
            for name, data in fetch():
                put_file(root / name, data)
    store = TaskStore.open(root, backend=backend)
    if store.fingerprint != fingerprint:
        raise damaged(root, "it is another one than was sent")
    return store


@dataclass(frozen=True, slots=True)
class ClusterOptions:
    """How the actors of a cluster are placed, and what is in them.

    There are ``num_actors`` attempts and gradings at the same time. Those that Ray has no room for wait; the others work
    meanwhile. With ``fits_nodes`` there are fewer, but at least one, where the nodes have too little room when the cluster
    is joined; ``num_drivers`` processes of the run share that room. ``num_cpus`` are the processors that Ray sets aside for
    an actor: less than one lets more actors on a node, and limits nothing, since the sandbox does. ``resources`` are others
    of Ray's by name, such as a label of the nodes that have a sandbox. An attempt waits ``waiting_seconds`` for a free
    actor: keep it below ``agent_loop.TURN_SECONDS``.

    ``attempt`` are keywords of ``FeatureDeletionEnv``, and ``grader`` those of ``Grader``: without ``backend`` each node
    takes its best sandbox.
    """

    num_actors: int = 4
    fits_nodes: bool = False
    num_drivers: int = 1
    num_cpus: float = 1.0
    resources: Mapping[str, float] = field(default_factory=dict)
    waiting_seconds: float = 500.0
    attempt: Mapping[str, Any] = field(default_factory=dict)
    grader: Mapping[str, Any] = field(default_factory=dict)


def fitted(options: ClusterOptions, nodes: Sequence[Mapping[str, float]]) -> ClusterOptions:
    """With ``fits_nodes`` no more actors than these nodes, given by Ray's names of their resources, have room for together,
    by what they have and not by what is free; one at least.
    """
    if not options.fits_nodes:
        return options
    shares = {"CPU": options.num_cpus, **options.resources}
    asked = [(name, share) for name, share in shares.items() if share > 0]
    most = options.num_actors * options.num_drivers
    room = sum(
        math.floor(min([most, *(node.get(name, 0.0) / share for name, share in asked)])) for node in nodes
    )
    return replace(options, num_actors=max(1, min(options.num_actors, room // options.num_drivers)))


class RolloutActor:
    """Attempts and gradings over a copy of a store, one after the other.

    ``fetch`` gives the files of the store with this fingerprint; ``needs`` is what this node must have.
    """

    def __init__(
        self, fingerprint: str, fetch: Callable[[], Files], options: ClusterOptions, needs: NodeNeeds
    ) -> None:
        self._fingerprint, self._fetch, self._options, self._needs = fingerprint, fetch, options, needs
        self._environment: FeatureDeletionEnv | None = None

    def prepare(self) -> str:
        """Try the sandbox of this node and copy the store; its host and process. Names a node that cannot be used (CR0491)."""
        self._ready()
        return f"{socket.gethostname()}, process {os.getpid()}"

    def attempt(self, method: str, *asked: Any) -> tuple[Any, bool]:
        """What a method of the attempt's environment gives, and whether the attempt is over then."""
        environment = self._ready()
        if method == "reset":
            self._require_environment(environment.grader.store.get(*asked))
        result = getattr(environment, method)(*asked)
        return result, method == "close" or environment.is_done

    def grade(self, request: GradeRequest) -> Score:
        """Run one request."""
        self._require_environment(request.task)
        return self._ready().grader.grade_once(request)

    def _ready(self) -> FeatureDeletionEnv:
        check_node(*self._needs)
        if self._environment is None:
            options = self._options
            store = open_copy(self._fingerprint, self._fetch, backend=options.grader.get("backend") or None)
            grader = Grader(store, num_jobs=1, **options.grader)
            self._environment = FeatureDeletionEnv(grader, **options.attempt)
        return self._environment

    def _require_environment(self, task: Task) -> None:
        """The environment of the task's tests, made first where this node has not got it."""
        try:
            self._ready().grader.store.environment(task)
        except InputError as error:
            raise unfit_node("cannot be used", error) from error
