"""What happened in each step, in a run's folder: a line for each rollout, its whole trajectory, what the monitor found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from composer_replication.rollouts.episodes.episode import Episode
from composer_replication.rollouts.episodes.trajectories import write_trajectories
from composer_replication.rollouts.monitor import HackFinding
from composer_replication.run_folder import rewrite_jsonl


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
        self,
        folder: Path,
        *,
        part: str = "",
        session_id: str = "composer-replication",
        model_name: str = "",
    ) -> None:
        self._folder, self._part = folder, part
        self._write = partial(write_trajectories, session_id=session_id, model_name=model_name)
        self._step = -1
        self._played: list[Episode] = []

    def keep(self, played: Sequence[Episode], *, step: int) -> None:
        """Add the episodes of a generation; dynamic sampling makes several of one step.

        Raises:
            InputError: an episode cannot be written (CR0401).
        """
        if step != self._step:
            self._step, self._played = step, []
        self._played += played
        rewrite_jsonl(self._path("step"), [_line(each) for each in self._played])
        self._write(self._path("episodes"), self._played)
        findings = [row for each in self._played if (row := _findings(each)) is not None]
        if findings or self._path("findings").is_file():
            rewrite_jsonl(self._path("findings"), findings)

    def keep_evaluation(self, name: str, played: Sequence[Episode]) -> None:
        """Trajectories that nothing is learned from, in a file of this name.

        Raises:
            InputError: an episode cannot be written (CR0401).
        """
        path = self._folder / f"{name}{self._part}.jsonl"
        self._write(path, played)

    def _path(self, kind: str) -> Path:
        return self._folder / f"{kind}-{self._step:06d}{self._part}.jsonl"


def _line(episode: Episode) -> dict[str, Any]:
    """A rollout as those of single answers are kept: its text is all that was said, called and answered."""
    score = episode.score
    return {
        "task_id": episode.task_id,
        "step": episode.step,
        "text": _transcript(episode),
        "patch": getattr(episode.judgement, "patch", ""),
        "num_turns": len(episode.turns),
        "reward": episode.paid,
        "outcomes": {} if score is None else {node: str(outcome) for node, outcome in score.outcomes.items()},
        "error": "" if score is None else score.error,
        "stop_reason": str(episode.stop_reason),
        "seconds": round(episode.seconds, 4),
    }


def _transcript(episode: Episode) -> str:
    parts: list[str] = []
    for turn in episode.turns:
        parts.append(turn.observed.turn.completion.text)
        parts += [f"=> {result.text}" for result in turn.observed.results]
    return "\n".join(parts)


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
