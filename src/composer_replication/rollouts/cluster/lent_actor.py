"""One actor of a cluster: its process, which may be another one tomorrow, and its end, of which nothing is left."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from composer_replication.errors import SandboxFailure
from composer_replication.rollouts.cluster.rollout_actor import Place, clear_up

_END_SECONDS = 30.0


@dataclass(eq=False, slots=True)
class LentActor:
    """An actor, references that are done when its process is there (``born``) and prepared (``ready``), where it is from then on,
    and the tasks whose golden code it has looked at.
    """

    handle: Any
    born: Any = None
    ready: Any = None
    place: Place | None = None
    tasks: set[str] = field(default_factory=set)

    def begin_anew(self) -> None:
        """Wait for its first or its next process, which knows nothing."""
        self.born = self.handle.where.remote()
        self.ready, self.place, self.tasks = _prepared(self.handle), None, set()

    def process(self) -> Place | None:
        """Where it is, prepared or not; None where it has no process, or nobody knows."""
        with suppress(RayError, ConnectionError):
            if self.place is None and ray.wait([self.born], timeout=0)[0]:
                found: Place = ray.get(self.born)
                return found
        return self.place


def end_all(handles: list[Any]) -> bool:
    """Ends them as a process ends that is asked to; whether each has left nothing behind."""
    if not handles:
        return True
    ends = [asked_once(handle, "end") for handle in handles]
    exits = [asked_once(handle, "__ray_terminate__") for handle in handles]
    ray.wait(exits, num_returns=len(exits), timeout=_END_SECONDS)
    for handle in handles:
        ray.kill(handle)
    try:
        ray.get(ends, timeout=_END_SECONDS)
    except (RayError, ConnectionError):
        return False
    return True


def clear_up_all_nodes(killed: list[Place]) -> None:
    """Where it does not succeed, the next process of ours on that node does it."""
    nodes = ray.nodes()  # type: ignore[no-untyped-call]  # as Ray ships it
    places = [NodeAffinitySchedulingStrategy(node["NodeID"], soft=False) for node in nodes if node["Alive"]]
    work = ray.remote(clear_up)
    tasks = [
        work.options(
            num_cpus=0, max_retries=0, scheduling_strategy=place, name="composer-rl clear up"
        ).remote(killed)
        for place in places
    ]
    ray.wait(tasks, num_returns=len(tasks), timeout=_END_SECONDS)


def _prepared(handle: Any) -> Any:
    return handle.prepare.options(retry_exceptions=[SandboxFailure]).remote()


def asked_once(handle: Any, method: str, *args: Any) -> Any:
    """Ask an actor, without Ray's asking again when it dies over it."""
    return getattr(handle, method).options(max_task_retries=0).remote(*args)
