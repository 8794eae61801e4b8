"""Joins a Ray cluster to a command: its flag, what can be refused at once, and the actors of its attempts and gradings."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from composer_replication.cli.launched_process import launched_size

if TYPE_CHECKING:
    from composer_replication.config import RunConfig
    from composer_replication.rollouts.cluster.rollout_actor import ClusterOptions
    from composer_replication.rollouts.cluster.rollout_cluster import RolloutCluster
    from composer_replication.tasks.store import TaskStore

MANY_GRADINGS = 64
"""At a time, where single answers are graded and nobody says how many."""


def add_ray_flag(parser: argparse.ArgumentParser, does: str, same: str) -> None:
    """``--ray ADDRESS``: what it ``does`` there, and what is the ``same`` as without it."""
    parser.add_argument(
        "--ray",
        metavar="ADDRESS",
        help=f"{does} on a Ray cluster: auto (of this machine, or RAY_ADDRESS), HOST:PORT of its head, or "
        f"ray://HOST:PORT from outside; {same}",
    )


def check_cluster(address: str, purpose: str) -> None:
    """What can be said of a cluster before anything is built or loaded; ``purpose`` begins the sentence of a missing package.

    Raises:
        MissingError: ray is not installed (CR0101), or nothing answers at the address (CR0490).
        UsageError: that is no address (CR0490).
    """
    from composer_replication.errors import needs_extra
    from composer_replication.tasks.workers.workers import load_ray

    with needs_extra("ray", purpose):
        load_ray()
    from composer_replication.tasks.workers.ray_connection import check_address

    check_address(address)


def placed_at(config: RunConfig, address: str | None) -> RunConfig:
    """A recipe whose attempts are graded on this cluster, placed as it says; for None here, whatever it was trained on."""
    from composer_replication.channel_tables import RaySection

    placing = {} if config.ray is None else config.ray.model_dump()
    ray = None if address is None else RaySection(**(placing | {"address": address}))
    return config.model_copy(update={"ray": ray})


def cluster_options(config: RunConfig) -> ClusterOptions:
    """The actors of ``[ray]``, with the sandboxes, limits and reward that the recipe has without it."""
    from composer_replication.cli.agent_assembly import attempt_options, reward_options, sandbox_limits
    from composer_replication.rollouts.cluster.rollout_actor import ClusterOptions

    if config.ray is None:
        raise ValueError("the recipe has no [ray] table")
    placing = config.ray.model_dump(exclude={"address"})
    most = MANY_GRADINGS if config.agent is None else config.agent.max_concurrent
    return ClusterOptions(
        **(placing | {"num_actors": config.ray.num_actors or most}),
        fits_nodes=config.ray.num_actors == 0,
        num_drivers=launched_size(),
        backend=config.sandbox.backend,
        attempt=attempt_options(config),
        reward=reward_options(config),
        monitor="off" if config.agent is None else config.agent.monitor,
        limits=sandbox_limits(config),
        timeout_seconds=config.rollouts.test_timeout_seconds,
    )


@contextmanager
def open_actors(config: RunConfig, store: TaskStore) -> Iterator[RolloutCluster | None]:
    """The actors that ``[ray]`` asks for, gone after the block; None without the table.

    Raises:
        ComposerError: as ``open_cluster``.
    """
    if config.ray is None:
        yield None
        return
    from composer_replication.rollouts.cluster.opening import open_cluster

    plays_episodes = config.agent is not None
    options = cluster_options(config)
    with open_cluster(config.ray.address, store, options, waits_for_all=plays_episodes) as cluster:
        yield cluster
