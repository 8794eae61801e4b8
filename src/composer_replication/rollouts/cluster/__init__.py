"""Where do attempts and gradings run when one machine is too small? In actors on the nodes of a Ray cluster.

rollout_actor.py    how many actors, and what lives on a node: a copy of the store, a sandbox with its tools, the grading
rollout_cluster.py  the actors, lent one at a time (placing and waiting are Ray's) to an attempt whose sandbox is elsewhere,
                    or to a grader of answers and trees

Nothing here needs torch. The extra ``ray`` is needed from ``open_cluster`` on.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING

import composer_replication.tasks.workers  # noqa: F401 - says how long ray tries, which it reads when it is imported
from composer_replication.tasks.store import TaskStore

if TYPE_CHECKING:
    from composer_replication.rollouts.cluster.rollout_actor import ClusterOptions
    from composer_replication.rollouts.cluster.rollout_cluster import RolloutCluster


@contextmanager
def open_cluster(
    address: str, store: TaskStore, options: ClusterOptions, *, waits_for_all: bool = False
) -> Iterator[RolloutCluster]:
    """Actors for attempts and gradings, from here to the end of the block; waits for the first of them.

    ``address`` is as ``joined`` takes it, and every node gets a copy of ``store``. With ``waits_for_all`` every
    actor is waited for, so that episodes begin in the same rounds every time.

    Raises:
        UsageError, MissingError: the cluster cannot be joined (CR0490), a node cannot be used (CR0491), an actor was not
            placed in time (CR0490).
    """
    from composer_replication.rollouts.cluster.rollout_cluster import RolloutCluster
    from composer_replication.tasks.workers.ray_cluster import joined

    with joined(address), closing(RolloutCluster(store, options)) as cluster:
        cluster.wait_until_ready(cluster.options.num_actors if waits_for_all else 1)
        yield cluster
