"""Log-probabilities of GRPO groups without a cache: completions of one prompt are packed behind it.

Gradient checkpointing computes each layer twice, and transformers then keeps no cache. A pack is one row instead:

    prompt, completion 1, completion 2, …     positions of each completion go on from the prompt

and by a mask each token sees the prompt and what stands before it in its own completion. Each distinct prompt is
forwarded once a pack. Attention is computed between all tokens of a pack, though, so long completions are packed few
at a time (``rows_of_a_pack``).

Letters: B rows, T completion columns, K packs, S columns of a pack, C those from the last of the prompt on, N scored tokens;
of whole rows: N rows, P prompt columns, M positions that carry loss, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from composer_replication.errors import InputError
from composer_replication.trainer.collator import TokenRows
from composer_replication.trainer.model_modes import weights_are_sharded
from composer_replication.trainer.output_head import (
    last_states,
    logit_scale,
    states_before_head,
    what_is_called,
)
from composer_replication.trainer.prefix_support import attention_windows, inner_model, packing_reason
from composer_replication.trainer.processes import num_processes
from composer_replication.trainer.token_scores import TokenScorer


@dataclass(frozen=True)
class Prompt:
    """One distinct prompt without its left padding; ``mask`` is all ones but for holes."""

    ids: tuple[int, ...]
    mask: tuple[int, ...]


def distinct_prompts(ids_BP: torch.Tensor, mask_BP: torch.Tensor) -> tuple[list[Prompt], list[int]]:
    """Distinct prompts in order of first appearance, and the index of each row's prompt."""
    index: dict[Prompt, int] = {}
    prompt_of_row: list[int] = []
    for row, (ids, mask) in enumerate(zip(ids_BP.tolist(), mask_BP.long().tolist(), strict=True)):
        if not any(mask):
            raise InputError(
                "CR0722", "a prompt has no unmasked token.", where=f"row {row}", fix="drop empty prompts."
            )
        start = mask.index(1)
        kept = tuple(token if keep else 0 for token, keep in zip(ids[start:], mask[start:], strict=True))
        prompt = Prompt(ids=kept, mask=tuple(mask[start:]))
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


def score_packed(
    model: nn.Module,
    prompts: Sequence[Prompt],
    prompt_of_row_B: torch.Tensor,
    completion_ids_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    scorer: TokenScorer,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Score the rows that belong to these prompts: one forward a pack; one in all where several processes must agree.

    Values and gradients are those of ``prefix_sharing.shared_prefix_logps`` for a model that keeps a cache.
    """
    logp_parts: list[torch.Tensor] = []
    entropy_parts: list[torch.Tensor] = []

    def score(outputs_NX: torch.Tensor, rows_N: torch.Tensor, columns_N: torch.Tensor) -> None:
        logps_N, entropies_N = scorer.of(outputs_NX, completion_ids_BT[rows_N, columns_N])
        logp_parts.append(logps_N)
        entropy_parts.extend([] if entropies_N is None else [entropies_N])

    place_BT = _for_each_pack(
        model, prompts, prompt_of_row_B.tolist(), completion_ids_BT, mask_BT, scorer.forward, score,
        in_one_forward=num_processes() > 1,
    )  # fmt: skip

    def assemble(parts: list[torch.Tensor]) -> torch.Tensor:
        values_N = torch.cat([parts[0].new_zeros(1), *parts])  # the zero is for padding, whose place is -1
        return values_N[place_BT + 1].masked_fill(~mask_BT, 0.0)

    return assemble(logp_parts), assemble(entropy_parts) if scorer.with_entropy else None


def packed_states(
    model: nn.Module,
    prompts: Sequence[Prompt],
    prompt_of_row: Sequence[int],
    completion_ids_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    wanted_BT: torch.Tensor,
) -> torch.Tensor:
    """What the head reads before each wanted completion token, not scaled: (M, H), row by row.

    Args:
        model: one without ``output_head.states_problem``.
        prompts: distinct ones.
        prompt_of_row: the index of each row's prompt.
        completion_ids_BT: token ids, padded on the right.
        mask_BT: 1 on tokens.
        wanted_BT: 1 within the mask.
    """
    parts: list[torch.Tensor] = []

    def forward(model: nn.Module, arguments: dict[str, Any], *, logits_to_keep: int) -> torch.Tensor:
        return states_before_head(model, arguments)[0][:, -logits_to_keep:]

    place_BT = _for_each_pack(
        model, prompts, prompt_of_row, completion_ids_BT, mask_BT, forward,
        lambda states_NH, _rows, _columns: parts.append(states_NH),
        in_one_forward=True,  # each forward makes another gradient of the embedding's size
    )  # fmt: skip
    return torch.cat(parts).index_select(0, place_BT[wanted_BT.bool()])


def _for_each_pack(
    model: nn.Module,
    prompts: Sequence[Prompt],
    prompt_of_row: Sequence[int],
    completion_ids_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    forward: Callable[..., torch.Tensor],
    take: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None],
    *,
    in_one_forward: bool,
) -> torch.Tensor:
    """Give ``take`` the outputs (N, X) that score tokens, with their rows and columns (N,).

    Returns:
        (B, T): which of all outputs, in the order taken, scores a token; -1 for padding.
    """
    columns_T = torch.arange(1, mask_BT.size(1) + 1, device=mask_BT.device)
    lengths_B: list[int] = (mask_BT * columns_T).amax(dim=1).tolist()
    hidden_size = inner_model(model).config.get_text_config().hidden_size
    packs = _packs(prompts, prompt_of_row, lengths_B, hidden_size)
    place_BT = torch.full_like(completion_ids_BT, -1)
    num_taken = 0
    width = max(len(pack.prompt.ids) + sum(lengths_B[row] for row in pack.rows) for pack in packs)
    if not weights_are_sharded(model) and len(packs) * width**2 > MAX_COLUMNS**2:
        in_one_forward = False  # their masks together would be larger than that of the largest pack
    for together in [packs] if in_one_forward else [[pack] for pack in packs]:
        layout = _Layout.of(together, completion_ids_BT, mask_BT, lengths_B)
        num_kept = layout.ids_KS.size(1) - layout.width + 1
        outputs_KCX = forward(model, _arguments(model, layout), logits_to_keep=num_kept)
        rows_N, columns_N = layout.places_N
        take(outputs_KCX.flatten(0, 1).index_select(0, layout.index_N), rows_N, columns_N)
        place_BT[rows_N, columns_N] = torch.arange(
            num_taken, num_taken + rows_N.numel(), device=rows_N.device
        )
        num_taken += rows_N.numel()
    return place_BT


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
        step = rows_of_a_pack(len(rows), len(prompt.ids), max(lengths[row] for row in rows), hidden_size)
        packs += [Pack(prompt, tuple(rows[at : at + step])) for at in range(0, len(rows), step)]
    return packs


@dataclass(frozen=True, slots=True)
class _Layout:
    """Packs side by side; prompts end, and completions begin, in the same column.

    Attributes:
        ids_KS: token ids. The last token of a completion is predicted, never read: it is not there.
        positions_KS: as in generation.
        segments_KS: 0 for the prompt, 1 and up for the completions, -1 for padding.
        is_key_KS: whether others may attend to it.
        width: columns of the longest prompt.
        index_N: where the outputs that score tokens stand, among K C.
        places_N: row and column of the tokens that they score.
    """

    ids_KS: torch.Tensor
    positions_KS: torch.Tensor
    segments_KS: torch.Tensor
    is_key_KS: torch.Tensor
    width: int
    index_N: torch.Tensor
    places_N: tuple[torch.Tensor, torch.Tensor]

    @classmethod
    def of(
        cls, packs: Sequence[Pack], ids_BT: torch.Tensor, mask_BT: torch.Tensor, lengths_B: Sequence[int]
    ) -> _Layout:
        """Lay out packs of the rows of a batch; ``lengths_B`` is one past the last kept column of each."""
        device = ids_BT.device
        width = max(len(pack.prompt.ids) for pack in packs)
        num_columns = width + max(sum(max(lengths_B[row] - 1, 0) for row in pack.rows) for pack in packs)
        ids_KS = torch.zeros(len(packs), num_columns, dtype=torch.long, device=device)
        positions_KS, is_key_KS = torch.zeros_like(ids_KS), torch.zeros_like(ids_KS, dtype=torch.bool)
        segments_KS = torch.full_like(ids_KS, _PADDING)
        index: list[int] = []
        rows: list[int] = []
        columns: list[int] = []
        for number, pack in enumerate(packs):
            length = len(pack.prompt.ids)
            before = slice(width - length, width)
            ids_KS[number, before] = torch.tensor(pack.prompt.ids, device=device)
            is_key_KS[number, before] = torch.tensor(pack.prompt.mask, device=device).bool()
            positions_KS[number, before] = torch.arange(length, device=device)
            segments_KS[number, before] = 0
            start, base = width, number * (num_columns - width + 1)
            for segment, row in enumerate(pack.rows, start=1):
                num_scored = lengths_B[row]
                end = start + max(num_scored - 1, 0)
                ids_KS[number, start:end] = ids_BT[row, : end - start]
                is_key_KS[number, start:end] = mask_BT[row, : end - start]
                positions_KS[number, start:end] = torch.arange(length, length + end - start, device=device)
                segments_KS[number, start:end] = segment
                if num_scored:  # the first token is scored by the prompt's last position
                    index += [base, *range(base + start - width + 1, base + end - width + 1)]
                    rows += [row] * num_scored
                    columns += range(num_scored)
                start = end
        index_N, rows_N, columns_N = (
            torch.tensor(each, dtype=torch.long, device=device) for each in (index, rows, columns)
        )
        return cls(ids_KS, positions_KS, segments_KS, is_key_KS, width, index_N, (rows_N, columns_N))

    def allowed(self, window: int | None) -> torch.Tensor:
        """(K, S, S): which token (first S) may attend to which (second S); padding sees itself, so that no line is empty."""
        num_columns = self.ids_KS.size(1)
        causal_SS = torch.ones(num_columns, num_columns, dtype=torch.bool, device=self.ids_KS.device).tril()
        of_query, of_key = self.segments_KS[:, :, None], self.segments_KS[:, None, :]
        allowed_KSS = causal_SS & ((of_key == 0) | (of_key == of_query)) & self.is_key_KS[:, None, :]
        if window is not None:
            allowed_KSS &= self.positions_KS[:, :, None] - self.positions_KS[:, None, :] < window
        itself_SS = torch.eye(num_columns, dtype=torch.bool, device=self.ids_KS.device)
        return allowed_KSS | (itself_SS & (of_query == _PADDING))


def _arguments(model: nn.Module, layout: _Layout) -> dict[str, Any]:
    inner = inner_model(model)
    is_additive = inner.config.get_text_config()._attn_implementation == "eager"  # noqa: SLF001 - transformers' only name

    def mask(window: int | None) -> torch.Tensor:
        allowed_K1SS = layout.allowed(window)[:, None]
        if not is_additive:
            return allowed_K1SS
        return torch.zeros_like(allowed_K1SS, dtype=inner.dtype).masked_fill(
            ~allowed_K1SS, torch.finfo(inner.dtype).min
        )

    arguments: dict[str, Any] = {
        "input_ids": layout.ids_KS,
        "position_ids": layout.positions_KS,
        "use_cache": False,
    }
    if bool(layout.is_key_KS.all()) and int(layout.segments_KS.max()) <= 1:
        return arguments  # one row behind each prompt and no padding: causality is all
    masks = {kind: mask(window) for kind, window in attention_windows(model).items()}
    return {**arguments, "attention_mask": masks if len(masks) > 1 else next(iter(masks.values()))}


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
