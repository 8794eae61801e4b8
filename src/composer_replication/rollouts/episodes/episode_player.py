"""Plays the episodes of one generation of a trainer or of an evaluation, and says in numbers what happened."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from composer_replication.config import AgentSection
from composer_replication.errors import SandboxFailure
from composer_replication.records import StopReason, Task, TaskOutcome
from composer_replication.rollouts.environment.feature_deletion_env import FeatureDeletionEnv, Judgement
from composer_replication.rollouts.episodes.agent_loop import EpisodeParts, LedgerTalk, run_episodes
from composer_replication.rollouts.episodes.episode import Episode
from composer_replication.rollouts.episodes.policies import TokenPolicy, run_anywhere
from composer_replication.rollouts.episodes.shortcut_judge import ShortcutJudge
from composer_replication.rollouts.grading import Grader, GradeRequest
from composer_replication.rollouts.heldout_evaluation import TaskSampler, derive_seed
from composer_replication.rollouts.rewards import outcome_of

Listener = Callable[[list[Episode]], None]
"""Hears of the episodes of a generation."""
_REASONS = ("submitted", "finished", "turns", "context", "length", "deadline", "infrastructure")


@dataclass(eq=False)
class EpisodePlayer:
    """Plays generations, one at a time, on tasks of the store of ``grader``.

    ``open_environment`` makes a fresh one for each try. ``judge`` may add findings to a generation that is trained on, and then
    ``listeners`` hear of it: the run folder, the curriculum, the hints. With ``keeps_trees``, for evaluation, a judgement is that of ``finish_with_tree``.
    The policy samples at ``temperature``. ``num_places`` says how many attempts have a place at this moment, where nodes may go away; None: as many as run.

    ``figures`` are numbers of the newest generation, for the log; ``num_running`` how many episodes may ask the policy.
    ``on_ended`` is told of each episode that ends while it plays (so many, of so many).
    """

    grader: Grader
    open_environment: Callable[[], FeatureDeletionEnv]
    talk: LedgerTalk
    options: AgentSection
    seed: int = field(kw_only=True)
    temperature: float = field(default=1.0, kw_only=True)
    judge: ShortcutJudge | None = field(default=None, kw_only=True)
    listeners: Sequence[Listener] = field(default=(), kw_only=True)
    keeps_trees: bool = field(default=False, kw_only=True)
    num_places: Callable[[], int] | None = field(default=None, kw_only=True)
    on_ended: Callable[[int, int], None] = field(default=lambda *_: None, init=False)
    figures: dict[str, float] = field(default_factory=dict, init=False)
    _num_left: int = field(default=0, init=False)

    @property
    def num_running(self) -> int:
        """An episode that has no place yet cannot ask, and no batch waits for it."""
        num = min(self.options.max_concurrent, self._num_left)
        return num if self.num_places is None else max(1, min(num, self.num_places()))

    def generation(
        self, task_ids: Sequence[str], policy: TokenPolicy, *, step: int, place: str, is_training: bool = True
    ) -> list[Episode]:
        """One episode for each task id, in their order; listeners are told where it ``is_training``.

        Seeds come from the run's seed, the step (from 1) and the place: which generation of the step, and of which process. What
        was under way when a run was cut is begun again with the same ones. A generation of which infrastructure took every
        episode is refused (CR0390).
        """
        seed = derive_seed(self.seed, f"episodes {place}", step)
        played = run_anywhere(self.play(task_ids, policy, seed=seed, step=step))
        if all(each.stop_reason is StopReason.INFRASTRUCTURE for each in played):
            raise SandboxFailure(
                "CR0390",
                "the sandbox failed for every rollout of a batch.",
                where=played[0].failure,
                fix="composer-rl sandbox selftest",
            )
        told: dict[str, float] = {}
        if is_training and self.judge is not None:
            played, told = self.judge(played)
        self.figures = figures_of(played) | told
        if is_training:
            for listener in self.listeners:
                listener(played)
        return played

    async def play(
        self, task_ids: Sequence[str], policy: TokenPolicy, *, seed: int, step: int
    ) -> list[Episode]:
        """One episode for each task id, in their order; no listener is told."""
        self._num_left = num_all = len(task_ids)

        def note(num_ended: int) -> None:
            self._num_left = num_all - num_ended
            self.on_ended(num_ended, num_all)

        async with policy if isinstance(policy, AbstractAsyncContextManager) else nullcontext():
            return await run_episodes(
                task_ids, self.parts(policy), options=self.options, seed=seed, step=step, on_ended=note
            )

    def parts(self, policy: TokenPolicy) -> EpisodeParts:
        """Who takes part in an episode that ``policy`` plays."""
        parts = EpisodeParts(policy, self.open_environment, self.talk, temperature=self.temperature)
        return replace(parts, finish=partial(finish_with_tree, self.grader)) if self.keeps_trees else parts


def finish_with_tree(grader: Grader, environment: Any, task_id: str) -> Judgement | None:
    """The judgement of an evaluation: it has the tree, and the share of visible tests as its reward. Broken tests and
    dishonest moves are not looked for. None where a sandbox failed.

    The tree is read once, so that what still runs in the sandbox cannot show another one to the hidden tests. The attempt
    ends before the grading, which on a cluster may need the very actor.
    """
    tree = environment.candidate()
    environment.close()
    score = None if tree is None else grader.grade_tree(grader.store.get(task_id), tree)
    return None if score is None else Judgement(score, score.pass_share, score.pass_share, tree=tree)


def outcome_of_episode(episode: Episode) -> TaskOutcome:
    """What a curriculum learns; a flagged attempt passed nothing."""
    if episode.judgement is not None and episode.judgement.masks_reward:
        return TaskOutcome(episode.task_id, is_full_pass=False)
    return outcome_of(episode.task_id, episode.score)


def figures_of(episodes: Sequence[Episode]) -> dict[str, float]:
    """Numbers of a generation: means over its episodes, and counts of what is rare."""
    scores = [each.score for each in episodes if each.score is not None]
    reports = [each.judgement.report for each in episodes if each.judgement is not None]
    known = [report for report in reports if report is not None]
    turns = [turn for each in episodes for turn in each.turns]
    num_asked, num_episodes = sum(each.num_calls for each in episodes), len(episodes)
    num_invalid = sum(each.num_invalid_calls for each in episodes)
    ended = Counter(str(each.stop_reason) for each in episodes)
    # each try but the last one failed, and of a lost episode the last one, too
    num_failures = sum(each.num_tries - 1 for each in episodes) + ended["infrastructure"]
    figures = {
        "visible_pass": statistics.fmean(score.all_passed for score in scores) if scores else 0.0,
        "shown_pass": statistics.fmean(score.passed_all(paid=False) for score in scores) if scores else 0.0,
        "visible_share": statistics.fmean(score.pass_share for score in scores) if scores else 0.0,
        "turns": len(turns) / num_episodes,
        "policy_seconds": math.fsum(turn.policy_seconds for turn in turns) / num_episodes,
        "tool_seconds": math.fsum(turn.tool_seconds for turn in turns) / num_episodes,
        "grading_seconds": statistics.fmean(each.grading_seconds for each in episodes),
        "summaries": sum(turn.is_summary for turn in turns) / num_episodes,
        "calls": num_asked / num_episodes,
        "invalid_calls": float(num_invalid),
        "invalid_calls_share": num_invalid / num_asked if num_asked else 0.0,
        "infrastructure_failures": float(num_failures),
        "forgeries": float(sum(score.is_forged for score in scores)),
        "dropped": float(sum(each.paid is None for each in episodes)),
        "monitor_findings": float(sum(len(report.findings) for report in known)),
        "monitor_flagged": float(sum(bool(report.findings) for report in known)),
        "monitor_masked": float(sum(report.masks_reward for report in known)),
    }
    figures |= {f"stopped_{reason}": ended[reason] / num_episodes for reason in _REASONS}
    return {f"rollouts/{name}": value for name, value in figures.items()}


class EpisodeSampler(TaskSampler):
    """Asks a policy for fresh attempts by episodes: an attempt is the tree that one leaves behind.

    The judgements of ``player`` have the tree (``keeps_trees``), ``policy`` is as ``trainer.episode_rollouts.TrainedPolicy``, and
    ``keep`` is told of the episodes under the name of their evaluation. ``stop_reasons`` counts why the episodes so far ended.
    """

    def __init__(
        self,
        player: EpisodePlayer,
        policy: Any,
        *,
        keep: Callable[[str, Sequence[Episode]], None] | None = None,
    ) -> None:
        super().__init__(player.grader)
        self.player, self.policy, self._keep = player, policy, keep
        player.on_ended = self.note_prompts
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
        """The trees that episodes left."""
        of_each = [task for task in tasks for _ in range(num_samples)]
        task_ids, step = [task.task_id for task in of_each], self.policy.step
        with self.policy.opened(lambda: self.player.num_running) as policy:
            played = run_anywhere(self.player.play(task_ids, policy, seed=seed, step=step))
        self.stop_reasons.update(str(each.stop_reason) for each in played)
        if self._keep is not None and name:
            self._keep(name, played)
        made = [
            None if each.judgement is None else GradeRequest(task, "", tree=each.judgement.tree)
            for task, each in zip(of_each, played, strict=True)
        ]
        return [made[start : start + num_samples] for start in range(0, len(made), num_samples)]
