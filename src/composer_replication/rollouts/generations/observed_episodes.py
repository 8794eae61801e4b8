"""The episode that a row of a trainer came from, with all that a hint may be made of.

A trainer makes its rollouts out of tensors, so it knows ids and nothing else. The ids are exact, and find the episode again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from composer_replication.records import Rollout, Task
from composer_replication.rollouts.environment.feature_deletion_env import first_message
from composer_replication.rollouts.episodes.episode import Episode
from composer_replication.rollouts.hints.failing_tests import failed_tests
from composer_replication.rollouts.hints.hint_context import ObservedRollout
from composer_replication.tasks.instructions.writing import read_material
from composer_replication.tasks.instructions.written_instructions import read_secrets, secret_shown
from composer_replication.tasks.store import TaskStore
from composer_replication.tasks.test_functions import Place

_Key = tuple[tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class _Known:
    """Of one task, read once."""

    task: Task
    tree: tuple[str, ...]
    sources: tuple[tuple[str, str], ...]
    places: Mapping[str, Place]
    secrets: Any


class ObservedEpisodes:
    """An ``observe`` of ``HintedTurnMaker`` over the episodes of the step under way.

    Hidden tests and the deleted code are looked at only to refuse a hint that shows them.

    Args:
        store: has the tasks.

    Raises (when called):
        InputError: no such task, or the store is damaged (CR0411, CR0412).
    """

    def __init__(self, store: TaskStore) -> None:
        self._store = store
        self._known: dict[str, _Known] = {}
        self._step = -1
        self._by_ids: dict[_Key, ObservedRollout] = {}

    def note(self, episodes: Sequence[Episode]) -> None:
        """Remember these; those of an earlier step are forgotten."""
        for episode in episodes:
            if episode.step != self._step:
                self._step, self._by_ids = episode.step, {}
            conversations = [each for each in episode.observed_rollouts if each.turns]
            if conversations:
                self._by_ids[_key(conversations[-1].rollout)] = _whole(conversations)

    def __call__(self, rollout: Rollout) -> ObservedRollout:
        """Everything about the episode whose ids these are; the rollout alone where it has no turn or is unknown."""
        found = self._by_ids.get(_key(rollout)) if rollout.turns else None
        if found is None:
            return ObservedRollout(rollout, ())
        known = self._read(found.rollout.task_id)
        return replace(
            found,
            tree=known.tree,
            failed_tests=failed_tests(known.task, found.rollout.score, known.sources, known.places),
            is_leak=lambda text: bool(secret_shown(text, known.secrets)),
        )

    def _read(self, task_id: str) -> _Known:
        if task_id not in self._known:
            task = self._store.get(task_id)
            places = self._store.repository(self._store.record(task_id).repository_record).places
            self._known[task_id] = _Known(
                task,
                tuple(sorted(self._store.files(task, "rollout"))),
                read_material(self._store, task).sources,
                {test: places[test] for test in task.tests.visible if test in places},
                read_secrets(self._store, task, first_message(self._store, task)),
            )
        return self._known[task_id]


def _whole(conversations: Sequence[ObservedRollout]) -> ObservedRollout:
    """One attempt, however many summaries it went on from: its row in a batch is one, too."""
    last = conversations[-1]
    turns = tuple(turn for each in conversations for turn in each.turns)
    return replace(last, rollout=replace(last.rollout, turns=tuple(each.turn for each in turns)), turns=turns)


def _key(rollout: Rollout) -> _Key:
    last = rollout.turns[-1]
    return last.prompt_ids, last.completion.token_ids
