"""An episode as the row that a trainer takes. What is dropped keeps its ids and carries no loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from composer_replication.rollouts.episodes.episode import Episode


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

    Raises:
        InputError: its ids are not known exactly (CR0821).
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
