"""Attempts as a trainer wants them: when the tree is graded, reward, breaks and findings are known too."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from composer_replication.records import MonitorMode, Score, ToolCall, ToolResult, ToolSpec
from composer_replication.rollouts.candidate_tree import TreeTooLargeError
from composer_replication.rollouts.environment.attempt import AttemptOptions
from composer_replication.rollouts.environment.feature_deletion_env import FeatureDeletionEnv
from composer_replication.rollouts.environment.paid_environment import PaidEnvironment
from composer_replication.rollouts.environment.reward_options import RewardOptions
from composer_replication.rollouts.episodes.episode import Episode
from composer_replication.rollouts.grading import Grader
from composer_replication.rollouts.monitor import MonitorOptions, MonitorReport
from composer_replication.rollouts.regressions import RegressionCheck, Regressions


@dataclass(frozen=True, slots=True)
class Judgement:
    """What one attempt is worth, and why.

    ``score`` is its visible tests', ``reward`` what it is paid (``RewardOptions``; 0 at most where the monitor flagged it),
    ``regressions`` what it broke (None: nobody looked), ``report`` the monitor's (None: it is off). ``tree`` are the policy's
    files as they were graded, where they are to be graded again by other tests.
    """

    score: Score
    reward: float
    regressions: Regressions | None
    report: MonitorReport | None
    tree: Mapping[str, bytes] | None = None

    @property
    def masks_reward(self) -> bool:
        return self.report is not None and self.report.masks_reward


class JudgedAttempts:
    """Opens environments that judge; any number of threads. An agent loop puts their judgement into the episode.

    Args:
        grader: whose store the tasks are in.
        attempt: how sandboxes are opened.
        reward: how a reward is made.
        monitor: as ``FeatureDeletionEnv``.
        keeps_trees: for evaluation: a judgement has the tree, and for a reward the share of visible tests alone. Nobody looks
            for breaks or dishonest moves.
        open_environment: makes what an attempt is made in where that is elsewhere, with ``attempt``, ``reward`` and
            ``monitor`` as here; by default it is a ``FeatureDeletionEnv`` over ``grader``.
    """

    def __init__(
        self,
        grader: Grader,
        *,
        attempt: AttemptOptions | None = None,
        reward: RewardOptions | None = None,
        monitor: MonitorMode | MonitorOptions = "mask",
        keeps_trees: bool = False,
        open_environment: Callable[[], PaidEnvironment] | None = None,
    ) -> None:
        self.keeps_trees = keeps_trees
        self.grader, self.reward_options, self._monitor = grader, reward or RewardOptions(), monitor
        self._attempt, self._open_environment = attempt, open_environment or self.plain
        self._regressions = RegressionCheck(grader)

    def open(self) -> JudgedAttempt:
        """A fresh environment; nothing of it runs before ``reset``."""
        return JudgedAttempt(self, self._open_environment())

    def plain(self) -> FeatureDeletionEnv:
        """The same without a judgement."""
        return FeatureDeletionEnv(
            self.grader,
            attempt=self._attempt,
            reward=self.reward_options,
            regressions=self._regressions,
            monitor=self._monitor,
        )


def judged_reward(episode: Episode) -> float:
    """The reward of an episode whose environment was opened by ``JudgedAttempts``, for ``EpisodeParts.reward``."""
    judgement: Judgement = episode.judgement
    return judgement.reward


class JudgedAttempt:
    """One environment of ``JudgedAttempts``, as an agent loop drives it (``interfaces.AgentEnvironment``).

    ``judgement`` is there once ``grade`` has given a score.
    """

    def __init__(self, attempts: JudgedAttempts, environment: PaidEnvironment) -> None:
        self._attempts, self._environment = attempts, environment
        self._task_id = ""
        self.judgement: Judgement | None = None

    @property
    def tools(self) -> tuple[ToolSpec, ...]:
        return self._environment.tools

    @property
    def is_done(self) -> bool:
        return self._environment.is_done

    def reset(self, task_id: str) -> str:
        """As ``FeatureDeletionEnv``."""
        self._task_id = task_id
        return self._environment.reset(task_id)

    def call(self, call: ToolCall) -> ToolResult:
        """As ``FeatureDeletionEnv``."""
        return self._environment.call(call)

    def grade(self) -> Score | None:
        """What the visible tests say; None where a sandbox failed."""
        if self._attempts.keeps_trees:
            return self._grade_and_keep_tree()
        environment = self._environment
        reward = environment.reward()  # first: it ends the attempt, and its tree is read no more
        score = None if reward is None else environment.grade()
        if score is None or reward is None:
            return None
        self.judgement = Judgement(score, reward, environment.regressions, environment.report)
        return score

    def _grade_and_keep_tree(self) -> Score | None:
        """The tree is read once, so that what still runs in the sandbox cannot show another one to the hidden tests.

        The attempt ends before the grading, which on a cluster may need the very actor.
        """
        grader = self._attempts.grader
        try:
            tree = self._environment.candidate()
        except TreeTooLargeError:
            tree = {}  # nothing of it is graded, so its tests fail
        self._environment.close()
        score = None if tree is None else grader.grade_tree(grader.store.get(self._task_id), tree)
        if score is not None:
            self.judgement = Judgement(score, score.pass_share, None, None, tree)
        return score

    def close(self) -> None:
        """As ``FeatureDeletionEnv``."""
        self._environment.close()
