"""A stored episode's calls once more, in a fresh environment: where do the results part?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from composer_replication.interfaces import AgentEnvironment
from composer_replication.records import Score, ToolResult
from composer_replication.rollouts.episodes.episode import Episode

_COMPARED = ("text", "is_error", "exit_code", "timed_out", "is_truncated")
"""Of a result; its seconds never repeat."""


@dataclass(frozen=True, slots=True)
class Parting:
    """A call whose result is another one now; ``names`` are the fields that differ."""

    turn_idx: int
    call_idx: int
    names: tuple[str, ...]
    recorded: ToolResult
    replayed: ToolResult


@dataclass(frozen=True, slots=True)
class Replay:
    """What a replay found.

    ``has_other_message`` says that the first message is another one. ``score`` is the grading of the replayed tree,
    None where the sandbox failed; ``has_other_score`` says that its outcomes are not the recorded ones, and is False
    where one of the two is missing.
    """

    num_calls: int
    has_other_message: bool
    partings: tuple[Parting, ...]
    score: Score | None
    has_other_score: bool

    @property
    def is_same(self) -> bool:
        return not (self.has_other_message or self.partings or self.has_other_score)


def replay_episode(
    episode: Episode,
    open_environment: Callable[[], AgentEnvironment],
    *,
    normalise: Callable[[str], str] = lambda text: text,
    stops_at_first: bool = False,
) -> Replay:
    """Do every call of an episode again, in its order, and grade what is left; blocking.

    Calls without a result are left out: the episode ended before they were run. So are those that the loop itself
    refused, of answers with too many.

    Args:
        episode: recorded; its policy is not asked.
        open_environment: makes a fresh environment, which is closed whatever happens.
        normalise: applied to both texts before they are compared: takes times, addresses, folders out.
        stops_at_first: end after the first result that differs; the tree is graded as it stands.

    Raises:
        SandboxFailure: the sandbox broke.
    """
    partings: list[Parting] = []
    num_calls = 0
    environment = open_environment()
    try:
        message = environment.reset(episode.task_id)
        for turn_idx, turn in enumerate(episode.turns):
            pairs = zip(turn.observed.calls, turn.observed.results, strict=False)
            for call_idx, (call, recorded) in enumerate(pairs):
                if recorded.fault == "refused" or (stops_at_first and partings):
                    continue
                replayed = environment.call(call)
                num_calls += 1
                names = _differing(recorded, replayed, normalise)
                if names:
                    partings.append(Parting(turn_idx, call_idx, names, recorded, replayed))
        score = environment.grade()
    finally:
        environment.close()
    has_both = score is not None and episode.score is not None
    return Replay(
        num_calls=num_calls,
        has_other_message=normalise(message) != normalise(episode.first_messages[0]),
        partings=tuple(partings),
        score=score,
        has_other_score=has_both and _verdict(score) != _verdict(episode.score),
    )


def _differing(
    recorded: ToolResult, replayed: ToolResult, normalise: Callable[[str], str]
) -> tuple[str, ...]:
    names = [name for name in _COMPARED if getattr(recorded, name) != getattr(replayed, name)]
    if "text" in names and normalise(recorded.text) == normalise(replayed.text):
        names.remove("text")
    return tuple(names)


def _verdict(score: Score | None) -> object:
    return None if score is None else (dict(score.outcomes), bool(score.error))
