"""A stored episode's calls once more, in a fresh environment: where do the results part?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from composer_replication.interfaces import AgentEnvironment
from composer_replication.records import ToolResult
from composer_replication.rollouts.episodes.episode import Episode


@dataclass(frozen=True, slots=True)
class Replay:
    """What a replay found: the calls whose results are others now (recorded, replayed), whatever seconds each took, by turn and
    place within it, and the judgement of the tree (None where the sandbox failed).
    """

    num_calls: int
    partings: dict[tuple[int, int], tuple[ToolResult, ToolResult]]
    judgement: Any


def replay_episode(episode: Episode, environment: AgentEnvironment) -> Replay:
    """Do every call of an episode again, in its order, judge what is left, and close the environment; blocking.

    Calls without a result are left out: the episode ended before they were run. So are those that the loop itself
    refused, of answers with too many.

    Raises:
        SandboxFailure: the sandbox broke.
    """
    partings: dict[tuple[int, int], tuple[ToolResult, ToolResult]] = {}
    num_calls = 0
    try:
        environment.reset(episode.task_id)
        for turn_idx, turn in enumerate(episode.turns):
            pairs = zip(turn.observed.calls, turn.observed.results, strict=False)
            for call_idx, (call, recorded) in enumerate(pairs):
                if recorded.fault != "refused":
                    replayed = environment.call(call)
                    num_calls += 1
                    if recorded != replayed:
                        partings[turn_idx, call_idx] = recorded, replayed
        return Replay(num_calls, partings, environment.finish())
    finally:
        environment.close()
