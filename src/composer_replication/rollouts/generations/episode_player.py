"""Plays the episodes of one generation of a trainer, and says in numbers what happened."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, nullcontext
from dataclasses import dataclass

from composer_replication.errors import SandboxFailure
from composer_replication.interfaces import TokenPolicy
from composer_replication.records import StopReason, TaskOutcome
from composer_replication.rollouts.environment.judged_attempts import JudgedAttempts, judged_reward
from composer_replication.rollouts.episodes.agent_loop import run_anywhere, run_episodes
from composer_replication.rollouts.episodes.episode import Episode
from composer_replication.rollouts.episodes.episode_options import EpisodeOptions, EpisodeParts
from composer_replication.rollouts.episodes.ledger_talk import LedgerTalk
from composer_replication.rollouts.generations.kept_episodes import KeptEpisodes
from composer_replication.rollouts.generations.observed_episodes import ObservedEpisodes
from composer_replication.rollouts.grading import FORGED
from composer_replication.rollouts.heldout_evaluation import derive_seed
from composer_replication.rollouts.reward_function import outcome_of

_REASONS = ("submitted", "finished", "turns", "context", "length", "deadline", "infrastructure")


@dataclass(frozen=True, slots=True)
class Listeners:
    """Who hears of the episodes of training: the run folder, the curriculum, the hints; None is nobody."""

    kept: KeptEpisodes | None = None
    on_outcomes: Callable[[Sequence[TaskOutcome]], None] | None = None
    observed: ObservedEpisodes | None = None


class EpisodePlayer:
    """Plays generations, one at a time.

    Args:
        attempts: opens environments and judges.
        talk: conversations over the policy's chat template.
        options: the limits.
        seed: of the run.
        listeners: told of every generation that is trained on.
        num_places: how many attempts have a place at this moment, where nodes may go away; None: as many as run.

    ``figures`` are numbers of the newest generation, for the log; ``num_running`` how many episodes may ask the policy.
    ``on_ended`` is told of each episode that ends while it plays (so many, of so many).
    """

    def __init__(
        self,
        attempts: JudgedAttempts,
        talk: LedgerTalk,
        options: EpisodeOptions,
        *,
        seed: int,
        listeners: Listeners | None = None,
        num_places: Callable[[], int] | None = None,
    ) -> None:
        self.attempts, self.talk, self.options, self.seed = attempts, talk, options, seed
        self.listeners = listeners or Listeners()
        self.figures: dict[str, float] = {}
        self.on_ended: Callable[[int, int], None] | None = None
        self._num_left = 0
        self._num_places = num_places

    @property
    def num_running(self) -> int:
        """Whoever waits for a place cannot ask, and is not waited for."""
        num = min(self.options.max_concurrent, self._num_left)
        return num if self._num_places is None else max(1, min(num, self._num_places()))

    def generation(
        self, task_ids: Sequence[str], policy: TokenPolicy, *, step: int, place: str, is_training: bool = True
    ) -> list[Episode]:
        """One episode for each task id, in their order.

        Seeds come from the run's seed, the step and the place; what was under way when a run was cut is begun again with the same
        ones.

        Args:
            task_ids: those of a group are repeated.
            policy: samples ids.
            step: of the optimizer, from 1.
            place: which generation of the step, and of which process.
            is_training: False tells no listener.

        Raises:
            SandboxFailure: every episode was lost to infrastructure (CR0390).
            ComposerError: what the loop raises.
        """
        counts: Counter[str] = Counter()
        seed = derive_seed(self.seed, f"episodes {place}", step)
        played = self.play(task_ids, policy, seed=seed, step=step, counts=counts, on_ended=self.on_ended)
        if all(each.stop_reason is StopReason.INFRASTRUCTURE for each in played):
            raise SandboxFailure(
                "CR0390",
                "the sandbox failed for every rollout of a batch.",
                where=played[0].failure,
                fix="composer-rl sandbox selftest",
            )
        self.figures = figures_of(played, counts)
        if is_training:
            self._tell(played, step)
        return played

    def play(
        self,
        task_ids: Sequence[str],
        policy: TokenPolicy,
        *,
        seed: int,
        step: int,
        counts: Counter[str] | None = None,
        on_ended: Callable[[int, int], None] | None = None,
    ) -> list[Episode]:
        """One episode for each task id, in their order; nobody is told of them but ``on_ended`` (so many, of so many).

        Raises:
            ComposerError: what the loop raises.
        """
        self._num_left = num_all = len(task_ids)
        parts = self.parts(policy)

        async def all_of_them() -> list[Episode]:
            found: dict[int, Episode] = {}
            stream = run_episodes(task_ids, parts, options=self.options, seed=seed, step=step, counts=counts)
            opened = policy if isinstance(policy, AbstractAsyncContextManager) else nullcontext()
            async with opened, aclosing(stream) as episodes:
                async for episode in episodes:
                    self._num_left -= 1
                    found[episode.index] = episode
                    if on_ended is not None:
                        on_ended(len(found), num_all)
            return [found[index] for index in range(num_all)]

        return run_anywhere(all_of_them())

    def parts(self, policy: TokenPolicy) -> EpisodeParts:
        """Who takes part in an episode that ``policy`` plays."""
        talk = self.talk
        return EpisodeParts(
            policy, self.attempts.open, talk.open, talk.find_calls, judged_reward, talk.count_kinds
        )

    def _tell(self, played: Sequence[Episode], step: int) -> None:
        to = self.listeners
        if to.kept is not None:
            to.kept.keep(played, step=step)
        if to.on_outcomes is not None:
            to.on_outcomes([outcome_of_episode(each) for each in played])
        if to.observed is not None:
            to.observed.note([each for each in played if each.paid is not None])


def outcome_of_episode(episode: Episode) -> TaskOutcome:
    """What a curriculum learns; a flagged attempt passed nothing."""
    if episode.judgement is not None and episode.judgement.masks_reward:
        return TaskOutcome(episode.task_id, is_full_pass=False, credit=0.0)
    return outcome_of(episode.task_id, episode.score)


def figures_of(episodes: Sequence[Episode], counts: Counter[str]) -> dict[str, float]:
    """Numbers of a generation: means over its episodes, counts of what is seldom."""
    scores = [each.score for each in episodes if each.score is not None]
    reports = [each.judgement.report for each in episodes if each.judgement is not None]
    known = [report for report in reports if report is not None]
    num_asked = sum(each.num_calls for each in episodes)
    figures = {
        "visible_pass": statistics.fmean(score.all_passed for score in scores) if scores else 0.0,
        "shown_pass": statistics.fmean(score.passed_all(paid=False) for score in scores) if scores else 0.0,
        "visible_share": statistics.fmean(score.pass_share for score in scores) if scores else 0.0,
        "turns": statistics.fmean(len(each.turns) for each in episodes),
        "summaries": statistics.fmean(sum(turn.is_summary for turn in each.turns) for each in episodes),
        "calls": num_asked / len(episodes),
        "invalid_calls": float(counts["invalid_calls"]),
        "invalid_calls_share": counts["invalid_calls"] / num_asked if num_asked else 0.0,
        "infrastructure_failures": float(counts["infrastructure_failures"]),
        "forgeries": float(sum(score.error.startswith(FORGED) for score in scores)),
        "dropped": float(sum(each.paid is None for each in episodes)),
        "monitor_findings": float(sum(len(report.findings) for report in known)),
        "monitor_flagged": float(sum(bool(report.findings) for report in known)),
        "monitor_masked": float(sum(report.masks_reward for report in known)),
    }
    ended = Counter(str(each.stop_reason) for each in episodes)
    figures |= {f"stopped_{reason}": ended[reason] / len(episodes) for reason in _REASONS}
    return {f"rollouts/{name}": value for name, value in figures.items()}
