"""``composer-rl WORD…`` with scripted words in the place of a model's: ``ray_rollout_worker.py EVENTS WORD…``.

EVENTS, with commas between them or ``none``, happen one after the other: each as soon as two episodes wait for an answer that is
not their first, or, for a recipe of single answers, when a grading has begun on the cluster. ``actors=SESSION`` kills our actors on the node
of this session, ``actor=SESSION`` one of them, ``node=SESSION`` all of the node, which does not come back; ``ctrl-c`` is a person's, and
``killed`` is the end of this process. ``build`` is awaited: work of a build that is given to the cluster.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "fakes"))
sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "trainer"))

from ray_head import actors_of, kill_session
from scripted_tools import ASSISTANT, ThinkingSampler, sampler_of

from composer_replication.cli.main import main
from composer_replication.records import Completion, StopReason
from composer_replication.rollouts.episodes.policies import SampleOptions
from composer_replication.tasks.store import TaskStore
from composer_replication.trainer import episode_rollouts
from composer_replication.trainer.policy import InProcessPolicy

EVENTS: list[str] = []


def next_event() -> None:
    with suppress(IndexError):
        event, _, session = EVENTS.pop(0).partition("=")
        if event == "ctrl-c":
            os.killpg(0, signal.SIGINT)  # as a terminal does
        elif event == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        elif event == "build":
            return
        elif event == "node":
            kill_session(int(session))
        else:
            for pid in sorted(actors_of(int(session)))[: 1 if event == "actor" else None]:
                os.kill(pid, signal.SIGKILL)


class Eventful(ThinkingSampler):
    """Looks for the moment in which two episodes wait for an answer that is not their first."""

    def __call__(self, prompts: list[tuple[int, ...]], options: list[SampleOptions]) -> Sequence[Completion]:
        turns = [self.tokenizer.decode(prompt).count(ASSISTANT) for prompt in prompts]
        if len(turns) == 2 and min(turns) > 1:
            next_event()
        return super().__call__(prompts, options)


def let_gradings_be_eventful() -> None:
    from composer_replication.rollouts.cluster import rollout_cluster
    from composer_replication.tasks.workers.ray_cluster import RayPool

    call, wait_for = RayPool.call, rollout_cluster.wait_for

    def called(self: Any, *args: Any, **options: Any) -> Any:
        if EVENTS[:1] == ["build"]:
            next_event()
        return call(self, *args, **options)

    def waited_for(reference: Any, look: Any) -> Any:
        if EVENTS[:1] != ["build"]:  # without episodes every request to an actor is a grading
            next_event()
        return wait_for(reference, look)

    RayPool.call, rollout_cluster.wait_for = called, waited_for


def half_right(store: TaskStore) -> Any:
    """In the place of ``InProcessPolicy.generate``: every other answer is the deleted body."""
    bodies = [store.golden_body(task) for task in store.tasks()]

    def generate(
        policy: InProcessPolicy, prompts: Sequence[str], *, num_samples: int, **options: Any
    ) -> list[list[Completion]]:
        del policy, options
        texts = [[body if n % 2 else "\n    return None\n" for n in range(num_samples)] for body in bodies]
        assert len(texts) == len(prompts)
        return [[Completion((1,), text, StopReason.FINISHED) for text in of_task] for of_task in texts]

    return generate


if __name__ == "__main__":
    # A shell that starts the tests in its background lets them ignore Ctrl-C; a person's shell does not.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    EVENTS += [] if sys.argv[1] == "none" else sys.argv[1].split(",")
    words = sys.argv[2:]
    is_evaluation, plays_episodes = words[0] == "eval", "--recipe" in words
    if is_evaluation and not plays_episodes:
        InProcessPolicy.generate = half_right(TaskStore.open(Path(words[words.index("--tasks") + 1])))
    else:
        worker = runpy.run_path(str(Path(__file__).with_name("agentic_worker.py")))
        episode_rollouts.model_sampler = sampler_of(worker["scripts"](), Eventful)
    if EVENTS and not plays_episodes and "agent" not in Path(words[1]).read_text():
        let_gradings_be_eventful()
    code = main(words)
    assert not EVENTS, "the run ended before all of it had happened"
    sys.exit(code)
