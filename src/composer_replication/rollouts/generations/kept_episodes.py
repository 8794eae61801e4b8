"""What is kept of the episodes of a step: files in the run's folder, and all that a hint may be made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from composer_replication.records import Rollout
from composer_replication.rollouts.environment.feature_deletion_env import first_message
from composer_replication.rollouts.episodes.episode import Episode
from composer_replication.rollouts.episodes.trajectories import write_trajectories
from composer_replication.rollouts.hints.hint_context import ObservedRollout
from composer_replication.rollouts.hints.task_observer import KnownTasks
from composer_replication.rollouts.monitor.report import HackFinding
from composer_replication.run_folder import rewrite_jsonl
from composer_replication.tasks.store import TaskStore

_Key = tuple[tuple[int, ...], tuple[int, ...]]


class KeptEpisodes:
    """Writes three files for each step, whole or not at all; a step that is done again after a resume replaces them.

    ``step-000001.jsonl`` has a line for each rollout as a report reads it, its reward null where it moved no weight.
    ``episodes-000001.jsonl`` has ATIF lines with the reward as it was graded, ``findings-000001.jsonl`` a line for each episode
    in which the monitor found something.

    Args:
        folder: of the files.
        part: put into the names where several processes write, empty otherwise.
        session_id: of the run, ``model_name`` of its policy: they stand in every trajectory.
    """

    def __init__(
        self, folder: Path, *, part: str = "", session_id: str = "composer-replication", model_name: str = ""
    ) -> None:
        self._folder, self._part = folder, part
        self._write = partial(write_trajectories, session_id=session_id, model_name=model_name)
        self._step = -1
        self._played: list[Episode] = []

    def keep(self, played: Sequence[Episode], *, step: int) -> None:
        """Add the episodes of a generation; dynamic sampling makes several of one step."""
        if step != self._step:
            self._step, self._played = step, []
        self._played += played
        rewrite_jsonl(self._path("step"), [_line(each) for each in self._played])
        self._write(self._path("episodes"), self._played)
        findings = [row for each in self._played if (row := _findings(each)) is not None]
        if findings or self._path("findings").is_file():
            rewrite_jsonl(self._path("findings"), findings)

    def keep_evaluation(self, name: str, played: Sequence[Episode]) -> None:
        """Trajectories that nothing is learned from, in a file of this name."""
        self._write(self._folder / f"{name}{self._part}.jsonl", played)

    def _path(self, kind: str) -> Path:
        return self._folder / f"{kind}-{self._step:06d}{self._part}.jsonl"


def _line(episode: Episode) -> dict[str, Any]:
    """A rollout as those of single answers are kept: its text is all that was said, called and answered."""
    score, patch = episode.score, getattr(episode.judgement, "patch", None)
    said: list[str] = []
    for turn in episode.turns:
        said.append(turn.observed.turn.completion.text)
        said += [f"=> {result.text}" for result in turn.observed.results]
    return {
        "task_id": episode.task_id,
        "step": episode.step,
        "text": "\n".join(said),
        **({} if patch is None else {"patch": patch}),
        "num_turns": len(episode.turns),
        "reward": episode.paid,
        "outcomes": {} if score is None else {node: str(outcome) for node, outcome in score.outcomes.items()},
        "error": "" if score is None else score.error,
        "stop_reason": str(episode.stop_reason),
        "seconds": round(episode.seconds, 4),
    }


def _findings(episode: Episode) -> dict[str, Any] | None:
    """What the monitor found, its calls by turn and place within it."""
    report = None if episode.judgement is None else episode.judgement.report
    if report is None or not report.findings:
        return None
    places = [
        (turn_idx, call_idx)
        for turn_idx, turn in enumerate(episode.turns)
        for call_idx, result in enumerate(turn.observed.results)
        if result.fault != "refused"  # no environment has seen it
    ]
    report = replace(report, findings=tuple(_placed(finding, places) for finding in report.findings))
    return {"step": episode.step, "index": episode.index, "seed": episode.seed, **report.to_json()}


def _placed(finding: HackFinding, places: Sequence[tuple[int, int]]) -> HackFinding:
    """``turn_idx`` of a finding counts the calls of the attempt."""
    number = finding.turn_idx
    if number is None or number >= len(places):
        return finding
    turn_idx, call_idx = places[number]
    return replace(finding, turn_idx=turn_idx, call_idx=call_idx)


class ObservedEpisodes:
    """An ``observe`` of ``HintedTurnMaker`` over the episodes of the step under way.

    A trainer makes its rollouts out of tensors, so it knows ids and nothing else. The ids are exact, and find the episode again.

    Args:
        store: has the tasks.
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
        return replace(found, failed_tests=known.failed_tests(found.rollout.score), is_leak=known.is_leak)


def observed_episode(episode: Episode) -> ObservedRollout:
    """One attempt, however many summaries it went on from: its row in a batch is one, too."""
    turns = tuple(each.observed for each in episode.turns)
    rollout = replace(episode.segments[-1], turns=tuple(each.turn for each in turns))
    return ObservedRollout(rollout, turns, tools=episode.tools)


def _key(rollout: Rollout) -> _Key:
    last = rollout.turns[-1]
    return last.prompt_ids, last.completion.token_ids
