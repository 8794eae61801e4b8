"""Several nodes of a Ray cluster for one run: ``python -m composer_replication.launch.ray_nodes --nodes 2 -- COMMAND``.

Ray is asked for one bundle a node, all or none; each then runs the command with its rank and the
address of the first. The exit code is that of the processes, a halt (5) before all others. When
one node ends badly the others are told to end, and have time to save.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from composer_replication.errors import HALTED_EXIT_CODE, INTERRUPTED_EXIT_CODE
from composer_replication.launch.job import GRACE_SECONDS


class Node:
    """An actor on one node: runs the command there, beside the orders that come in."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def address(self) -> str:
        import ray

        return str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]

    def run(self, command: list[str]) -> int:
        self._process = subprocess.Popen(command)
        return self._process.wait()

    def end(self) -> None:
        if self._process is not None:
            self._process.terminate()


def placed(command: Sequence[str], rank: int, head: str) -> list[str]:
    """The command with this node's rank and the head's address, as options of ``node_processes``."""
    cut = list(command).index("--")
    return [*command[:cut], "--node-rank", str(rank), "--head", head, *command[cut:]]


def run_on(nodes: Sequence[Any], command: Sequence[str]) -> int:
    """Run the command on all nodes; the first bad end, or an order to end, is passed on to the others, which may save."""
    import ray

    head = ray.get(nodes[0].address.remote())
    waiting = [node.run.remote(placed(command, rank, head)) for rank, node in enumerate(nodes)]
    codes: list[int] = []
    patience: float | None = None
    while waiting:
        try:
            done, waiting = ray.wait(waiting, timeout=patience)
            codes += [ray.get(one) for one in done]
        except KeyboardInterrupt:
            codes.append(INTERRUPTED_EXIT_CODE)
        except ray.exceptions.RayError as error:
            sys.stderr.write(f"a node was lost: {type(error).__name__}\n")
            codes.append(1)
        else:
            if not done:
                break
        if any(codes) and patience is None:
            patience = float(GRACE_SECONDS)
            if HALTED_EXIT_CODE not in codes:
                for node in nodes:
                    node.end.remote()
    return HALTED_EXIT_CODE if HALTED_EXIT_CODE in codes else next((code for code in codes if code), 0)


def main(argv: Sequence[str] | None = None) -> int:
    """Ask for the nodes, run, and end with the run's exit code."""
    parser = argparse.ArgumentParser(prog="ray_nodes", description=__doc__)
    for name, kind in (("--nodes", int), ("--cpus", float), ("--gpus", float)):
        parser.add_argument(name, type=kind, required=True)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args(argv)
    import ray
    from ray.util.placement_group import placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy as Placed

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    ray.init()
    bundle = {"CPU": options.cpus, **({"GPU": options.gpus} if options.gpus else {})}
    group = placement_group([bundle] * options.nodes, strategy="STRICT_SPREAD")
    ray.get(group.ready())
    actor: Any = ray.remote(Node)
    asked = {"num_cpus": options.cpus, "num_gpus": options.gpus, "max_concurrency": 2}
    places = (Placed(group, placement_group_bundle_index=i) for i in range(options.nodes))
    nodes = [actor.options(**asked, scheduling_strategy=place).remote() for place in places]
    return run_on(nodes, options.command[1:])


if __name__ == "__main__":
    sys.exit(main())
