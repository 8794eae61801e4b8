"""How many actors, what each of them asks of its node, and what it may use there."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from composer_replication.records import Limits, MonitorMode
from composer_replication.rollouts.environment.attempt import AttemptOptions
from composer_replication.rollouts.environment.reward_options import RewardOptions


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
