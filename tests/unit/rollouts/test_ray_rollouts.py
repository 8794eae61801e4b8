"""TRL's face, a lost worker, and errors of one sentence, on a real Ray of this machine.

Whole runs whose actors and nodes are killed are in tests/invariants/test_rollouts_on_ray.py.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from finished import finished

from composer_replication.tasks.store import TaskStore

pytest.importorskip("ray", reason="the extra ray is not installed")
from ray_head import RayHead, running_ray

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]
# A program of its own, since a process reads its token for Ray once.
PROGRAM = """
import json, sys, time
from pathlib import Path
from composer_replication.errors import ComposerError
from composer_replication.records import ToolCall
from composer_replication.rollouts.cluster import open_cluster
from composer_replication.rollouts.cluster.rollout_actor import ClusterOptions
from composer_replication.rollouts.environment.trl_face import TrlFeatureDeletion
from composer_replication.tasks.store import TaskStore

def attempt(work):
    try: work()
    except ComposerError as error: return [type(error).__name__, str(error)]
    return []

def opened(options):
    with open_cluster(address, store, options): pass

address, store = sys.argv[1], TaskStore.open(Path(sys.argv[2]))
task = next(task for task in store.tasks() if task.symbol == "clamp")
path = "tinymath/numbers.py"
far = ClusterOptions(num_cpus=64, resources={"side": 2.0}, waiting_seconds=2.0)
told = {"no_room": attempt(lambda: opened(far))}
with open_cluster(address, store, ClusterOptions(num_actors=1, num_cpus=0.1)) as cluster:
    import ray
    from composer_replication.rollouts.cluster.rollout_cluster import RayEnvironment
    face = TrlFeatureDeletion(RayEnvironment(cluster))
    face.reset(task_id=task.task_id)
    face.write_file(path=path, content=store.files(task, "golden")[path].decode())
    told["reward"] = face.get_reward()
    environment = RayEnvironment(cluster)
    listing = lambda: environment.call(ToolCall("list_files", "{}"))
    told["unknown_task"] = attempt(lambda: environment.reset("no-such-task"))
    told["no_attempt"] = attempt(environment.finish)
    environment.reset(task.task_id)
    told["second"] = attempt(lambda: opened(ClusterOptions()))
    [(actor, place)] = cluster._places.items()
    ray.kill(actor)
    while Path(f"/proc/{place.rpartition(' ')[2]}").exists(): time.sleep(0.1)
    told["lost"] = attempt(listing)
    told["after_loss"] = [environment.is_done, environment.finish()]
    told["twice"] = attempt(listing)
    told["anew"] = attempt(lambda: environment.reset(task.task_id))
told["closed"] = attempt(lambda: environment.reset(task.task_id))
print("\\n" + json.dumps(told))
"""
REFUSALS = {
    "no_room": ("MissingError", "CR0490", "Ray has placed 0 of 4, and each asks for CPU 64, side 2"),
    "unknown_task": ("InputError", "CR0412", ""),
    "no_attempt": ("UsageError", "CR0800", ""),
    "second": ("UsageError", "CR0490", "has joined a Ray cluster already"),
    "lost": ("SandboxFailure", "CR0491", "the worker of an attempt or a grading was lost"),
    "twice": ("SandboxFailure", "CR0303", ""),
    "closed": ("SandboxFailure", "CR0302", ""),
}


@pytest.fixture
def head(tmp_path: Path) -> Iterator[RayHead]:
    with running_ray(tmp_path) as found:
        yield found


def test_a_face_is_paid_and_what_a_cluster_cannot_do_is_one_sentence(head: RayHead, store: TaskStore) -> None:
    words = [sys.executable, "-c", PROGRAM, head.address, store.root]
    program = finished(words, env={**os.environ, **head.token})
    assert program.returncode == 0, program.stderr
    told = json.loads(program.stdout.splitlines()[-1])
    copies = list((head.cache / "task-stores").iterdir())
    assert [TaskStore.open(copy).fingerprint for copy in copies] == [store.fingerprint]
    assert any((head.cache / "environments").iterdir()), "made from what was sent"
    assert (told["reward"], told["after_loss"], told["anew"]) == (1.0, [True, None], [])
    for name, (kind, code, words_of_it) in REFUSALS.items():
        assert told[name][0] == kind, told[name]
        assert told[name][1].startswith(f"{code}: ") and words_of_it in told[name][1]
