"""Rows of several conversations, each conversation forwarded as a row of its own.

A rollout that went on from its summaries is one row to TRL, so that its group, its reward and the normalisation of its loss
stay those of one rollout. Its completion is then every id after the first prompt, later prompts included, without loss. The
model, though, saw one conversation at a time, and so must every forward that scores the row.

Letters: B rows, P prompt columns, T completion columns, S the most later conversations that a row has; N rows that
are forwarded, L their completion columns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from composer_replication.errors import InputError
from composer_replication.trainer.generation import ROUTED_EXPERTS, SEGMENT_STARTS
from composer_replication.trainer.processes import gathered
from composer_replication.trainer.router_replay import Routers, laid_out, refusal


@dataclass(frozen=True, slots=True)
class OneConversationRows:
    """The rows to forward, and where in the chained rows their values belong.

    ``place_BT`` is the index of completion position (b, t) among the N L values; -1 where there is none: padding, and
    the first id of a later conversation, which nothing stands before.
    """

    ids_NW: torch.Tensor
    mask_NW: torch.Tensor
    num_columns: int
    place_BT: torch.Tensor

    def chained(self, values_NL: torch.Tensor) -> torch.Tensor:
        """The values (N, L) of the forwarded rows as those (B, T) of the chained ones; 0 where there is none."""
        picked_BT = values_NL.reshape(-1)[self.place_BT.clamp(min=0)]
        return picked_BT.masked_fill(self.place_BT < 0, 0.0)


def one_conversation_rows(
    ids_BW: torch.Tensor,
    mask_BW: torch.Tensor,
    num_columns: int,
    starts_BS: torch.Tensor,
    *,
    num_rows: int = 0,
) -> OneConversationRows:
    """The first conversation of every row in its place, the later ones below.

    A later conversation has its first id for a prompt, in the last prompt column, and the rest for a completion. Of the W
    columns the last ``num_columns`` are those of completions. ``starts_BS`` are completion columns at which later
    conversations begin, rising; 0 for none. N is at least ``num_rows``; the rows beyond are the first one again, and their
    values go nowhere.
    """
    num_chains, width = ids_BW.shape
    split = width - num_columns
    lengths = mask_BW[:, split:].sum(-1).tolist()
    later: list[tuple[int, int, int]] = []
    firsts: list[int] = []
    for row, (starts, length) in enumerate(zip(starts_BS.tolist(), lengths, strict=True)):
        edges = [*(start for start in starts if start > 0), int(length)]
        firsts.append(edges[0])
        later += [(row, start, end) for start, end in pairwise(edges)]
    columns = max(*firsts, *(end - start - 1 for _, start, end in later), 1)
    total = max(num_chains + len(later), num_rows)
    ids_NW = ids_BW[:1, : split + columns].repeat(total, 1)
    mask_NW = mask_BW[:1, : split + columns].repeat(total, 1)
    ids_NW[:num_chains], mask_NW[:num_chains] = ids_BW[:, : split + columns], mask_BW[:, : split + columns]
    place_BT = ids_BW.new_full((num_chains, num_columns), -1)
    for row, end in enumerate(firsts):
        mask_NW[row, split + end :] = 0
        place_BT[row, :end] = torch.arange(row * columns, row * columns + end)
    for number, (row, start, end) in enumerate(later, start=num_chains):
        length = end - start
        mask_NW[number] = 0
        ids_NW[number, split - 1 : split - 1 + length] = ids_BW[row, split + start : split + end]
        mask_NW[number, split - 1 : split - 1 + length] = 1
        place_BT[row, start + 1 : end] = torch.arange(number * columns, number * columns + length - 1)
    mask_NW[num_chains + len(later) :] = mask_NW[0]
    return OneConversationRows(ids_NW, mask_NW, columns, place_BT)


def starts_tensor(starts: Sequence[Sequence[int]]) -> torch.Tensor:
    """One line a row, filled up with 0: (B, S)."""
    width = max((len(each) for each in starts), default=0)
    rows = [[*each, *[0] * (width - len(each))] for each in starts]
    return torch.tensor(rows, dtype=torch.long).reshape(len(rows), width)


Answer = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]
Scorer = Callable[[torch.Tensor, torch.Tensor, int], Answer]


def score_chains(
    score: Scorer,
    ids_BW: torch.Tensor,
    mask_BW: torch.Tensor,
    num_columns: int,
    starts_BS: torch.Tensor | None,
) -> Answer:
    """``score(ids, mask, columns)`` of rows of one conversation each; the values are those of the rows given."""
    if starts_BS is None:
        return score(ids_BW, mask_BW, num_columns)
    # Every process forwards as many rows as the others: sharded weights are gathered in each forward.
    num_rows = max(gathered(ids_BW.size(0) + int((starts_BS > 0).sum())))
    if num_rows == ids_BW.size(0):
        return score(ids_BW, mask_BW, num_columns)
    rows = one_conversation_rows(ids_BW, mask_BW, num_columns, starts_BS, num_rows=num_rows)
    logps_NL, entropies_NL, aux_loss = score(rows.ids_NW, rows.mask_NW, rows.num_columns)
    entropies_BT = None if entropies_NL is None else rows.chained(entropies_NL)
    return rows.chained(logps_NL), entropies_BT, aux_loss


class CheckedRollouts:
    """The user's rollout function, whose completions are looked at before TRL takes their last token.

    Its column ``segment_starts``, where it has one, says which rows are chains of conversations, and ``routed_experts`` which
    experts its tokens went to (``router_replay``).
    """

    def __init__(self, rollout_func: Callable[..., dict[str, Any]]) -> None:
        self.rollout_func = rollout_func

    def __call__(self, prompts: Any, trainer: Any) -> dict[str, Any]:
        output = dict(self.rollout_func(prompts, trainer))
        completion_ids = output.get("completion_ids", ())
        empty = [number for number, ids in enumerate(completion_ids) if len(ids) == 0]
        if empty:  # there would be no last token, and no probability to learn
            words = f"{len(empty)} of {len(completion_ids)} completions are empty, the first is number {empty[0]}."
            fix = "give at least the end token for an answer that says nothing."
            raise InputError("CR0777", words, where="the rollout function", fix=fix)
        starts, routing = output.pop(SEGMENT_STARTS, None), output.pop(ROUTED_EXPERTS, None)
        if routing is not None and any(starts or ()):
            raise refusal("a row is a chain of conversations (segment_starts)")
        if starts is not None:
            if problem := _problem_of_starts(starts, completion_ids, output.get("env_mask")):
                words = f"segment_starts cannot be followed: {problem}."
                fix = "give, for each row, the places in completion_ids where the prompt of a later conversation begins."
                raise InputError("CR0777", words, where="the rollout function's segment_starts", fix=fix)
            trainer.generation.starts_BS = starts_tensor(starts).to(trainer.accelerator.device)
        if routing is not None and trainer.model.training:  # in evaluation it is not used
            routers, multiple = Routers.of(trainer.model), trainer.pad_to_multiple_of
            prompt_ids = output.get("prompt_ids", ())
            trainer.generation.routing_BWLK = laid_out(
                routing, prompt_ids, completion_ids, routers, pad_to_multiple_of=multiple
            )
        return output


def _problem_of_starts(
    starts: Sequence[Sequence[int]],
    completion_ids: Sequence[Sequence[int]],
    masks: Sequence[Sequence[int]] | None,
) -> str:
    """A later conversation begins inside its completion, after the one before, with an id that carries no loss."""
    if len(starts) != len(completion_ids):
        return f"there are {len(starts)} lists for {len(completion_ids)} completions"
    if masks is None and any(starts):
        return "there is no env_mask, and the first id of a conversation was not sampled"
    for row, (places, ids) in enumerate(zip(starts, completion_ids, strict=True)):
        if any(after <= before for before, after in pairwise([0, *places, len(ids)])):
            return f"{list(places)} of row {row} does not rise between 0 and its {len(ids)} ids"
        if masks is not None and any(masks[row][place] for place in places):
            return f"a conversation of row {row} begins with an id that carries loss"
    return ""
