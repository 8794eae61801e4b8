"""A stored episode's calls once more, in a fresh environment: where do the results part?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from composer_replication.interfaces import AgentEnvironment
from composer_replication.records import ToolResult
from composer_replication.rollouts.episodes.episode import Episode


@dataclass(frozen=True, slots=True)
class Parting:
    """A call whose result is another one now, whatever seconds each took."""

    turn_idx: int
    call_idx: int
    recorded: ToolResult
    replayed: ToolResult


@dataclass(frozen=True, slots=True)
class Replay:
    """What a replay found: its calls, those that part, and the judgement of its tree (None where the sandbox failed)."""

    num_calls: int
    partings: tuple[Parting, ...]
    judgement: Any


def replay_episode(
    episode: Episode,
    open_environment: Callable[[], AgentEnvironment],
    *,
    normalise: Callable[[ToolResult], ToolResult] = lambda result: result,
) -> Replay:
    """Do every call of an episode again, in its order, and grade what is left; blocking.

    Calls without a result are left out: the episode ended before they were run. So are those that the loop itself
    refused, of answers with too many.

    Args:
        episode: recorded; its policy is not asked.
        open_environment: makes a fresh environment, which is closed whatever happens.
        normalise: applied to both results before they are compared: takes times, addresses, folders out.

    Raises:
        SandboxFailure: the sandbox broke.
    """
    partings: list[Parting] = []
    num_calls = 0
    environment = open_environment()
    try:
        environment.reset(episode.task_id)
        for turn_idx, turn in enumerate(episode.turns):
            pairs = zip(turn.observed.calls, turn.observed.results, strict=False)
            for call_idx, (call, recorded) in enumerate(pairs):
                if recorded.fault == "refused":
                    continue
                replayed = environment.call(call)
                num_calls += 1
                if normalise(recorded) != normalise(replayed):
                    partings.append(Parting(turn_idx, call_idx, recorded, replayed))
        return Replay(num_calls, tuple(partings), environment.finish())
    finally:
        environment.close()
