"""An episode as the row that a trainer takes. What is dropped keeps its ids and carries no loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from composer_replication.rollouts.environment.judged_attempts import Judgement
from composer_replication.rollouts.episodes.episode import Episode


@dataclass(frozen=True, slots=True)
class PlayedEpisode:
    """An episode with what it was judged to be worth; ``judgement`` is None where nothing was graded."""

    episode: Episode
    judgement: Judgement | None

    @property
    def reward(self) -> float | None:
        """What the trainer is told; None moves no weight: infrastructure, abandoned, masked, or nothing was sampled."""
        if self.judgement is None or self.judgement.masks_reward or not self.episode.turns:
            return None
        return self.episode.reward


@dataclass(frozen=True, slots=True)
class RolloutRow:
    """One row: ``completion_ids`` are all ids after the first prompt, ``mask`` is 1 on sampled ones that carry loss.

    ``sampled_logp`` has 0.0 between sampled ids and is empty where the sampler gave none. ``effort_counts`` are by kind, as
    the trainer's effort price takes them.
    """

    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    mask: tuple[int, ...]
    sampled_logp: tuple[float, ...]
    reward: float | None
    effort_counts: dict[str, float]


def rollout_row(played: PlayedEpisode, *, filler_id: int) -> RolloutRow:
    """The row of an episode of one conversation.

    Args:
        played: the episode.
        filler_id: stands alone, without loss, where nothing was sampled.

    Raises:
        InputError: its ids are not known exactly (CR0828).
    """
    episode = played.episode
    counts = effort_counts(episode)
    if not episode.turns:
        return RolloutRow((filler_id,), (filler_id,), (0,), (0.0,), None, counts)
    (segment,) = episode.training_segments()
    mask = segment.mask if played.reward is not None else (0,) * len(segment.mask)
    return RolloutRow(
        segment.prompt_ids, segment.completion_ids, mask, segment.token_logp, played.reward, counts
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


def trl_columns(rows: Sequence[RolloutRow]) -> dict[str, Any]:
    """What a ``rollout_func`` of TRL 1.16 returns; ``env_mask`` is its name for the mask, other columns join its rows."""
    has_logp = all(row.sampled_logp for row in rows)
    return {
        "prompt_ids": [list(row.prompt_ids) for row in rows],
        "completion_ids": [list(row.completion_ids) for row in rows],
        "logprobs": [list(row.sampled_logp) for row in rows] if has_logp else None,
        "env_mask": [list(row.mask) for row in rows],
        "episode_reward": [row.reward for row in rows],
        "effort_counts": [row.effort_counts for row in rows],
    }
