"""Completions of one prompt are packed behind it, so that each distinct prompt is forwarded once.

The rows of a group share their prompt, yet a plain forward computes it once per row. A pack is one row instead: the prompt but
for its last token, then, for each completion, that last token and the completion but for its own last one:

    p1 p2 … | pn c1 c2 … | pn d1 d2 … | …     positions of each completion go on from the prompt

By a mask each token sees the prompt and what stands before it in its own part, and each token of a part scores the one behind it.
Attention is computed between all tokens of a pack, though, so long completions are packed few at a time (``rows_of_a_pack``).

Letters: B rows, P prompt columns, T completion columns, K packs, S columns of a pack, N scored tokens of some packs,
M tokens of some rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from composer_replication.errors import InputError
from composer_replication.trainer.model_modes import weights_are_sharded
from composer_replication.trainer.prefix_support import inner_model
from composer_replication.trainer.processes import num_processes

Prompt = tuple[int, ...]
"""The ids of one distinct prompt, without its padding."""


def distinct_prompts(ids_BP: torch.Tensor, mask_BP: torch.Tensor) -> tuple[list[Prompt], list[int]]:
    """Distinct prompts in order of first appearance, and the index of each row's prompt."""
    index: dict[Prompt, int] = {}
    prompt_of_row: list[int] = []
    for row, (ids_P, mask_P) in enumerate(zip(ids_BP, mask_BP.bool(), strict=True)):
        prompt = tuple(ids_P[mask_P].tolist())
        if not prompt:
            raise InputError(
                "CR0722", "a prompt has no unmasked token.", where=f"row {row}", fix="drop empty prompts."
            )
        prompt_of_row.append(index.setdefault(prompt, len(index)))
    return list(index), prompt_of_row


MAX_COLUMNS = 16_384
"""Of a pack of several rows: its mask has the square of that many entries."""
_PADDING = -1


@dataclass(frozen=True, slots=True)
class Pack:
    """A prompt and the rows that follow it."""

    prompt: Prompt
    rows: tuple[int, ...]


def shared_prefix_logps(
    model: nn.Module,
    prompt_ids_BP: torch.Tensor,
    prompt_mask_BP: torch.Tensor,
    completion_ids_BT: torch.Tensor,
    completion_mask_BT: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Log-probability of each completion token, and the entropy where it was drawn, if the model's head gives it.

    logp_bt = log softmax(z_bt / temperature)[y_bt], H_bt = -sum_v p_btv log p_btv, in nats,
    where z_bt are the logits at the position before completion token y_bt. Equal to the
    forward of prompt and completion together, for values and gradients, up to rounding.
    Both results are float32 and zero where ``completion_mask_BT`` is zero, as in TRL.

    Args:
        model: causal language model, PEFT-wrapped or not, without ``packing_reason`` and with TRL's fused head
            (``trl.trainer.utils.add_fused_lm_head``), which has the temperature, and scores no more than these tokens.
        prompt_ids_BP: token ids, padded on the left.
        prompt_mask_BP: 1 for tokens, 0 for padding. Rows whose ids under the mask are equal form a
            group, wherever they stand in the batch.
        completion_ids_BT: token ids, padded on the right.
        completion_mask_BT: 1 for tokens, 0 for padding; a row of zeros is allowed.

    Departs from TRL: positions count from the first unmasked token, as in generation, where TRL's
    plain forward counts padding too. The two agree for relative positions (RoPE, ALiBi); a model
    with learned absolute positions gets here what it would get without padding.
    Reference: DeepSeekMath (2024), equation 3, for the groups.

    Raises:
        InputError: CR0722, a prompt without a token.
    """
    prompts, prompt_of_row = distinct_prompts(prompt_ids_BP, prompt_mask_BP)
    mask_BT = completion_mask_BT.bool()
    logp_parts: list[torch.Tensor] = []
    entropy_parts: list[torch.Tensor] = []
    places: list[tuple[torch.Tensor, torch.Tensor]] = []
    for layout in _layouts(model, prompts, prompt_of_row, completion_ids_BT, mask_BT):
        targets_KS = torch.full_like(layout.ids_KS, -100)
        targets_KS[layout.from_N] = completion_ids_BT[layout.to_N]
        output: Any = model(**_arguments(model, layout), shift_labels=targets_KS, fused_lm_head=True)
        logp_parts.append(output.log_probs[layout.from_N])
        entropy_parts += [] if output.entropy is None else [output.entropy[layout.from_N]]
        places.append(layout.to_N)
    rows_M, columns_M = (torch.cat(each) for each in zip(*places, strict=True))

    def in_rows(parts: list[torch.Tensor]) -> torch.Tensor:
        values_M = torch.cat(parts)
        values_BT = values_M.new_zeros(mask_BT.shape).index_put((rows_M, columns_M), values_M)
        return values_BT.masked_fill(~mask_BT, 0.0)

    return in_rows(logp_parts), in_rows(entropy_parts) if entropy_parts else None


def _layouts(
    model: nn.Module,
    prompts: Sequence[Prompt],
    prompt_of_row: Sequence[int],
    completion_ids_BT: torch.Tensor,
    mask_BT: torch.Tensor,
) -> Iterator[_Layout]:
    """One a pack, which is faster on a processor; of several processes, whose weights may be sharded, each forwards once.

    Where the mask of all packs together would be too large, and weights are whole, it is one a pack there, too.
    """
    lengths_B: list[int] = mask_BT.sum(dim=1).tolist()
    hidden_size = inner_model(model).config.get_text_config().hidden_size
    packs = _packs(prompts, prompt_of_row, lengths_B, hidden_size)
    width = max(len(pack.prompt) + sum(lengths_B[row] for row in pack.rows) for pack in packs)
    fits = weights_are_sharded(model) or len(packs) * width**2 <= MAX_COLUMNS**2
    for together in [packs] if num_processes() > 1 and fits else [[pack] for pack in packs]:
        yield _Layout.of(together, completion_ids_BT, lengths_B)


def rows_of_a_pack(num_rows: int, prompt_length: int, completion_length: int, hidden_size: int) -> int:
    """How many rows to pack behind a prompt, by the least cost of all its packs.

    A layer of hidden size h costs some 24 h^2 operations a token and 4 h a pair of tokens, so a pack of S columns costs
    as S (6 h + S).
    """

    def cost_of_pack(rows: int) -> int:
        columns = prompt_length + rows * completion_length
        return columns * (6 * hidden_size + columns)

    def cost(rows: int) -> int:
        num_full, rest = divmod(num_rows, rows)
        return num_full * cost_of_pack(rows) + (cost_of_pack(rest) if rest else 0)

    fits = [
        rows for rows in range(1, num_rows + 1) if prompt_length + rows * completion_length <= MAX_COLUMNS
    ]
    return min(fits, key=cost, default=1)


def _packs(
    prompts: Sequence[Prompt], prompt_of_row: Sequence[int], lengths: Sequence[int], hidden_size: int
) -> list[Pack]:
    packs = []
    for number, prompt in enumerate(prompts):
        rows = [row for row, of in enumerate(prompt_of_row) if of == number]
        step = rows_of_a_pack(len(rows), len(prompt), max(lengths[row] for row in rows), hidden_size)
        packs += [Pack(prompt, tuple(rows[at : at + step])) for at in range(0, len(rows), step)]
    return packs


@dataclass(frozen=True, slots=True)
class _Layout:
    """Packs side by side; their prompts end in the same column.

    Attributes:
        ids_KS: token ids.
        positions_KS: as in generation.
        segments_KS: 0 for the prompt, 1 and up for the completions, -1 for padding.
        from_N: pack and column of each position that scores a token.
        to_N: row and column (B, T) of the token that it scores.
    """

    ids_KS: torch.Tensor
    positions_KS: torch.Tensor
    segments_KS: torch.Tensor
    from_N: tuple[torch.Tensor, torch.Tensor]
    to_N: tuple[torch.Tensor, torch.Tensor]

    @classmethod
    def of(cls, packs: Sequence[Pack], ids_BT: torch.Tensor, lengths_B: Sequence[int]) -> _Layout:
        """Lay out packs of the rows of a batch, each of so many tokens."""
        device = ids_BT.device
        width = max(len(pack.prompt) for pack in packs) - 1
        num_columns = width + max(1, *(sum(lengths_B[row] for row in pack.rows) for pack in packs))
        ids_KS = torch.zeros(len(packs), num_columns, dtype=torch.long, device=device)
        positions_KS = torch.zeros_like(ids_KS)
        segments_KS = torch.full_like(ids_KS, _PADDING)
        scoring: list[tuple[int, int]] = []
        scored: list[tuple[int, int]] = []
        for number, pack in enumerate(packs):
            *first_ids, last_id = pack.prompt
            length = len(first_ids)
            before = slice(width - length, width)
            ids_KS[number, before] = torch.tensor(first_ids, dtype=torch.long, device=device)
            positions_KS[number, before] = torch.arange(length, device=device)
            segments_KS[number, before] = 0
            start = width
            for segment, row in enumerate(pack.rows, start=1):
                end = start + lengths_B[row]
                part = slice(start, end)
                ids_KS[number, start : min(start + 1, end)] = last_id
                ids_KS[number, start + 1 : end] = ids_BT[row, : max(lengths_B[row] - 1, 0)]
                positions_KS[number, part] = torch.arange(length, length + end - start, device=device)
                segments_KS[number, part] = segment
                scoring += [(number, column) for column in range(start, end)]
                scored += [(row, column) for column in range(end - start)]
                start = end
        pairs = (torch.tensor(each, device=device).reshape(-1, 2).long() for each in (scoring, scored))
        from_N2, to_N2 = pairs
        return cls(
            ids_KS,
            positions_KS,
            segments_KS,
            (from_N2[:, 0], from_N2[:, 1]),
            (to_N2[:, 0], to_N2[:, 1]),
        )

    def allowed(self) -> torch.Tensor:
        """(K, S, S): which token (first S) may attend to which (second S); padding sees padding, so that no line is empty."""
        num_columns = self.ids_KS.size(1)
        causal_SS = torch.ones(num_columns, num_columns, dtype=torch.bool, device=self.ids_KS.device).tril()
        of_query, of_key = self.segments_KS[:, :, None], self.segments_KS[:, None, :]
        return causal_SS & ((of_key == 0) | (of_key == of_query))


def _arguments(model: nn.Module, layout: _Layout) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "input_ids": layout.ids_KS,
        "position_ids": layout.positions_KS,
        "use_cache": False,
    }
    if int(layout.segments_KS.min()) >= 0 and int(layout.segments_KS.max()) <= 1:
        return arguments  # one row behind each prompt and no padding: causality is all
    inner = inner_model(model)
    mask = layout.allowed()[:, None]
    if inner.config.get_text_config()._attn_implementation == "eager":  # noqa: SLF001 - transformers' only name
        zeros = torch.zeros_like(mask, dtype=inner.dtype)
        mask = zeros.masked_fill(~mask, torch.finfo(inner.dtype).min)
    return {**arguments, "attention_mask": mask}
