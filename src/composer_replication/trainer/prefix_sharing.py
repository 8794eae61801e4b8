"""Log-probabilities of GRPO groups, every distinct prompt forwarded once.

The rows of a group share their prompt, yet the plain forward computes it once per row.
Here each distinct prompt is forwarded once with gradient, its key-value cache is copied
to the rows of the group by a differentiable gather, and only completion tokens follow.
Under gradient checkpointing, where no cache is kept, completions are packed behind their
prompt instead (``packed_rows``). With G rows a group the token count falls by G (P + T) / (P + G T), and the head runs on
the positions that are scored and on no other.

Letters: B rows, K distinct prompts, P prompt columns, T completion columns, V vocabulary,
N positions in a flat list.

``prefix_wiring`` calls it in the place of TRL's ``_get_per_token_logps_and_entropies``, where ``unsupported_reason`` says
nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import nn
from transformers import DynamicCache

from composer_replication.errors import InputError
from composer_replication.trainer.packed_rows import Prompt, distinct_prompts, score_packed
from composer_replication.trainer.prefix_support import accepts, inner_model, keeps_cache, unsupported_reason
from composer_replication.trainer.processes import num_processes
from composer_replication.trainer.token_scores import TokenScorer, head_apart

__all__ = ["shared_prefix_logps", "unsupported_reason"]


def shared_prefix_logps(
    model: nn.Module,
    prompt_ids_BP: torch.Tensor,
    prompt_mask_BP: torch.Tensor,
    completion_ids_BT: torch.Tensor,
    completion_mask_BT: torch.Tensor,
    *,
    temperature: float,
    compute_entropy: bool = False,
    entropy_has_gradient: bool = True,
    prompts_per_forward: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Log-probability of each completion token, and the entropy where it was drawn.

    logp_bt = log softmax(z_bt / temperature)[y_bt], H_bt = -sum_v p_btv log p_btv, in nats,
    where z_bt are the logits at the position before completion token y_bt. Equal to the
    forward of prompt and completion together, for values and gradients, up to rounding.
    Both results are float32 (float64 for a float64 model), carry gradient (H as asked) and are zero where
    ``completion_mask_BT`` is zero, as in TRL.

    Args:
        model: causal language model, PEFT-wrapped or not, for which ``unsupported_reason`` is None.
        prompt_ids_BP: token ids, padded on the left.
        prompt_mask_BP: 1 for tokens, 0 for padding. Rows whose ids under the mask are equal form a
            group, wherever they stand in the batch.
        completion_ids_BT: token ids, padded on the right.
        completion_mask_BT: 1 for tokens, 0 for padding; a row of zeros is allowed.
        temperature: divides the logits; above 0.
        compute_entropy: also return H (else None).
        entropy_has_gradient: H carries gradient. False allows the logits never to be held where they are large.
        prompts_per_forward: distinct prompts forwarded together, padded to the longest. The default
            takes 1 in a lone process (no padding at all, the fastest on CPU) and all of them under
            ``torch.distributed``, where a sharded model needs the same number of forwards, two, on
            every rank whatever its groups are.

    Departs from TRL: positions count from the first unmasked token, as in generation, where TRL's
    plain forward counts padding too. The two agree for relative positions (RoPE, ALiBi); a model
    with learned absolute positions gets here what it would get without padding.
    Reference: DeepSeekMath (2024), equation 3, for the groups.

    Raises:
        InputError: CR0722, a prompt without a token; CR0757, the model did not fill the cache it was given.
    """
    prompts, prompt_of_row = distinct_prompts(prompt_ids_BP, prompt_mask_BP)
    at_once = prompts_per_forward or (len(prompts) if num_processes() > 1 else 1)
    score = _score_behind_cache if keeps_cache(model) else score_packed
    mask_BT = completion_mask_BT.bool()
    row_order: list[int] = []
    logp_parts: list[torch.Tensor] = []
    entropy_parts: list[torch.Tensor] = []
    for start in range(0, len(prompts), at_once):
        rows = [row for row, prompt in enumerate(prompt_of_row) if start <= prompt < start + at_once]
        row_order += rows
        rows_b = torch.tensor(rows, device=completion_ids_BT.device)
        head = None if entropy_has_gradient and compute_entropy else head_apart(model, mask_BT[rows].numel())
        logps_bT, entropies_bT = score(
            model,
            prompts[start : start + at_once],
            torch.tensor([prompt_of_row[row] - start for row in rows], device=rows_b.device),
            completion_ids_BT.index_select(0, rows_b),
            mask_BT.index_select(0, rows_b),
            TokenScorer(temperature, compute_entropy, head),
        )
        logp_parts.append(logps_bT)
        entropy_parts += [] if entropies_bT is None else [entropies_bT]
    back_B = torch.argsort(torch.tensor(row_order, device=mask_BT.device))
    logps_BT = torch.cat(logp_parts).index_select(0, back_B)
    entropies_BT = torch.cat(entropy_parts).index_select(0, back_B) if compute_entropy else None
    return logps_BT, entropies_BT


def prefill(
    model: nn.Module,
    prompts: Sequence[Prompt],
    *,
    device: torch.device,
    pad_id: int = 0,
    scorer: TokenScorer | None = None,
) -> tuple[torch.Tensor, DynamicCache, torch.Tensor, torch.Tensor]:
    """Forward each prompt once; left-padded together when their lengths differ.

    Returns:
        The logits after the last prompt position (K, V), or what a scorer takes there, the filled cache (K rows), the mask (K, P)
        and the position that each prompt's next token has (K,).

    Raises:
        InputError: CR0757, the model did not fill the cache it was given.
    """
    width = max(len(prompt.ids) for prompt in prompts)
    ids_KP = torch.full((len(prompts), width), pad_id, dtype=torch.long, device=device)
    mask_KP = torch.zeros((len(prompts), width), dtype=torch.long, device=device)
    for row, prompt in enumerate(prompts):
        ids_KP[row, width - len(prompt.ids) :] = torch.tensor(prompt.ids, device=device)
        mask_KP[row, width - len(prompt.ids) :] = torch.tensor(prompt.mask, device=device)
    lengths_K = torch.tensor([len(prompt.ids) for prompt in prompts], device=device)
    columns_P = torch.arange(width, device=device)
    positions_KP = (columns_P[None, :] - (width - lengths_K)[:, None]).clamp(min=0)
    cache = DynamicCache(config=inner_model(model).config)
    outputs_K1X = forward_with_cache(
        model,
        ids_KP,
        cache,
        positions_KP,
        None if bool(mask_KP.all()) else mask_KP,
        logits_to_keep=1,
        scorer=scorer,
    )
    if cache.get_seq_length() != width:
        raise InputError(
            "CR0757",
            f"{type(inner_model(model)).__name__} left the key-value cache at {cache.get_seq_length()} of "
            f"{width} positions, so prompts cannot be shared exactly.",
            where="prefix sharing",
            fix="switch prefix sharing off for this model, or gradient checkpointing if it is on.",
        )
    return outputs_K1X[:, -1], cache, mask_KP, lengths_K


def forward_with_cache(
    model: nn.Module,
    ids_BT: torch.Tensor,
    cache: DynamicCache,
    positions_BT: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    logits_to_keep: int = 0,
    scorer: TokenScorer | None = None,
) -> torch.Tensor:
    """Logits of the model's own forward (scaling and soft caps are its affair), or what a scorer takes; ``cache`` grows by T."""
    arguments: dict[str, Any] = {"input_ids": ids_BT, "past_key_values": cache, "use_cache": True}
    if accepts(model, "position_ids"):
        arguments["position_ids"] = positions_BT
    if mask is not None:
        arguments["attention_mask"] = mask
    if scorer is not None:
        return scorer.forward(model, arguments, logits_to_keep=logits_to_keep)
    logits: torch.Tensor = model(**arguments, logits_to_keep=logits_to_keep).logits
    return logits


def copy_cache_to_rows(cache: DynamicCache, prompt_of_row_B: torch.Tensor) -> None:
    """Make cache row b a copy of row ``prompt_of_row_B[b]``; differentiable, nothing is written in place."""
    # reorder_cache gathers with index_select, whose backward adds whole rows; the advanced indexing
    # of batch_select_indices adds element by element and made a step about 10% slower on CPU.
    cache.reorder_cache(cast("torch.LongTensor", prompt_of_row_B))


def _score_behind_cache(
    model: nn.Module,
    prompts: Sequence[Prompt],
    prompt_of_row_B: torch.Tensor,
    completion_ids_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    scorer: TokenScorer,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Score the rows that belong to these prompts: one prefill, one forward of the completions."""
    num_columns = completion_ids_BT.size(1)
    used_columns = int(mask_BT.any(dim=0).nonzero().max()) + 1 if bool(mask_BT.any()) else 1
    ids_BT, kept_BT = completion_ids_BT[:, :used_columns], mask_BT[:, :used_columns]
    first_KX, cache, prompt_mask_KP, lengths_K = prefill(model, prompts, device=ids_BT.device, scorer=scorer)
    first_logp_B, first_entropy_B = scorer.of(first_KX.index_select(0, prompt_of_row_B), ids_BT[:, 0])
    copy_cache_to_rows(cache, prompt_of_row_B)
    # The last token is predicted, never read; a lone token is read all the same, so that every call
    # makes two forwards (ranks of a sharded model must not disagree about their number).
    inputs_BS = ids_BT[:, : max(used_columns - 1, 1)]
    columns_S = torch.arange(inputs_BS.size(1), device=ids_BT.device)
    outputs_BSX = forward_with_cache(
        model,
        inputs_BS,
        cache,
        lengths_K.index_select(0, prompt_of_row_B)[:, None] + columns_S,
        _completion_mask(prompt_mask_KP.index_select(0, prompt_of_row_B), kept_BT[:, : inputs_BS.size(1)]),
        scorer=scorer,
    )[:, : used_columns - 1]
    targets_BS = ids_BT[:, 1:]
    rest_logp, rest_entropy = scorer.of(outputs_BSX.reshape(-1, outputs_BSX.size(-1)), targets_BS.reshape(-1))

    def assemble(first_B: torch.Tensor, rest: torch.Tensor) -> torch.Tensor:
        values_BT = torch.cat([first_B[:, None], rest.view(targets_BS.shape)], dim=1).masked_fill(
            ~kept_BT, 0.0
        )
        return nn.functional.pad(values_BT, (0, num_columns - used_columns))

    if first_entropy_B is None or rest_entropy is None:
        return assemble(first_logp_B, rest_logp), None
    return assemble(first_logp_B, rest_logp), assemble(first_entropy_B, rest_entropy)


def _completion_mask(prompt_mask_BP: torch.Tensor, kept_BS: torch.Tensor) -> torch.Tensor | None:
    """Attention mask over cache and inputs, or None where causality alone hides the padding."""
    is_right_padded = bool((kept_BS[:, 1:] <= kept_BS[:, :-1]).all())
    if bool(prompt_mask_BP.all()) and is_right_padded:
        return None
    return torch.cat([prompt_mask_BP, kept_BS.to(prompt_mask_BP.dtype)], dim=1)
