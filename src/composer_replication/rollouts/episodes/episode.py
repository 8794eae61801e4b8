"""The record of an episode: turns with calls, results, tokens, seconds, what it was worth; and the row that a trainer takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass, field
from typing import Any, NamedTuple

from composer_replication.records import Completion, Score, StopReason, ToolCall, ToolResult, ToolSpec
from composer_replication.rollouts.tokens.token_ledger import Chat


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """Tokens by what they were for, as the effort penalty weighs them.

    Sampled ids are ``thinking`` (a summary as a whole), ``tool_call`` or ``final``. ``tool_output`` is what came
    in between two answers, the template's own ids included.
    """

    thinking: int = 0
    tool_call: int = 0
    tool_output: int = 0
    final: int = 0

    def __add__(self, other: TokenCounts) -> TokenCounts:
        return TokenCounts(*map(sum, zip(astuple(self), astuple(other), strict=True)))


@dataclass(frozen=True, slots=True)
class EpisodeTurn:
    """One answer of the policy and what its calls did: ``results[i]`` answers ``calls[i]``.

    ``added_ids`` are those of its prompt behind the answer before it, in the first turn of a conversation the whole prompt:
    an episode holds every id once. ``chat`` is the conversation that the prompt renders; None for a prompt without chat turns.
    ``segment_idx`` counts the conversations of the episode from 0; a summary is the last turn of its segment.
    """

    added_ids: tuple[int, ...]
    completion: Completion
    calls: tuple[ToolCall, ...] = ()
    results: tuple[ToolResult, ...] = ()
    chat: Chat | None = None
    segment_idx: int = 0
    is_summary: bool = False
    policy_seconds: float = 0.0
    tool_seconds: float = 0.0
    tokens: TokenCounts = field(default_factory=TokenCounts)


@dataclass(frozen=True, slots=True)
class Episode:
    """One attempt at one task, from the first message to its reward.

    ``index`` is its place among the episodes that were asked for, ``num_tries`` how often it was begun; only the last
    try is kept. ``first_messages`` has one text a segment: a conversation, of which each but the last ended with its summary.
    ``reward`` is None for an episode that must not move the weights: the sandbox or the policy's server failed each time
    (``INFRASTRUCTURE``, ``failure`` is the code of the last failure). ``judgement`` is all that its environment says of it;
    it is not stored.
    """

    task_id: str
    index: int
    step: int
    seed: int
    turns: tuple[EpisodeTurn, ...] = ()
    first_messages: tuple[str, ...] = ()
    tools: tuple[ToolSpec, ...] = ()
    stop_reason: StopReason = StopReason.INFRASTRUCTURE
    score: Score | None = None
    reward: float | None = None
    seconds: float = 0.0
    grading_seconds: float = 0.0
    num_tries: int = 1
    failure: str = ""
    judgement: Any = field(default=None, compare=False, repr=False)

    @property
    def paid(self) -> float | None:
        """What a trainer is told; None moves no weight: infrastructure, or nothing was sampled."""
        return self.reward if self.turns else None

    @property
    def tokens(self) -> TokenCounts:
        return sum((each.tokens for each in self.turns), TokenCounts())

    @property
    def num_calls(self) -> int:
        return sum(len(each.calls) for each in self.turns)

    @property
    def num_invalid_calls(self) -> int:
        """Calls that no tool could take, as the environment says: those that ``invalid_call_cost`` charges."""
        return sum(result.fault == "invalid" for each in self.turns for result in each.results)

    def prompt_ids(self, turn_idx: int) -> tuple[int, ...]:
        """The whole prompt of a turn: all that its conversation held. It is put together for a moment, not to keep."""
        turn = self.turns[turn_idx]
        before = (each for each in self.turns[:turn_idx] if each.segment_idx == turn.segment_idx)
        seen = (token_id for each in before for token_id in (*each.added_ids, *each.completion.token_ids))
        return (*seen, *turn.added_ids)


class RolloutRow(NamedTuple):
    """One row: ``completion_ids`` are all ids after the first prompt, ``mask`` is 1 on sampled ones that carry loss.

    ``sampled_logp`` has 0.0 between sampled ids and is empty where the sampler gave none. ``effort_counts`` are by kind, as
    the trainer's effort price takes them. An episode that went on from summaries is one row: ``segment_starts`` are the
    places in ``completion_ids`` at which the prompts of its later conversations begin.
    """

    prompt_ids: list[int]
    completion_ids: list[int]
    mask: list[int]
    sampled_logp: list[float]
    reward: float | None
    effort_counts: dict[str, float]
    segment_starts: list[int]


_TRL_COLUMNS = (
    "prompt_ids completion_ids env_mask logprobs episode_reward effort_counts segment_starts".split()
)
"""Names of the fields of ``RolloutRow`` in a ``rollout_func`` of TRL 1.16; those that it does not know join its rows."""


def rollout_row(episode: Episode, *, filler_id: int) -> RolloutRow:
    """The row of an episode, its conversations one after the other; ``filler_id`` stands alone, without loss, where nothing was sampled."""
    tokens = {f"{kind}_token": float(number) for kind, number in asdict(episode.tokens).items()}
    counts = {**tokens, "tool_call": float(episode.num_calls), "turn": float(len(episode.turns))}
    if not episode.turns:
        return RolloutRow([filler_id], [filler_id], [0], [0.0], None, counts, [])
    carries_loss = int(episode.paid is not None)
    row = RolloutRow(list(episode.turns[0].added_ids), [], [], [], episode.paid, counts, [])
    for idx, turn in enumerate(episode.turns):
        if idx and turn.segment_idx != episode.turns[idx - 1].segment_idx:
            row.segment_starts.append(len(row.completion_ids))
        added, said = turn.added_ids if idx else (), turn.completion
        row.completion_ids.extend((*added, *said.token_ids))
        row.mask.extend([0] * len(added) + [carries_loss] * len(said.token_ids))
        row.sampled_logp.extend((*[0.0] * len(added), *said.token_logp))
    has_logp = all(turn.completion.token_logp for turn in episode.turns)
    return row if has_logp else row._replace(sampled_logp=[])


def trl_columns(rows: Sequence[RolloutRow], *, may_chain: bool = False) -> dict[str, Any]:
    """What a ``rollout_func`` returns; with ``may_chain`` the trainer is told where conversations begin."""
    columns: dict[str, Any] = {name: [row[idx] for row in rows] for idx, name in enumerate(_TRL_COLUMNS)}
    if not all(columns["logprobs"]):
        columns["logprobs"] = None
    if not may_chain:
        del columns["segment_starts"]
    return columns
