"""Episodes for evaluation: the same tools and limits as in training, judged by visible and hidden tests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from composer_replication.interfaces import TokenPolicy
from composer_replication.records import Task
from composer_replication.rollouts.episodes.episode import Episode
from composer_replication.rollouts.generations.episode_player import EpisodePlayer
from composer_replication.rollouts.grading import GradeRequest
from composer_replication.rollouts.task_sampler import TaskSampler


class CurrentPolicy(Protocol):
    """The policy of ``trainer`` as it is now; ``step`` is how many steps of the optimizer it has behind it."""

    trainer: Any

    @property
    def step(self) -> int: ...

    def opened(self, num_running: Callable[[], int]) -> AbstractContextManager[TokenPolicy]:
        """For a while; ``num_running`` says how many episodes may ask it at a moment."""
        ...


class EpisodeSampler(TaskSampler):
    """Asks a policy for fresh attempts by episodes: an attempt is the tree that one leaves behind.

    Args:
        player: whose judgements have the tree (``keeps_trees``).
        policy: answers.
        keep: told of the episodes under the name of their evaluation.

    ``stop_reasons`` counts why the episodes so far ended.
    """

    def __init__(
        self,
        player: EpisodePlayer,
        policy: CurrentPolicy,
        *,
        keep: Callable[[str, Sequence[Episode]], None] | None = None,
    ) -> None:
        super().__init__(player.grader)
        self.player, self.policy, self._keep = player, policy, keep
        self.stop_reasons: Counter[str] = Counter()

    def follow(self, trainer: Any) -> None:
        """As ``TaskSampler``."""
        self.policy.trainer = trainer

    def golden(self, task: Task) -> GradeRequest:
        """The whole tree with the original code in it."""
        tree = {**self.grader.store.files(task, "rollout"), **self.grader.golden_files(task)}
        return GradeRequest(task, "", tree=tree)

    def attempts(
        self, tasks: Sequence[Task], *, num_samples: int, seed: int, name: str
    ) -> list[list[GradeRequest | None]]:
        """The trees that episodes left.

        Raises:
            ComposerError: what the loop raises.
        """
        of_each = [task for task in tasks for _ in range(num_samples)]
        with self.policy.opened(lambda: self.player.num_running) as policy:
            played = self.player.play(
                [task.task_id for task in of_each],
                policy,
                seed=seed,
                step=self.policy.step,
                on_ended=self.note_prompts,
            )
        self.stop_reasons.update(str(each.stop_reason) for each in played)
        if self._keep is not None and name:
            self._keep(name, played)
        made = [
            None if each.judgement is None else GradeRequest(task, "", tree=each.judgement.tree)
            for task, each in zip(of_each, played, strict=True)
        ]
        return [made[start : start + num_samples] for start in range(0, len(made), num_samples)]
