"""``composer-rl WORD…`` with scripted words in the place of a model's: ``ray_rollout_worker.py SESSION WORD…``.

Where the session of a node of Ray is given (0: none), an actor there is killed amid an episode, in a round in which two are under way;
a negative number kills all of the node, which does not come back.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "fakes"))
sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "trainer"))

from ray_head import actors_of, kill_session
from scripted_tools import ASSISTANT, ThinkingSampler, sampler_of

from composer_replication.cli.main import main
from composer_replication.records import Completion, StopReason
from composer_replication.rollouts.episodes.batching_policy import SampleOptions
from composer_replication.tasks.store import TaskStore
from composer_replication.trainer import episode_rollouts
from composer_replication.trainer.policy import InProcessPolicy


class Killing(ThinkingSampler):
    """Kills once, when two episodes wait for an answer that is not their first."""

    session = 0

    def __call__(self, prompts: list[tuple[int, ...]], options: list[SampleOptions]) -> Sequence[Completion]:
        turns = [self.tokenizer.decode(prompt).count(ASSISTANT) for prompt in prompts]
        if self.session and len(turns) == 2 and min(turns) > 1:
            if self.session > 0:
                os.kill(min(actors_of(self.session)), signal.SIGKILL)
            else:
                kill_session(-self.session)
            Killing.session = 0
        return super().__call__(prompts, options)


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
    Killing.session = int(sys.argv[1])
    words = sys.argv[2:]
    if words[0] == "eval":
        InProcessPolicy.generate = half_right(TaskStore.open(Path(words[words.index("--tasks") + 1])))
    else:
        worker = runpy.run_path(str(Path(__file__).with_name("agentic_worker.py")))
        episode_rollouts.model_sampler = sampler_of(worker["scripts"](), Killing)
    sys.exit(main(words))
