"""How much effort a rollout took, by kind."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from composer_replication.errors import UsageError
from composer_replication.records import Rollout
from composer_replication.trainer.policy_options import EFFORT_KINDS

COLUMN = "effort_counts"
"""Under this name a rollout function returns one mapping of kind to number for each row."""


def counts_of_rollout(rollout: Rollout) -> dict[str, float]:
    """Tokens, tool calls and turns of a rollout whose turns hold ids.

    The last turn's tokens are final, those of the turns before called tools. What the prompt of a turn has
    beyond the prompt and the completion of the turn before is tool output. Thinking is counted with the turn it
    belongs to: ids alone do not tell it apart.
    """
    turns = rollout.turns
    lengths = [len(turn.completion.token_ids) for turn in turns]
    grown = [
        len(after.prompt_ids) - len(before.prompt_ids) - length
        for before, after, length in zip(turns, turns[1:], lengths, strict=False)
    ]
    return {
        "tool_call_token": float(sum(lengths[:-1])),
        "tool_output_token": float(sum(max(extra, 0) for extra in grown)),
        "final_token": float(lengths[-1] if lengths else 0),
        "tool_call": float(max(len(turns) - 1, 0)),
        "turn": float(len(turns)),
    }


def effort_units(counts: Mapping[str, Any], unit_weights: Mapping[str, float]) -> float:
    """``x``, the weighted sum of the counts; kinds that are not given count 0.

    Raises:
        UsageError: an unknown kind, or a number below 0 or not finite (CR0764).
    """
    for kind, number in counts.items():
        if kind not in EFFORT_KINDS or not 0 <= float(number) < float("inf"):
            raise UsageError(
                "CR0764",
                f"effort_counts has {kind} = {number!r}; it needs numbers from 0 of {', '.join(EFFORT_KINDS)}.",
                where="the rollout function's effort_counts",
                fix="return one mapping of these kinds to numbers for each rollout.",
            )
    return sum(unit_weights.get(kind, 0.0) * float(number) for kind, number in counts.items())
