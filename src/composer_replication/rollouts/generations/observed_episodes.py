"""The episode that a row of a trainer came from, with all that a hint may be made of.

A trainer makes its rollouts out of tensors, so it knows ids and nothing else. The ids are exact, and find the episode again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from composer_replication.records import Rollout
from composer_replication.rollouts.environment.feature_deletion_env import first_message
from composer_replication.rollouts.episodes.episode import Episode
from composer_replication.rollouts.hints.hint_context import ObservedRollout
from composer_replication.rollouts.hints.task_observer import KnownTasks
from composer_replication.tasks.store import TaskStore

_Key = tuple[tuple[int, ...], tuple[int, ...]]


class ObservedEpisodes:
    """An ``observe`` of ``HintedTurnMaker`` over the episodes of the step under way.

    Args:
        store: has the tasks.

    Raises (when called):
        InputError: no such task, or the store is damaged (CR0411, CR0412).
    """

    def __init__(self, store: TaskStore) -> None:
        self._known = KnownTasks(store, partial(first_message, store))
        self._step = -1
        self._by_ids: dict[_Key, ObservedRollout] = {}

    def note(self, episodes: Sequence[Episode]) -> None:
        """Remember these; those of an earlier step are forgotten."""
        for episode in episodes:
            if episode.step != self._step:
                self._step, self._by_ids = episode.step, {}
            if episode.turns:
                observed = observed_episode(episode)
                self._by_ids[_key(observed.rollout)] = observed

    def __call__(self, rollout: Rollout) -> ObservedRollout:
        """Everything about the episode whose ids these are; the rollout alone where it has no turn or is unknown."""
        found = self._by_ids.get(_key(rollout)) if rollout.turns else None
        if found is None:
            return ObservedRollout(rollout, ())
        known = self._known(found.rollout.task_id)
        return replace(
            found,
            failed_tests=known.failed_tests(found.rollout.score),
            is_leak=known.is_leak,
        )


def observed_episode(episode: Episode) -> ObservedRollout:
    """One attempt, however many summaries it went on from: its row in a batch is one, too."""
    turns = tuple(each.observed for each in episode.turns)
    rollout = replace(episode.segments[-1], turns=tuple(each.turn for each in turns))
    return ObservedRollout(rollout, turns, tools=episode.tools)


def _key(rollout: Rollout) -> _Key:
    last = rollout.turns[-1]
    return last.prompt_ids, last.completion.token_ids
