"""The record of an episode: turns with calls, results, tokens, seconds, what it was worth; and the row that a trainer takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from composer_replication.errors import InputError
from composer_replication.records import Rollout, Score, StopReason, ToolCall, ToolResult, ToolSpec, Turn
from composer_replication.rollouts.tokens.chat import Chat


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
        return TokenCounts(
            self.thinking + other.thinking,
            self.tool_call + other.tool_call,
            self.tool_output + other.tool_output,
            self.final + other.final,
        )


@dataclass(frozen=True, slots=True)
class ObservedTurn:
    """A turn with what it called and what came back: ``results[i]`` answers ``calls[i]``.

    ``chat`` is the conversation that its prompt renders; None for a prompt without chat turns.
    """

    turn: Turn
    calls: tuple[ToolCall, ...] = ()
    results: tuple[ToolResult, ...] = ()
    chat: Chat | None = None


@dataclass(frozen=True, slots=True)
class EpisodeTurn:
    """One answer of the policy and what its calls did.

    ``segment_idx`` counts the conversations of the episode from 0; a summary is the last turn of its segment.
    """

    observed: ObservedTurn
    segment_idx: int = 0
    is_summary: bool = False
    policy_seconds: float = 0.0
    tool_seconds: float = 0.0
    tokens: TokenCounts = field(default_factory=TokenCounts)

    @property
    def num_invalid_calls(self) -> int:
        """Calls that no tool could take, as the environment says: those that ``invalid_call_cost`` charges."""
        return sum(result.fault == "invalid" for result in self.observed.results)


@dataclass(frozen=True, slots=True)
class SegmentTokens:
    """A segment as a trainer takes it: ``completion_ids`` is all that follows the first prompt.

    ``mask`` is 1 for ids that were sampled and 0 for those of tools and template; ``token_logp`` has 0.0 there,
    and is empty where the sampler gave none.
    """

    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    mask: tuple[int, ...]
    token_logp: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Episode:
    """One attempt at one task, from the first message to its reward.

    ``index`` is its place among the episodes that were asked for, ``num_tries`` how often it was begun; only the last
    try is kept. ``first_messages`` has one text a segment. ``reward`` is None for an episode that must not move the
    weights: the sandbox or the policy's server failed each time (``INFRASTRUCTURE``, ``failure`` is the code of the
    last failure). ``judgement`` is all that its environment says of it; it is not stored.
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
    def segments(self) -> tuple[Rollout, ...]:
        """A rollout for each conversation of the chain; all have the same reward and score.

        Those before the last ended with their summary and have the stop reason ``FINISHED``.
        """
        last = len(self.first_messages) - 1
        return tuple(
            Rollout(
                task_id=self.task_id,
                step=self.step,
                turns=tuple(each.observed.turn for each in self._turns_of(idx)),
                reward=self.reward,
                score=self.score,
                stop_reason=self.stop_reason if idx == last else StopReason.FINISHED,
                seconds=sum(each.policy_seconds + each.tool_seconds for each in self._turns_of(idx)),
            )
            for idx in range(last + 1)
        )

    @property
    def tokens(self) -> TokenCounts:
        return sum((each.tokens for each in self.turns), TokenCounts())

    @property
    def num_calls(self) -> int:
        return sum(len(each.observed.calls) for each in self.turns)

    @property
    def num_invalid_calls(self) -> int:
        return sum(each.num_invalid_calls for each in self.turns)

    @property
    def is_trainable(self) -> bool:
        """Whether every turn has the ids that were seen and sampled."""
        turns = [each.observed.turn for each in self.turns]
        return bool(turns) and all(turn.prompt_ids and turn.completion.token_ids for turn in turns)

    def training_segments(self) -> tuple[SegmentTokens, ...]:
        """Ids, masks and log-probabilities of every segment; refused where they are not known exactly (CR0821)."""
        return tuple(segment_tokens(segment) for segment in self.segments if segment.turns)

    def _turns_of(self, segment_idx: int) -> tuple[EpisodeTurn, ...]:
        return tuple(each for each in self.turns if each.segment_idx == segment_idx)


def refusal(max_calls: int) -> ToolResult:
    """What a call is told that was one too many in its answer; no environment has seen it."""
    text = f"Not run: at most {max_calls} calls are taken from one answer."
    return ToolResult(text, is_error=True, fault="refused")


def segment_tokens(rollout: Rollout) -> SegmentTokens:
    """The turns of one conversation as one run of ids; nothing is aligned, each prompt has to extend the last.

    Raises:
        InputError: a turn has no ids, or its prompt does not begin with what came before it (CR0821).
    """
    first = rollout.turns[0].prompt_ids
    ids, mask, logp = list(first), [0] * len(first), [0.0] * len(first)
    has_logp = all(turn.completion.token_logp for turn in rollout.turns)
    for number, turn in enumerate(rollout.turns):
        sampled = turn.completion.token_ids
        if not sampled or not turn.prompt_ids or turn.prompt_ids[: len(ids)] != tuple(ids):
            raise InputError(
                "CR0821",
                f"an episode of {rollout.task_id} cannot be trained on: turn {number} has no token ids, "
                "or its prompt does not begin with what came before it.",
                where=rollout.task_id,
                fix="sample through a policy that takes and gives token ids.",
            )
        between = turn.prompt_ids[len(ids) :]
        ids += [*between, *sampled]
        mask += [0] * len(between) + [1] * len(sampled)
        logp += [0.0] * len(between) + list(turn.completion.token_logp if has_logp else [0.0] * len(sampled))
    start = len(first)
    return SegmentTokens(
        first, tuple(ids[start:]), tuple(mask[start:]), tuple(logp[start:]) if has_logp else ()
    )


@dataclass(frozen=True, slots=True)
class RolloutRow:
    """One row: ``completion_ids`` are all ids after the first prompt, ``mask`` is 1 on sampled ones that carry loss.

    ``sampled_logp`` has 0.0 between sampled ids and is empty where the sampler gave none. ``effort_counts`` are by kind, as
    the trainer's effort price takes them. An episode that went on from summaries is one row: ``segment_starts`` are the
    places in ``completion_ids`` at which the prompts of its later conversations begin.
    """

    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    mask: tuple[int, ...]
    sampled_logp: tuple[float, ...]
    reward: float | None
    effort_counts: dict[str, float]
    segment_starts: tuple[int, ...] = ()


def rollout_row(episode: Episode, *, filler_id: int) -> RolloutRow:
    """The row of an episode, its conversations one after the other.

    Args:
        episode: whose reward is known.
        filler_id: stands alone, without loss, where nothing was sampled.
    """
    counts = effort_counts(episode)
    if not episode.turns:
        return RolloutRow((filler_id,), (filler_id,), (0,), (0.0,), None, counts)
    first, *later = episode.training_segments()
    ids, mask, logp = list(first.completion_ids), list(first.mask), list(first.token_logp)
    has_logp = bool(logp) and all(segment.token_logp for segment in later)
    starts = []
    for segment in later:
        starts.append(len(ids))
        between = len(segment.prompt_ids)
        ids += [*segment.prompt_ids, *segment.completion_ids]
        mask += [*[0] * between, *segment.mask]
        logp += [*[0.0] * between, *segment.token_logp]
    if episode.paid is None:
        mask = [0] * len(mask)
    return RolloutRow(
        first.prompt_ids,
        tuple(ids),
        tuple(mask),
        tuple(logp) if has_logp else (),
        episode.paid,
        counts,
        tuple(starts),
    )


def effort_counts(episode: Episode) -> dict[str, float]:
    """Tokens, calls and turns of an episode by kind."""
    tokens = episode.tokens
    return {
        "thinking_token": float(tokens.thinking),
        "tool_call_token": float(tokens.tool_call),
        "tool_output_token": float(tokens.tool_output),
        "final_token": float(tokens.final),
        "tool_call": float(episode.num_calls),
        "turn": float(len(episode.turns)),
    }


def trl_columns(rows: Sequence[RolloutRow], *, may_chain: bool = False) -> dict[str, Any]:
    """What a ``rollout_func`` of TRL 1.16 returns; ``env_mask`` is its name for the mask, other columns join its rows.

    With ``may_chain`` the trainer is told where conversations begin.
    """
    has_logp = all(row.sampled_logp for row in rows)
    chains = {"segment_starts": [list(row.segment_starts) for row in rows]} if may_chain else {}
    return {
        "prompt_ids": [list(row.prompt_ids) for row in rows],
        "completion_ids": [list(row.completion_ids) for row in rows],
        "logprobs": [list(row.sampled_logp) for row in rows] if has_logp else None,
        "env_mask": [list(row.mask) for row in rows],
        "episode_reward": [row.reward for row in rows],
        "effort_counts": [row.effort_counts for row in rows],
        **chains,
    }
