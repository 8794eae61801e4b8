"""Faces, gradings and losses on a real Ray of this machine, and errors of one sentence.

Whole runs whose actors and nodes are killed are in tests/invariants/test_rollouts_on_ray.py.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from finished import finished

from composer_replication.records import Task
from composer_replication.rollouts.environment.feature_deletion_env import FeatureDeletionEnv
from composer_replication.rollouts.grading import Grader, GradeRequest
from composer_replication.tasks.store import TaskStore

pytest.importorskip("ray", reason="the extra ray is not installed")
from ray_head import RayHead, running_ray
from ray_rollouts import BOTH

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]
UNSAFE = (
    "from composer_replication.errors import SandboxFailure\n\n\nclass Jail:\n    name = 'unsafe'\n\n"
    "    def is_available(self):\n        return None\n\n    def open(self, spec):\n        raise SandboxFailure('CR0302', 'planted')\n"
)
Run = Callable[[str], dict[str, Any]]


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayHead]:
    """The one Ray of this file; its workers know a jail that does not hold."""
    root = tmp_path_factory.mktemp("ray")
    (root / "jails").mkdir()
    (root / "jails" / "unsafe_jail.py").write_text(UNSAFE)
    path = os.pathsep.join(filter(None, [str(root / "jails"), os.environ.get("PYTHONPATH", "")]))
    with running_ray(root, PYTHONPATH=path) as found:
        yield found


@pytest.fixture
def run(head: RayHead, store: TaskStore) -> Run:
    """A scenario of ``ray_rollouts``."""

    def scenario(name: str) -> dict[str, Any]:
        words = [sys.executable, Path(__file__).with_name("ray_rollouts.py"), head.address, store.root, name]
        program = finished(words, env={**os.environ, **head.token})
        assert program.returncode == 0, program.stderr
        told: dict[str, Any] = json.loads(program.stdout.splitlines()[-1])
        return told

    return scenario


def test_faces_gradings_and_losses(
    run: Run, head: RayHead, grader: Grader, store: TaskStore, clamp: Task
) -> None:
    told = run("faces")
    copies = list((head.cache / "task-stores").iterdir())
    assert [TaskStore.open(copy).fingerprint for copy in copies] == [store.fingerprint]
    assert any((head.cache / "environments").iterdir()), "made from what was sent"
    with FeatureDeletionEnv(grader) as env:
        assert told["trl_first"] == env.reset(clamp.task_id)
    assert told["trl_reward"] == 1.0
    answers = [store.golden_body(clamp), "\n    return low", "\n    import os\n    os._exit(0)"]
    requests = [GradeRequest(clamp, each, tests) for each in answers for tests in BOTH]
    for theirs, mine in zip(told["scores"], grader.grade_many(requests), strict=True):
        assert mine is not None
        assert theirs == {test: str(outcome) for test, outcome in mine.outcomes.items()}
    assert (told["graded_again"], told["num_gradings"]) == (True, 2)
    assert told["killed_idle"]["type"] == "SandboxFailure"
    assert told["killed_idle"]["text"].startswith("CR0491: ")
    assert f"[{told['host']}, process " in told["killed_idle"]["text"]
    assert told["after_loss"] == [True, None]
    assert told["twice"]["text"].startswith("CR0303")
    for name, kind, code in (
        ("unknown_task", "InputError", "CR0412"), ("no_attempt", "UsageError", "CR0800"),
        ("closed", "SandboxFailure", "CR0302"),
    ):  # fmt: skip
        assert told[name]["type"] == kind
        assert told[name]["text"].startswith(f"{code}: ")


def test_what_a_cluster_cannot_do_is_one_sentence(run: Run) -> None:
    told = run("refusals")
    for name, kind, code, words in (
        ("unsafe", "MissingError", "CR0491", "the sandbox unsafe does not hold"),
        ("no_room", "MissingError", "CR0490", "Ray has placed 0 of 4, and each asks for CPU 64, side 2"),
        ("second", "UsageError", "CR0490", "has joined a Ray cluster already"),
        ("last", "SandboxFailure", "CR0491", "the worker of an attempt or a grading was lost"),
    ):
        assert told[name]["type"] == kind, told[name]
        assert told[name]["text"].startswith(f"{code}: ")
        assert words in told[name]["text"]
    assert "text" not in told["anew"]
