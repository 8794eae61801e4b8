"""Attempts as a trainer wants them: when the tree is graded, reward, breaks and findings are known too.

An agent loop knows a score and nothing else of what an environment found out, and it closes the environment before its
episode is given out. So each grading here gives a score of its own (an object that no other attempt has), under which
the judgement is kept until the episode is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from threading import Lock

from composer_replication.records import MonitorMode, Score, ToolCall, ToolResult, ToolSpec
from composer_replication.rollouts.candidate_tree import TreeTooLargeError
from composer_replication.rollouts.environment.attempt import AttemptOptions
from composer_replication.rollouts.environment.feature_deletion_env import FeatureDeletionEnv
from composer_replication.rollouts.environment.paid_environment import InspectedEnvironment
from composer_replication.rollouts.environment.reward_options import RewardOptions
from composer_replication.rollouts.episodes.episode import Episode
from composer_replication.rollouts.grading import Grader
from composer_replication.rollouts.monitor import HackFinding, MonitorOptions, MonitorReport
from composer_replication.rollouts.regressions import RegressionCheck, Regressions


@dataclass(frozen=True, slots=True)
class Judgement:
    """What one attempt is worth, and why.

    ``score`` is its visible tests', ``reward`` what it is paid (``RewardOptions``; 0 at most where the monitor flagged it),
    ``regressions`` what it broke (None: nobody looked), ``report`` the monitor's (None: it is off). Turns and calls of findings are those of the episode. ``tree`` are the
    policy's files as they were graded, where they are to be graded again by other tests.
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
    """Opens environments that judge, and hands out their judgements; any number of threads.

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
        open_environment: Callable[[], InspectedEnvironment] | None = None,
    ) -> None:
        self.keeps_trees = keeps_trees
        self.grader, self.reward_options, self._monitor = grader, reward or RewardOptions(), monitor
        self._attempt, self._open_environment = attempt, open_environment or self.plain
        self._regressions = RegressionCheck(grader)
        self._lock = Lock()
        self._judgements: dict[int, Judgement] = {}

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

    def reward_of(self, episode: Episode) -> float:
        """The reward of a graded episode, for ``EpisodeParts.reward``."""
        judgement = None if episode.score is None else self._judgements.get(id(episode.score))
        if judgement is None:
            raise ValueError("only episodes whose environment was opened here have a judgement")
        return judgement.reward

    def take(self, episode: Episode) -> Judgement | None:
        """The judgement of an episode, once; None where nothing was graded. Findings name its turns and calls."""
        with self._lock:
            found = None if episode.score is None else self._judgements.pop(id(episode.score), None)
        if found is None or found.report is None:
            return found
        places = _places(episode)
        findings = tuple(_placed(finding, places) for finding in found.report.findings)
        return replace(found, report=replace(found.report, findings=findings))

    def forget(self) -> None:
        """Drop what nobody took: of a grading that ended after its episode had been given up."""
        with self._lock:
            self._judgements.clear()

    def keep(self, judgement: Judgement) -> None:
        """Keep a judgement under its score, which it holds, so that no other object has that identity."""
        with self._lock:
            self._judgements[id(judgement.score)] = judgement


class JudgedAttempt:
    """One environment of ``JudgedAttempts``, as an agent loop drives it (``interfaces.AgentEnvironment``)."""

    def __init__(self, attempts: JudgedAttempts, environment: InspectedEnvironment) -> None:
        self._attempts, self._environment = attempts, environment
        self._task_id = ""

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
        """What the visible tests say; the judgement is kept under the very score. None where a sandbox failed."""
        if self._attempts.keeps_trees:
            return self._grade_and_keep_tree()
        environment = self._environment
        score = environment.grade()
        if score is None:
            return None
        reward = environment.reward()
        if reward is None:
            return None
        own = replace(score)  # the grader gives one object to all who left the same tree
        self._attempts.keep(Judgement(own, reward, environment.regressions, environment.report))
        return own

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
        if score is None:
            return None
        own = replace(score)
        self._attempts.keep(Judgement(own, own.pass_share, None, None, tree))
        return own

    def close(self) -> None:
        """As ``FeatureDeletionEnv``."""
        self._environment.close()


def _places(episode: Episode) -> list[tuple[int, int]]:
    """Turn and call within it of each call that an environment has seen, in order."""
    return [
        (turn_idx, call_idx)
        for turn_idx, turn in enumerate(episode.turns)
        for call_idx, result in enumerate(turn.observed.results)
        if result.fault != "refused"
    ]


def _placed(finding: HackFinding, places: list[tuple[int, int]]) -> HackFinding:
    number = finding.turn_idx
    if number is None or number >= len(places):
        return finding
    turn_idx, call_idx = places[number]
    return replace(finding, turn_idx=turn_idx, call_idx=call_idx)
