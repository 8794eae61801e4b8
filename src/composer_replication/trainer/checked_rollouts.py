"""A rollout function of the user's, whose answers are looked at before TRL reads them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from composer_replication.errors import InputError
from composer_replication.trainer.chained_rows import COLUMN
from composer_replication.trainer.routed_experts import COLUMN as ROUTED_EXPERTS
from composer_replication.trainer.routed_experts import refusal


class CheckedRollouts:
    """A rollout function whose completions are looked at before TRL takes their last token.

    Its column ``segment_starts``, where it has one, says which rows are chains of conversations (``chained_rows``), and
    ``routed_experts`` which experts its tokens went to (``router_replay``).

    Args:
        rollout_func: the user's.
    """

    def __init__(self, rollout_func: Callable[..., dict[str, Any]]) -> None:
        self.rollout_func = rollout_func

    def __call__(self, prompts: Any, trainer: Any) -> dict[str, Any]:
        output = dict(self.rollout_func(prompts, trainer))
        completion_ids = output.get("completion_ids", ())
        refuse_empty_completions(completion_ids, where="the rollout function")
        starts = output.pop(COLUMN, None)
        if starts is not None:
            refuse_bad_starts(starts, completion_ids, output.get("env_mask"))
            trainer.take_segment_starts(starts)
        routing = output.pop(ROUTED_EXPERTS, None)
        if routing is not None:
            if any(starts or ()):
                raise refusal("a row is a chain of conversations (segment_starts)")
            trainer.take_routed_experts(routing, output.get("prompt_ids", ()), completion_ids)
        return output


def refuse_empty_completions(completion_ids: Sequence[Sequence[int]], *, where: str) -> None:
    """A completion of no token has no last one, and no probability to learn.

    Raises:
        InputError: CR0777.
    """
    empty = [number for number, ids in enumerate(completion_ids) if len(ids) == 0]
    if empty:
        raise InputError(
            "CR0777",
            f"{len(empty)} of {len(completion_ids)} completions are empty, the first is number {empty[0]}.",
            where=where,
            fix="give at least the end token for an answer that says nothing.",
        )


def refuse_bad_starts(
    starts: Sequence[Sequence[int]],
    completion_ids: Sequence[Sequence[int]],
    masks: Sequence[Sequence[int]] | None,
) -> None:
    """A later conversation begins inside its completion, after the one before, with an id that carries no loss.

    Raises:
        InputError: CR0777.
    """
    problem = ""
    if len(starts) != len(completion_ids):
        problem = f"there are {len(starts)} lists for {len(completion_ids)} completions"
    elif masks is None and any(starts):
        problem = "there is no env_mask, and the first id of a conversation was not sampled"
    else:
        for row, (places, ids) in enumerate(zip(starts, completion_ids, strict=True)):
            edges = [0, *places, len(ids)]
            if any(after <= before for before, after in pairwise(edges)):
                problem = f"{list(places)} of row {row} does not rise between 0 and its {len(ids)} ids"
            elif masks is not None and any(masks[row][place] for place in places):
                problem = f"a conversation of row {row} begins with an id that carries loss"
            if problem:
                break
    if problem:
        raise InputError(
            "CR0777",
            f"segment_starts cannot be followed: {problem}.",
            where="the rollout function's segment_starts",
            fix="give, for each row, the places in completion_ids where the prompt of a later conversation begins.",
        )
