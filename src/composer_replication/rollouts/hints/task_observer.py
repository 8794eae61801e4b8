"""What is known of a rollout on a task of a store: of a single answer prompt and answered file, of an episode all that it was."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

from composer_replication.config import RolloutsSection
from composer_replication.records import Outcome, Rollout, Score, StopReason, Task
from composer_replication.rollouts.environment.feature_deletion_env import first_message
from composer_replication.rollouts.episodes.episode import Episode, EpisodeTurn
from composer_replication.rollouts.grading import Grader, TestsUsed
from composer_replication.rollouts.hints.hinted_turns import ObservedRollout
from composer_replication.rollouts.single_turn import build_prompt, extract_answer, is_finished, marker_indent
from composer_replication.rollouts.tokens.token_ledger import Chat
from composer_replication.tasks.instructions import read_secrets, secret_shown, shown_sources
from composer_replication.tasks.planning.body_cuts import fill
from composer_replication.tasks.store import TaskStore
from composer_replication.tasks.test_functions import Place

MAX_ASSERTIONS = 2
_ASSERTION = re.compile(r"assert\b|self\.assert\w+\(|with [\w.]*(?:raises|assert)\w*\(")
_FAILED = {Outcome.FAILED, Outcome.ERROR, Outcome.MISSING}


@dataclass(frozen=True, slots=True)
class KnownTask:
    """A task, its first prompt and its visible tests (path and source of each function).

    ``places`` say where the function of a node id stands, ``is_leak`` whether a text shows deleted code, a hidden test or a
    hidden value: of these no more is known.
    """

    task: Task
    prompt: str
    sources: tuple[tuple[str, str], ...]
    places: Mapping[str, Place]
    is_leak: Callable[[str], bool]

    def failed_tests(self, score: Score | None) -> dict[str, str]:
        """The visible tests that failed and their assertions, those with a known one first; of tests that check the same in
        words, as the cases of a parametrised function do, the first. Outcomes of other tests are never looked at.
        """
        outcomes = {} if score is None else score.outcomes
        found: dict[str, tuple[str, str]] = {}
        for node_id in self.task.tests.shown:
            if outcomes.get(node_id) in _FAILED:
                assertion = self.assertion_of(node_id)
                found.setdefault(assertion or node_id.partition("[")[0], (node_id, assertion))
        return dict(sorted(found.values(), key=lambda test: not test[1]))

    def assertion_of(self, node_id: str) -> str:
        """The first lines of a test function that assert something; empty where its source is not known for sure."""
        path, _, name = self.places.get(node_id, ("", 0, ""))
        own = re.compile(rf"^[ \t]*(?:async )?def {re.escape(name)}\b", re.MULTILINE)
        sources = [text for source_path, text in self.sources if source_path == path and own.search(text)]
        if len(sources) != 1:
            return ""
        lines = [line.strip() for line in sources[0].splitlines()]
        found = [line.removeprefix("assert ") for line in lines if _ASSERTION.match(line)]
        return "; ".join(found[:MAX_ASSERTIONS])


def known_tasks(store: TaskStore, prompt_of: Callable[[Task], str]) -> Callable[[str], KnownTask]:
    """What is known of the tasks of a store, read once each; ``prompt_of`` is what a policy is told first."""

    @cache
    def known(task_id: str) -> KnownTask:
        task = store.get(task_id)
        prompt = prompt_of(task)
        places = store.repository(store.record(task_id).repository_record).places
        sources, secrets = tuple(shown_sources(store, task)), read_secrets(store, task, prompt)
        return KnownTask(task, prompt, sources, places, lambda text: bool(secret_shown(text, secrets)))

    return known


class TaskObserver:
    """Call it with a rollout on a one-hole task: ``HintedTurnMaker(tokenizer, observe=TaskObserver(grader))``.

    Hidden tests and the deleted code are looked at only to refuse a hint that shows them.

    Args:
        grader: of the reward, which keeps its scores, so that no answer is run again: asked for the score of rollouts that have
            a reward and no score, as a trainer makes them. Its store has the tasks.
        tests: those of the reward.
        options: as the prompts were cut.
    """

    def __init__(
        self,
        grader: Grader,
        *,
        tests: TestsUsed = "visible",
        options: RolloutsSection = RolloutsSection(),  # noqa: B008 - frozen
    ) -> None:
        self.grader, self.tests, self.options, store = grader, tests, options, grader.store
        self._known = known_tasks(
            store, lambda task: build_prompt(store.broken_text(task), task.hole, options)
        )

    def __call__(self, rollout: Rollout) -> ObservedRollout | None:
        if not rollout.turns:  # nothing was sampled
            return None
        known = self._known(rollout.task_id)
        hole, last, score = known.task.hole, rollout.turns[-1], rollout.score
        broken = self.grader.store.broken_text(known.task)
        completion, is_chat = last.completion, self.options.prompt_style == "chat"
        answer = extract_answer(completion.text, broken, hole, style=self.options.prompt_style)
        if completion.stop_reason is StopReason.LENGTH and not is_chat and is_finished(completion.text):
            completion = replace(completion, stop_reason=StopReason.STOP_RULE)  # a trainer sees ids only
        if score is None and rollout.reward is not None:
            score = self.grader.grade(known.task, answer, self.tests)
        chat = Chat([{"role": "user", "content": known.prompt}]) if is_chat else None
        episode = Episode(rollout.task_id, index=0, step=rollout.step, seed=0)
        turns, reason = (EpisodeTurn(last.prompt_ids, completion, chat=chat),), rollout.stop_reason
        return ObservedRollout(
            replace(episode, turns=turns, stop_reason=reason, score=score, reward=rollout.reward),
            answered_text=fill(broken, hole, answer) if answer.strip() else "",
            indent=marker_indent(broken, hole),
            failed_tests=known.failed_tests(score),
            is_leak=known.is_leak,
        )


class ObservedEpisodes:
    """An ``observe`` of ``HintedTurnMaker`` over the episodes of the step under way, on tasks of ``store``.

    A trainer makes its rollouts out of tensors, so it knows ids and nothing else. The ids are exact, and find the episode again:
    one attempt, however many summaries it went on from.
    """

    def __init__(self, store: TaskStore) -> None:
        self._known = known_tasks(store, partial(first_message, store))
        self._step = -1
        self._by_ids: dict[tuple[tuple[int, ...], tuple[int, ...]], Episode] = {}

    def note(self, episodes: Sequence[Episode]) -> None:
        """Remember those that move the weights; those of an earlier step are forgotten."""
        for episode in episodes:
            if episode.step != self._step:
                self._step, self._by_ids = episode.step, {}
            if episode.paid is not None:
                last = len(episode.turns) - 1
                ids = episode.prompt_ids(last), episode.turns[last].completion.token_ids
                self._by_ids[ids] = replace(episode, judgement=None)  # no hint is made of it

    def __call__(self, rollout: Rollout) -> ObservedRollout | None:
        """Everything about the episode whose ids these are; None where it has no turn or is unknown."""
        turns = rollout.turns
        episode = self._by_ids.get((turns[-1].prompt_ids, turns[-1].completion.token_ids)) if turns else None
        if episode is None:
            return None
        known = self._known(episode.task_id)
        return ObservedRollout(episode, failed_tests=known.failed_tests(episode.score), is_leak=known.is_leak)
