"""Completions of one prompt are packed behind it, so that each distinct prompt is forwarded once.

The rows of a group share their prompt, yet a plain forward computes it once per row. A pack is one row instead: the prompt but
for its last token, then, for each completion, that last token and the completion but for its own last one:

    p1 p2 … | pn c1 c2 … | pn d1 d2 … | …     positions of each completion go on from the prompt

By a mask each token sees the prompt and what stands before it in its own part, and each token of a part scores the one behind it.
Attention is computed between all tokens of a pack, though, so long completions are packed few at a time (``rows_of_a_pack``).
``SharedPrompts`` puts this, and the sampler of ``prefix_generation``, in the place of TRL's own wherever both are exact.

Letters: B rows, P prompt columns, T completion columns, K packs, S columns of a pack, N scored tokens of some packs.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from composer_replication.errors import InputError
from composer_replication.trainer.model_modes import weights_are_sharded
from composer_replication.trainer.policy import ModelSampler
from composer_replication.trainer.prefix_support import inner_model, packing_reason, sampling_reason
from composer_replication.trainer.processes import gathered, num_processes
from composer_replication.trainer.setting_errors import refuse_masked_stops

logger = logging.getLogger(__name__)

MAX_COLUMNS = 16_384
"""Of a pack of several rows: its mask has the square of that many entries."""
_PADDING, _UNSCORED = -1, -100
Pack = tuple[tuple[int, ...], list[int]]
"""The ids of a prompt, without padding, and the rows that follow it."""


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
    rows_of: dict[tuple[int, ...], list[int]] = {}
    for row, (ids_P, mask_P) in enumerate(zip(prompt_ids_BP, prompt_mask_BP.bool(), strict=True)):
        prompt = tuple(ids_P[mask_P].tolist())
        if not prompt:
            raise InputError(
                "CR0722", "a prompt has no unmasked token.", where=f"row {row}", fix="drop empty prompts."
            )
        rows_of.setdefault(prompt, []).append(row)
    mask_BT = completion_mask_BT.bool()
    ids = [
        of_row[:length]
        for of_row, length in zip(completion_ids_BT.tolist(), mask_BT.sum(1).tolist(), strict=True)
    ]
    logp_parts: list[torch.Tensor] = []
    entropy_parts: list[torch.Tensor] = []
    places: list[torch.Tensor] = []
    for packs in _forwards(model, rows_of, [len(each) for each in ids]):
        layout = _Layout.of(packs, ids, completion_ids_BT.device)
        output: Any = model(**_arguments(model, layout), shift_labels=layout.targets_KS, fused_lm_head=True)
        is_scored_KS = layout.targets_KS != _UNSCORED
        logp_parts.append(output.log_probs[is_scored_KS])
        entropy_parts += [] if output.entropy is None else [output.entropy[is_scored_KS]]
        places.append(layout.places_N2)
    rows_N, columns_N = torch.cat(places).unbind(-1)

    def in_rows(parts: list[torch.Tensor]) -> torch.Tensor:
        values_N = torch.cat(parts)
        return values_N.new_zeros(mask_BT.shape).index_put((rows_N, columns_N), values_N)

    return in_rows(logp_parts), in_rows(entropy_parts) if entropy_parts else None


def _forwards(
    model: nn.Module, rows_of: dict[tuple[int, ...], list[int]], lengths: Sequence[int]
) -> Iterator[list[Pack]]:
    """The packs of each forward.

    One a forward is faster on a processor; of several processes, whose weights may be sharded, each forwards once. Where the
    mask of all packs together would be too large, and weights are whole, it is one a forward there, too.
    """
    hidden_size = inner_model(model).config.get_text_config().hidden_size
    packs: list[Pack] = []
    for prompt, rows in rows_of.items():
        step = rows_of_a_pack(len(rows), len(prompt), max(lengths[row] for row in rows), hidden_size)
        packs += [(prompt, rows[at : at + step]) for at in range(0, len(rows), step)]
    width = max(len(prompt) + sum(lengths[row] for row in rows) for prompt, rows in packs)
    fits = weights_are_sharded(model) or len(packs) * width**2 <= MAX_COLUMNS**2
    yield from [packs] if num_processes() > 1 and fits else [[pack] for pack in packs]


def rows_of_a_pack(num_rows: int, prompt_length: int, completion_length: int, hidden_size: int) -> int:
    """How many rows to pack behind a prompt, by the least cost of all its packs.

    A layer of hidden size h costs some 24 h^2 operations a token and 4 h a pair of tokens, so a pack of S columns costs
    as S (6 h + S).
    """

    def width(rows: int) -> int:
        return prompt_length + rows * completion_length

    def cost(rows: int) -> int:
        packs = [rows] * (num_rows // rows) + [num_rows % rows]
        return sum(width(each) * (6 * hidden_size + width(each)) for each in packs if each)

    fits = [rows for rows in range(1, num_rows + 1) if width(rows) <= MAX_COLUMNS]
    return min(fits, key=cost, default=1)


@dataclass(frozen=True, slots=True)
class _Layout:
    """Packs side by side, padded on the right."""

    ids_KS: torch.Tensor
    positions_KS: torch.Tensor
    """As in generation."""
    segments_KS: torch.Tensor
    """0 for the prompt, 1 and up for the completions, -1 for padding."""
    targets_KS: torch.Tensor
    """The token that each position scores, -100 for none."""
    places_N2: torch.Tensor
    """Row and column (B, T) of each of these tokens."""

    @classmethod
    def of(cls, packs: Sequence[Pack], completions: Sequence[Sequence[int]], device: torch.device) -> _Layout:
        columns: list[list[list[int]]] = [[], [], [], []]
        places: list[tuple[int, int]] = []
        for prompt, rows in packs:
            *ids, last = prompt
            positions, segments, targets = list(range(len(ids))), [0] * len(ids), [_UNSCORED] * len(ids)
            for segment, row in enumerate(rows, start=1):
                tokens = completions[row]
                ids += [last, *tokens][: len(tokens)]  # the last token is only predicted
                positions += range(len(prompt) - 1, len(prompt) - 1 + len(tokens))
                segments += [segment] * len(tokens)
                targets += tokens
                places += [(row, column) for column in range(len(tokens))]
            for column, values in zip(columns, (ids, positions, segments, targets), strict=True):
                column.append(values)
        width = max(1, *map(len, columns[0]))  # a forward wants a column
        padded = [
            torch.tensor([values + [filler] * (width - len(values)) for values in column], device=device)
            for column, filler in zip(columns, (0, 0, _PADDING, _UNSCORED), strict=True)
        ]
        ids_KS, positions_KS, segments_KS, targets_KS = padded
        places_N2 = torch.tensor(places, dtype=torch.long, device=device).reshape(-1, 2)
        return cls(ids_KS, positions_KS, segments_KS, targets_KS, places_N2)


def _arguments(model: nn.Module, layout: _Layout) -> dict[str, Any]:
    arguments = {"input_ids": layout.ids_KS, "position_ids": layout.positions_KS, "use_cache": False}
    if int(layout.segments_KS.max()) <= 1:
        return arguments  # one row behind each prompt: causality is all, and nothing sees the padding on the right
    inner, num_columns = inner_model(model), layout.ids_KS.size(1)
    causal_SS = torch.ones(num_columns, num_columns, dtype=torch.bool, device=layout.ids_KS.device).tril()
    of_query, of_key = layout.segments_KS[:, :, None], layout.segments_KS[:, None, :]
    # padding sees padding, so that no line is empty
    mask = (causal_SS & ((of_key == 0) | (of_key == of_query)))[:, None]
    if inner.config.get_text_config()._attn_implementation == "eager":  # noqa: SLF001 - transformers' only name
        zeros = torch.zeros_like(mask, dtype=inner.dtype)
        mask = zeros.masked_fill(~mask, torch.finfo(inner.dtype).min)
    return {**arguments, "attention_mask": mask}


class SharedPrompts:
    """Decides per call whether prompts are shared where TRL samples and computes log-probabilities, and does it then.

    Sharing is exact or it is not done: whatever stands against it is said once, and TRL's own path runs. Rows are grouped by
    content inside a micro-batch, so with ``steps_per_generation = 1`` each prompt is forwarded once, and otherwise, as TRL
    shuffles and splits a generation, about once a micro-batch.
    ``off_reasons`` are those met so far for falling back to TRL's path.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.off_reasons: tuple[str, ...] = ()

    def check(self) -> None:
        args: Any = self._trainer.args
        refuse_masked_stops(args, stops_rows=self._trainer.is_finished is not None)
        if args.steps_per_generation > 1:
            words = "prefix sharing: TRL shuffles a generation into %d micro-batches of %d rows, which splits groups and loses "
            words += "part of the sharing. Where memory allows, raise per_device_train_batch_size until steps_per_generation is 1."
            logger.warning(words, args.steps_per_generation, args.per_device_train_batch_size)

    def may_score(self, model: Any, *, has_images: bool, other_reason: str) -> bool:
        """Whether rows are scored with shared prompts; a reason against it, ``other_reason`` among them, is logged once."""
        reason = other_reason or ("the rows carry images." if has_images else packing_reason(model))
        return self._may_share("log-probabilities", reason)

    def may_sample(self, images: Any, multimodal_fields: Mapping[str, Any]) -> bool:
        """Whether TRL's model samples with shared prompts; a reason against it is logged once."""
        trainer = self._trainer
        against = {
            "another engine generates.": trainer.use_vllm or trainer.use_transformers_continuous_batching,
            "the prompts carry images.": images is not None or multimodal_fields,
            "tools are in use.": trainer.tools,
            "generation_kwargs are set, which only transformers' generate reads.": trainer.args.generation_kwargs,
        }
        known = next((reason for reason, holds in against.items() if holds), None)
        return self._may_share("sampling", known or sampling_reason(trainer.model_wrapped))

    def _may_share(self, what: str, reason: str | None) -> bool:
        sentence = f"{what}: {reason}"
        if reason is not None and sentence not in self.off_reasons:
            self.off_reasons = (*self.off_reasons, sentence)
            logger.warning("prefix sharing is off for %s", sentence)
        return reason is None

    def logps(
        self,
        model: Any,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        logits_to_keep: int,
        batch_size: int | None,
        compute_entropy: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None, None]:
        """TRL's return value of ``_get_per_token_logps_and_entropies``, prompts forwarded once.

        ``batch_size`` bounds the rows of one forward, as in TRL; rows of a prompt are put side by side
        first, so that a bound which is a multiple of the group size costs no sharing.
        """
        num_rows, split = input_ids.size(0), input_ids.size(1) - logits_to_keep
        order = torch.argsort(torch.unique(input_ids[:, :split], dim=0, return_inverse=True)[1], stable=True)
        answers = []
        for rows in torch.split(order, batch_size or num_rows):
            ids, mask = input_ids[rows], attention_mask[rows]
            parts = (ids[:, :split], mask[:, :split], ids[:, split:], mask[:, split:])
            with self._trainer.accelerator.autocast():
                answers.append(shared_prefix_logps(model, *parts))
        back = torch.argsort(order)
        entropies = [entropies for _, entropies in answers if compute_entropy and entropies is not None]
        logps = torch.cat([logps for logps, _ in answers])[back]
        return logps, torch.cat(entropies)[back] if entropies else None, None

    def completions(
        self, model: Any, prompt_ids: list[list[int]]
    ) -> tuple[list[list[int]], list[list[float]] | None]:
        """Completion ids, one row a prompt entry, and their log-probabilities.

        These are None where a filter reshapes the distribution: they would not be the model's own. Draws come from torch's
        global generator, whose state is in every checkpoint, so a resumed run samples the same rows.
        """
        trainer = self._trainer
        args, is_sharded = trainer.args, weights_are_sharded(trainer.model)
        sampler = ModelSampler(model, args, trainer._tokenizer, eos_token_ids=trainer.eos_token_ids)  # noqa: SLF001
        samples = sampler.rows(
            prompt_ids,
            max_new_tokens=args.max_completion_length,
            temperature=args.temperature,
            is_finished=trainer.is_finished,
            goes_on=(lambda runs_here: any(gathered(runs_here))) if is_sharded else bool,
        )
        logps = [row.logps for (row,) in samples] if sampler.has_logps else None
        return [row.ids for (row,) in samples], logps
