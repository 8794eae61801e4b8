"""Rollouts on a cluster, as a program: ``ray_rollouts.py ADDRESS STORE SCENARIO`` prints what became of them.

A program of its own, since a process reads its token for Ray once.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[2] / "fakes"))

from composer_replication.errors import ComposerError
from composer_replication.records import Task, ToolCall
from composer_replication.rollouts.cluster import open_cluster
from composer_replication.rollouts.cluster.rollout_actor import ClusterOptions
from composer_replication.rollouts.environment.trl_face import TrlFeatureDeletion
from composer_replication.rollouts.grading import GradeRequest, TestsUsed
from composer_replication.tasks.store import TaskStore

NUMBERS = "tinymath/numbers.py"
SLEEP = "sleep 31415"
BOTH: tuple[TestsUsed, ...] = ("visible", "hidden")


def clamp_of(store: TaskStore) -> Task:
    return next(task for task in store.tasks() if task.symbol == "clamp")


def pid_of(place: str) -> int:
    """Of ``HOST, process PID``."""
    return int(place.rpartition(" ")[2])


def attempt(work: Callable[[], Any]) -> dict[str, str]:
    """What it raised, or nothing."""
    try:
        work()
    except ComposerError as error:
        return {"type": type(error).__name__, "text": str(error)}
    return {}


def kill_when(is_time: Callable[[], list[int]], kill: Callable[[int], None]) -> threading.Thread:
    """Kill the first process that ``is_time`` names, as soon as it names one."""

    def watch() -> None:
        while not (found := is_time()):
            time.sleep(0.05)
        kill(found[0])

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    return thread


def run_faces_on(address: str, store: TaskStore) -> dict[str, Any]:
    """TRL's face, single answers, trees, and errors, over one actor."""
    task = clamp_of(store)
    golden = store.files(task, "golden")[NUMBERS].decode()
    result: dict[str, Any] = {"host": socket.gethostname()}
    with open_cluster(address, store, ClusterOptions(num_actors=1, num_cpus=0.1)) as cluster:
        from composer_replication.rollouts.cluster.rollout_cluster import RayEnvironment, RayGrader

        face = TrlFeatureDeletion(RayEnvironment(cluster))
        result["trl_first"] = face.reset(task_id=task.task_id)
        face.write_file(path=NUMBERS, content=golden)  # type: ignore[attr-defined]
        result["trl_reward"] = face.get_reward()
        grader = RayGrader(cluster)
        answers = [store.golden_body(task), "\n    return low", "\n    import os\n    os._exit(0)"]
        requests = [GradeRequest(task, answer, tests) for answer in answers for tests in BOTH]
        scores = grader.grade_many(requests)
        result["scores"] = [score and {t: str(o) for t, o in score.outcomes.items()} for score in scores]
        killer = kill_when(
            lambda: (
                [pid_of(place) for place in cluster.places()]
                if cluster._free.empty() and not cluster._starting
                else []
            ),
            lambda pid: os.kill(pid, signal.SIGKILL),
        )
        tries, once = [], grader.grade_once
        grader.grade_once = lambda request: tries.append(request) or once(request)  # type: ignore[func-returns-value,method-assign]
        again = grader.grade_many(requests[:1], afresh=True)[0]
        killer.join()
        result["graded_again"] = again is not None and again.all_passed
        result["num_gradings"] = len(tries)
        grader.close()

        environment = RayEnvironment(cluster)
        environment.reset(task.task_id)
        [place] = cluster.places()
        os.kill(pid_of(place), signal.SIGKILL)
        time.sleep(1.0)
        result["killed_idle"] = attempt(lambda: environment.call(ToolCall("list_files", "{}")))
        result["after_loss"] = [environment.is_done, environment.finish()]
        result["twice"] = attempt(lambda: environment.call(ToolCall("list_files", "{}")))
        result["unknown_task"] = attempt(lambda: environment.reset("no-such-task"))
        result["no_attempt"] = attempt(environment.finish)
    result["closed"] = attempt(lambda: environment.reset(task.task_id))
    return result


def refusals_of(address: str, store: TaskStore) -> dict[str, Any]:
    """Clusters that cannot be opened, and one whose actor is taken away."""

    def opened(options: ClusterOptions) -> Callable[[], None]:
        def work() -> None:
            with open_cluster(address, store, options):
                pass

        return work

    result: dict[str, Any] = {
        "unsafe": attempt(opened(ClusterOptions(num_cpus=0.1, grader={"backend": "unsafe_jail:Jail"}))),
        "no_room": attempt(opened(ClusterOptions(num_cpus=64, resources={"side": 2.0}, waiting_seconds=2.0))),
    }
    with open_cluster(address, store, ClusterOptions(num_actors=1, num_cpus=0.1)) as cluster:
        import ray

        from composer_replication.rollouts.cluster.rollout_cluster import RayEnvironment

        environment = RayEnvironment(cluster)
        environment.reset(clamp_of(store).task_id)
        result["second"] = attempt(opened(ClusterOptions()))
        [(actor, place)] = cluster._places.items()
        ray.kill(actor)
        while Path(f"/proc/{pid_of(place)}").exists():
            time.sleep(0.1)
        result["last"] = attempt(lambda: environment.call(ToolCall("list_files", "{}")))
        result["anew"] = attempt(lambda: environment.reset(clamp_of(store).task_id))
    return result


SCENARIOS = {"faces": run_faces_on, "refusals": refusals_of}

if __name__ == "__main__":
    print("\n" + json.dumps(SCENARIOS[sys.argv[3]](sys.argv[1], TaskStore.open(Path(sys.argv[2])))))
