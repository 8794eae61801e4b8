"""Rollouts on a cluster, as a program: ``ray_rollouts.py ADDRESS STORE SCENARIO`` prints what became of them.

A program of its own, since a process reads its token for Ray once.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[2] / "fakes"))
from episode_parts import Asked, IdTalk, ScriptedPolicy
from ray_head import free_port, kill_session, processes

from composer_replication.errors import ComposerError
from composer_replication.records import Task, ToolCall
from composer_replication.rollouts.cluster import open_cluster
from composer_replication.rollouts.cluster.rollout_actor import ClusterOptions
from composer_replication.rollouts.environment.trl_face import TrlFeatureDeletion
from composer_replication.rollouts.episodes.agent_loop import episodes_in_order, sampling_seed
from composer_replication.rollouts.episodes.episode_options import EpisodeOptions, EpisodeParts
from composer_replication.rollouts.grading import Grader, GradeRequest, TestsUsed
from composer_replication.rollouts.regressions import find_regressions
from composer_replication.tasks.store import TaskStore

NUMBERS = "tinymath/numbers.py"
SLEEP = "sleep 31415"
BOTH: tuple[TestsUsed, ...] = ("visible", "hidden")


def clamp_of(store: TaskStore) -> Task:
    return next(task for task in store.tasks() if task.symbol == "clamp")


def write(path: str, content: str) -> str:
    return f"<write_file>{json.dumps({'path': path, 'content': content})}</write_file>"


def episode_scripts(store: TaskStore, task: Task) -> list[list[str]]:
    """Right, idle, right, wrong, idle; the first one looks around before."""
    golden = store.files(task, "golden")[NUMBERS].decode()
    wrong = golden.replace("return min(x, high)", "return high")
    listing, submit = '<bash>{"command": "ls tinymath"}</bash>', "<submit>{}</submit>"
    return [
        [listing, write(NUMBERS, golden), submit],
        [listing, submit],
        [write(NUMBERS, golden), submit],
        [write(NUMBERS, wrong), submit],
        [submit],
    ]


class SeededPolicy(ScriptedPolicy):
    """Follows the script of each episode, which the seed of an answer names; ``first`` replaces the first try's answer."""

    def __init__(self, scripts: list[list[str]], first: dict[tuple[int, int], str]) -> None:
        turns = ((i, t) for i, script in enumerate(scripts) for t in range(len(script)))
        self.place = {sampling_seed(0, i, t): (i, t) for i, t in turns}
        self.tries: Counter[tuple[int, int]] = Counter()

        def answer(asked: Asked) -> str:
            index, turn = self.place[asked.seed]
            self.tries[index, turn] += 1
            is_first = self.tries[index, turn] == 1
            return (
                first.get((index, turn), "") if is_first and (index, turn) in first else scripts[index][turn]
            )

        super().__init__(answer)


def told(episodes: list[Any]) -> list[dict[str, Any]]:
    return [
        {
            "reward": each.reward,
            "tries": each.num_tries,
            "reason": str(each.stop_reason),
            "outcomes": {} if each.score is None else {t: str(o) for t, o in each.score.outcomes.items()},
            "first": each.first_messages[0],
            "results": [result.text for turn in each.turns for result in turn.observed.results],
        }
        for each in episodes
    ]


def played(
    open_environment: Callable[[], Any],
    store: TaskStore,
    first: dict[tuple[int, int], str] | None = None,
    concurrent: int = 5,
) -> dict[str, Any]:
    """Five episodes of one task."""
    task = clamp_of(store)
    scripts = episode_scripts(store, task)
    policy = SeededPolicy(scripts, first or {})
    parts = EpisodeParts(policy, open_environment, IdTalk())
    counts: Counter[str] = Counter()
    options = EpisodeOptions(max_concurrent=concurrent, max_context_tokens=10**6, max_new_tokens=10**5)
    run = episodes_in_order([task.task_id] * len(scripts), parts, options=options, counts=counts)
    episodes = told(asyncio.run(run))
    tries = {f"{index}/{turn}": number for (index, turn), number in policy.tries.items()}
    return {"episodes": episodes, "counts": counts, "asked": tries}


def broken_tests(grader: Grader, task: Task) -> list[str]:
    """What a tree breaks in which another function is wrong."""
    golden = grader.store.files(task, "golden")[NUMBERS].decode()
    tree = grader.store.files(task, "rollout")
    tree[NUMBERS] = golden.replace("return -x if x < 0 else x", "return x").encode()
    found = find_regressions(grader, task, tree)
    assert found is not None
    return list(found.broken)


def attempt(work: Callable[[], Any]) -> dict[str, str]:
    """What it raised, or nothing."""
    try:
        work()
    except ComposerError as error:
        return {"type": type(error).__name__, "text": str(error)}
    return {}


def naming(words: str) -> list[int]:
    return [pid for pid, line in processes() if words in line and pid != os.getpid()]


def running(words: str) -> list[int]:
    """The command itself, not what is about to start it: a jail whose start its owner did not live to see is swept later."""
    return [pid for pid, line in processes() if line.strip() == words]


def kill_when(is_time: Callable[[], list[int]], kill: Callable[[int], None]) -> threading.Thread:
    """Kill the first process that ``is_time`` names, as soon as it names one."""

    def watch() -> None:
        while not (found := is_time()):
            time.sleep(0.05)
        kill(found[0])

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    return thread


def parents_of(pid: int) -> list[int]:
    found: list[int] = []
    while pid > 1:
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            return found
        found.append(pid)
    return found


def killed_actor(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def killed_node(pid: int) -> None:
    kill_session(os.getsid(pid))


def run_episodes_on(
    address: str, store: TaskStore, options: ClusterOptions, kill: Callable[[int], None]
) -> dict[str, Any]:
    """More episodes than actors, one of whose actors is killed while a command of its first try runs."""
    with open_cluster(address, store, options) as cluster:
        from composer_replication.rollouts.cluster.ray_environment import RayEnvironment

        while len(cluster.places()) < options.num_actors:  # so that a killed one is not the only one
            environments = [RayEnvironment(cluster) for _ in range(options.num_actors)]
            for environment in environments:
                environment.reset(clamp_of(store).task_id)
            for environment in environments:
                environment.close()
        before = cluster.places()

        def owner() -> list[int]:
            actors = {place.pid for place in before}
            return [pid for each in running(SLEEP) for pid in parents_of(each) if pid in actors]

        killer = kill_when(owner, kill)
        command = json.dumps({"command": f"{SLEEP} & echo begun; wait"})
        result = played(lambda: RayEnvironment(cluster), store, {(0, 1): f"<bash>{command}</bash>"})
        killer.join()
        alive = [place.pid for place in cluster.places() if Path(f"/proc/{place.pid}").exists()]
        torch = [pid for pid in alive if "libtorch" in Path(f"/proc/{pid}/maps").read_text()]
        result |= {"lost": cluster.counts["lost"], "sleeping": naming(SLEEP), "torch": torch, "alive": alive}
    return result


def run_faces_on(address: str, store: TaskStore) -> dict[str, Any]:
    """TRL's face, single answers, trees, and errors, over one actor."""
    task = clamp_of(store)
    golden = store.files(task, "golden")[NUMBERS].decode()
    result: dict[str, Any] = {"host": socket.gethostname()}
    with open_cluster(address, store, ClusterOptions(num_actors=1, num_cpus=0.1)) as cluster:
        from composer_replication.rollouts.cluster.ray_environment import RayEnvironment, RayGrader
        from composer_replication.tasks.workers.ray_connection import Head

        face = TrlFeatureDeletion(RayEnvironment(cluster))
        result["trl_first"] = face.reset(task_id=task.task_id)
        face.write_file(path=NUMBERS, content=golden)  # type: ignore[attr-defined]
        result["trl_reward"] = face.get_reward()
        grader = RayGrader(cluster)
        answers = [store.golden_body(task), "\n    return low", "\n    import os\n    os._exit(0)"]
        requests = [GradeRequest(task, answer, tests) for answer in answers for tests in BOTH]
        scores = grader.grade_many(requests)
        result["scores"] = [score and {t: str(o) for t, o in score.outcomes.items()} for score in scores]
        result["broken"] = broken_tests(grader, task)
        killer = kill_when(
            lambda: (
                [place.pid for place in cluster.places()]
                if cluster._free.empty() and not cluster._starting
                else []
            ),
            killed_actor,
        )
        again = grader.grade_many(requests[:1], afresh=True)[0]
        killer.join()
        result["graded_again"] = again is not None and again.all_passed
        result["grading_failures"] = grader.num_infrastructure_failures
        grader.close()

        environment = RayEnvironment(cluster)
        environment.reset(task.task_id)
        [place] = cluster.places()
        os.kill(place.pid, signal.SIGKILL)
        time.sleep(1.0)
        result["killed_idle"] = attempt(lambda: environment.call(ToolCall("list_files", "{}")))
        result["after_loss"] = [environment.is_done, environment.finish()]
        result["twice"] = attempt(lambda: environment.call(ToolCall("list_files", "{}")))
        result["unknown_task"] = attempt(lambda: environment.reset("no-such-task"))
        result["no_attempt"] = attempt(environment.finish)
        result["counts"] = dict(cluster.counts)
        head, cluster._head = (
            cluster._head,
            Head("127.0.0.1", free_port(), look_seconds=0.0, lost_seconds=0.0),
        )
        result["no_head"] = attempt(lambda: environment.reset(task.task_id))
        cluster._head = head
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
        "unsafe": attempt(opened(ClusterOptions(num_cpus=0.1, backend="unsafe_jail:Jail"))),
        "no_room": attempt(opened(ClusterOptions(num_cpus=64, resources={"side": 2.0}, waiting_seconds=2.0))),
    }
    with open_cluster(address, store, ClusterOptions(num_actors=1, num_cpus=0.1)) as cluster:
        import ray

        from composer_replication.rollouts.cluster.ray_environment import RayEnvironment

        environment = RayEnvironment(cluster)
        environment.reset(clamp_of(store).task_id)
        result["second"] = attempt(opened(ClusterOptions()))
        [(actor, place)] = cluster._places.items()
        ray.kill(actor)
        while Path(f"/proc/{place.pid}").exists():
            time.sleep(0.1)
        result["last"] = attempt(lambda: environment.call(ToolCall("list_files", "{}")))
        result["anew"] = attempt(lambda: environment.reset(clamp_of(store).task_id))
    return result


def episodes_and_a_dead_actor(address: str, store: TaskStore) -> dict[str, Any]:
    return run_episodes_on(address, store, ClusterOptions(num_actors=2, num_cpus=0.1), killed_actor)


def episodes_and_a_dead_node(address: str, store: TaskStore) -> dict[str, Any]:
    """Two nodes have room for one actor each."""
    options = ClusterOptions(num_actors=2, num_cpus=0.1, resources={"side": 0.6})
    return run_episodes_on(address, store, options, killed_node)


SCENARIOS = {
    "dead_actor": episodes_and_a_dead_actor,
    "dead_node": episodes_and_a_dead_node,
    "faces": run_faces_on,
    "refusals": refusals_of,
}

if __name__ == "__main__":
    print("\n" + json.dumps(SCENARIOS[sys.argv[3]](sys.argv[1], TaskStore.open(Path(sys.argv[2])))))
