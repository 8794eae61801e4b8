"""A rollout function of the user's, whose answers are looked at before TRL reads them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from composer_replication.errors import InputError


class CheckedRollouts:
    """A rollout function whose completions are looked at before TRL takes their last token.

    Args:
        rollout_func: the user's.
    """

    def __init__(self, rollout_func: Callable[..., dict[str, Any]]) -> None:
        self.rollout_func = rollout_func

    def __call__(self, prompts: Any, trainer: Any) -> dict[str, Any]:
        output = self.rollout_func(prompts, trainer)
        refuse_empty_completions(output.get("completion_ids", ()), where="the rollout function")
        return output


def refuse_empty_completions(completion_ids: Sequence[Sequence[int]], *, where: str) -> None:
    """A completion of no token has no last one, and no probability to learn.

    Raises:
        InputError: CR0772.
    """
    empty = [number for number, ids in enumerate(completion_ids) if len(ids) == 0]
    if empty:
        raise InputError(
            "CR0772",
            f"{len(empty)} of {len(completion_ids)} completions are empty, the first is number {empty[0]}.",
            where=where,
            fix="give at least the end token for an answer that says nothing.",
        )
