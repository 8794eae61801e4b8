"""What the head reads at the positions that predict completion tokens.

The forward runs the whole model without its head, so that logits never exist for all positions; the head
is applied afterwards, in chunks, to the positions that carry loss and to no other.

Letters: N rows, P prompt columns, T completion columns, M positions that carry loss, H hidden size.
"""

from __future__ import annotations

import torch
from torch import nn

from composer_replication.trainer.collator import TokenRows
from composer_replication.trainer.distinct_prompts import distinct_prompts
from composer_replication.trainer.output_head import last_states, logit_scale, what_is_called
from composer_replication.trainer.packed_rows import packed_states
from composer_replication.trainer.prefix_support import inner_model, packing_reason


def completion_states(model: nn.Module, rows: TokenRows) -> torch.Tensor:
    """Scaled last hidden state before each completion token that carries loss: (M, H), row by row.

    Positions count from the first token of the prompt, as in generation. Prompts that rows have in common, as the two
    answers of a pair have, are forwarded once where that is exact (``prefix_support.packing_reason``). One forward. The
    wrapper of DDP is passed by: its gradient hooks sit on the parameters.
    """
    called = what_is_called(model)
    prompts, prompt_of_row = distinct_prompts(rows.prompt_ids_NP, rows.prompt_mask_NP)
    if len(prompts) < len(rows) and packing_reason(model) is None:
        states_MH = packed_states(
            called, prompts, prompt_of_row,
            rows.completion_ids_NT, rows.completion_mask_NT.bool(), rows.loss_mask_NT,
        )  # fmt: skip
    else:
        ids = torch.cat([rows.prompt_ids_NP, rows.completion_ids_NT], dim=1)
        mask = torch.cat([rows.prompt_mask_NP, rows.completion_mask_NT], dim=1)
        states_NTH = last_states(called, ids, mask)[0][:, rows.prompt_ids_NP.size(1) - 1 : -1]
        states_MH = states_NTH[rows.loss_mask_NT.bool()]
    scale = logit_scale(inner_model(model).config.get_text_config())
    return states_MH if scale == 1.0 else states_MH * scale


def scored_ids(rows: TokenRows) -> torch.Tensor:
    """The completion ids that carry loss, (M,), in the order of ``completion_states``."""
    return rows.completion_ids_NT[rows.loss_mask_NT.bool()]
