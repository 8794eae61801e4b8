"""Join a cluster for the time of some rollouts: how many actors, what each asks of its node, and what it may use there."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from composer_replication.records import Limits, MonitorMode
from composer_replication.rollouts.environment.attempt import AttemptOptions
from composer_replication.rollouts.environment.reward_options import RewardOptions
from composer_replication.tasks.store import TaskStore
from composer_replication.tasks.workers.workers import impatient_ray


@dataclass(frozen=True, slots=True)
class ClusterOptions:
    """How the actors of a cluster are placed, and what attempts and gradings in them are like.

    Args:
        num_actors: attempts and gradings at the same time, over all nodes. Those for which the cluster has no room
            wait until Ray places them; the others work meanwhile.
        fits_nodes: take fewer actors, but one at least, where the nodes have not room for so many when the cluster is joined.
        num_drivers: processes of the run that share the nodes; each takes its part of the room.
        num_cpus: processors that Ray sets aside for an actor; a share of one lets more of them on a node. It bounds
            nothing: the sandbox does.
        resources: further ones of Ray's, by name, such as a label of the nodes that have a sandbox.
        max_restarts: how often Ray starts an actor anew whose process or node died; -1 for ever.
        waiting_seconds: how long an attempt waits for a free actor. Keep it below ``EpisodeOptions.turn_seconds``.
        backend: sandbox backend on every node, by name or dotted path; empty for the best of each.
        attempt: how the sandbox of an attempt is opened; with this backend by default.
        reward: how a reward is made; ``RewardOptions()`` by default.
        monitor: as ``FeatureDeletionEnv``; who inspects is the actor.
        limits: of a sandbox in which tests are graded.
        timeout_seconds: as ``Grader``.
    """

    num_actors: int = 4
    fits_nodes: bool = False
    num_drivers: int = 1
    num_cpus: float = 1.0
    resources: Mapping[str, float] = field(default_factory=dict)
    max_restarts: int = -1
    waiting_seconds: float = 500.0
    backend: str = ""
    attempt: AttemptOptions | None = None
    reward: RewardOptions | None = None
    monitor: MonitorMode = "mask"
    limits: Limits | None = None
    timeout_seconds: float = 20.0


def fitted(options: ClusterOptions, nodes: Sequence[Mapping[str, float]]) -> ClusterOptions:
    """With ``fits_nodes`` no more actors than these nodes, given by Ray's names of their resources, have room for together,
    by what they have and not by what is free; one at least.
    """
    if not options.fits_nodes:
        return options
    asked = {
        name: share for name, share in {"CPU": options.num_cpus, **options.resources}.items() if share > 0
    }
    rooms = (
        min((node.get(name, 0.0) / share for name, share in asked.items()), default=math.inf)
        for node in nodes
    )
    room = sum(math.floor(min(each, options.num_actors * options.num_drivers)) for each in rooms)
    room //= options.num_drivers
    return replace(options, num_actors=max(1, min(options.num_actors, room)))


if TYPE_CHECKING:
    from composer_replication.rollouts.cluster.rollout_cluster import RolloutCluster


@contextmanager
def open_cluster(
    address: str, store: TaskStore, options: ClusterOptions | None = None, *, waits_for_all: bool = False
) -> Iterator[RolloutCluster]:
    """Actors for attempts and gradings, from here to the end of the block; waits for the first of them.

    Args:
        address: ``auto`` for the cluster that ``RAY_ADDRESS`` names or that runs on this machine, ``HOST:PORT`` of
            its head for one that this machine is a node of, ``ray://HOST:PORT`` for any other (needs ``ray[client]``).
        store: whole; every node gets a copy of it.
        options: ``ClusterOptions()`` by default.
        waits_for_all: wait for every actor, so that episodes begin in the same rounds every time.

    Raises:
        ImportError: ray is not installed (the extra ``ray``).
        UsageError: no such form of address, or this program has joined a cluster already (CR0490).
        MissingError: nothing answers there (CR0490); another version of Ray or Python (CR0490); a node cannot be used (CR0491); an
            actor was not placed in time (CR0864).
        InputError: a file of the store cannot be read (CR0411).
    """
    with impatient_ray():
        from composer_replication.rollouts.cluster.rollout_cluster import RolloutCluster
        from composer_replication.tasks.workers.ray_connection import RayConnection

    connection = RayConnection(address)
    try:
        with RolloutCluster(connection, store, options or ClusterOptions()) as cluster:
            cluster.wait_until_ready(cluster.options.num_actors if waits_for_all else 1)
            yield cluster
    finally:
        connection.close()
