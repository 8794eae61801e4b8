"""Rows of several conversations, each conversation forwarded as a row of its own.

A rollout that went on from its summaries is one row to TRL, so that its group, its reward and the normalisation of its loss
stay those of one rollout. Its completion is then every id after the first prompt, later prompts included, without loss. The
model, though, saw one conversation at a time, and so must every forward that scores the row.

Letters: B rows, P prompt columns, T completion columns, S the most later conversations that a row has; N rows that
are forwarded, L their completion columns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from composer_replication.errors import InputError
from composer_replication.trainer.generation import ROUTED_EXPERTS, SEGMENT_STARTS
from composer_replication.trainer.processes import gathered
from composer_replication.trainer.router_replay import Routers, laid_out, refusal


def one_conversation_rows(
    ids_BW: torch.Tensor,
    mask_BW: torch.Tensor,
    num_columns: int,
    starts_BS: torch.Tensor,
    *,
    num_rows: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows to forward, their mask (N, P + L), and where in the chained rows their values belong (B, T).

    The first conversation of every row keeps its place, the later ones follow below. Of a later one the first id is the
    prompt, in the last prompt column, and the rest its completion. Of the W columns the last ``num_columns`` are those of
    completions. ``starts_BS`` are completion columns at which later conversations begin, rising; 0 for none. N is at least
    ``num_rows``; the rows beyond are the first one again, and their values go nowhere.

    A place is the index of a completion position (b, t) among the N L values; -1 where there is none: padding, and the
    first id of a later conversation, which nothing stands before.
    """
    split = ids_BW.size(1) - num_columns
    lengths = mask_BW[:, split:].sum(-1).tolist()  # 0 where TRL has emptied the mask of a row that was cut
    edges = [
        [0, *(start for start in starts if 0 < start < length), int(length)]
        for starts, length in zip(starts_BS.tolist(), lengths, strict=True)
    ]
    parts = [(row, 0, of_row[1]) for row, of_row in enumerate(edges)]
    parts += [(row, start, end) for row, of_row in enumerate(edges) for start, end in pairwise(of_row[1:])]
    columns = max(1, *(end - start - bool(start) for _, start, end in parts))
    total = max(len(parts), num_rows)
    ids_NW, mask_NW = ids_BW.new_zeros(total, split + columns), mask_BW.new_zeros(total, split + columns)
    place_BT = ids_BW.new_full((len(edges), num_columns), -1)
    for number, (row, start, end) in enumerate(parts):
        source, target = (split + start, split - 1) if start else (0, 0)
        for rows_NW, from_BW in ((ids_NW, ids_BW), (mask_NW, mask_BW)):
            rows_NW[number, target : target + split + end - source] = from_BW[row, source : split + end]
        first = start + 1 if start else 0  # of a later conversation the first id is the prompt
        place_BT[row, first:end] = torch.arange(number * columns, number * columns + end - first)
    ids_NW[len(parts) :], mask_NW[len(parts) :] = ids_NW[0], mask_NW[0]
    return ids_NW, mask_NW, place_BT


def chained(values_NL: torch.Tensor, place_BT: torch.Tensor) -> torch.Tensor:
    """The values of forwarded rows as those (B, T) of the chained ones; 0 where there is none."""
    return values_NL.reshape(-1)[place_BT.clamp(min=0)].masked_fill(place_BT < 0, 0.0)


def starts_tensor(starts: Sequence[Sequence[int]]) -> torch.Tensor:
    """One line a row, filled up with 0: (B, S)."""
    return pad_sequence([torch.tensor(each, dtype=torch.long) for each in starts], batch_first=True)


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
    ids_NW, mask_NW, place_BT = one_conversation_rows(
        ids_BW, mask_BW, num_columns, starts_BS, num_rows=num_rows
    )
    num_prompt = ids_BW.size(1) - num_columns
    logps_NL, entropies_NL, aux_loss = score(ids_NW, mask_NW, ids_NW.size(1) - num_prompt)
    entropies_BT = None if entropies_NL is None else chained(entropies_NL, place_BT)
    return chained(logps_NL, place_BT), entropies_BT, aux_loss


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
