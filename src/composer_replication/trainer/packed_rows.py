"""Completions of one prompt are packed behind it, so that each distinct prompt is forwarded once.

The rows of a group share their prompt, yet a plain forward computes it once per row. A pack is one row instead: the prompt but
for its last token, then, for each completion, that last token and the completion but for its own last one:

    p1 p2 … | pn c1 c2 … | pn d1 d2 … | …     positions of each completion go on from the prompt

By a mask each token sees the prompt and what stands before it in its own part, and each token of a part scores the one behind it.
Attention is computed between all tokens of a pack, though, so long completions are packed few at a time (``rows_of_a_pack``).
A row that is a chain of conversations is taken apart: each is a completion of its own, behind its own prompt.
``SharedPrompts`` puts this, and the sampler of ``policy``, in the place of TRL's own wherever both are exact.

Letters: B rows, P prompt columns, T completion columns, K packs, S columns of a pack, N scored tokens.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from composer_replication.errors import InputError
from composer_replication.trainer import model_modes
from composer_replication.trainer.policy import ModelSampler
from composer_replication.trainer.processes import gathered, num_processes

logger = logging.getLogger(__name__)

MAX_COLUMNS = 16_384  # of a pack of several rows: its mask has the square of that many entries
PACKED_COLUMNS = 1024  # of completions in a pack, or as many as its prompt has: that many save more by sharing than they cost
_UNSCORED = -100


class Part(NamedTuple):
    """A completion, or one conversation of it, and where its first id stands in the batch."""

    ids: list[int]
    row: int
    column: int


Pack = tuple[tuple[int, ...], list[Part]]  # a prompt, without padding, and the completions behind it


def shared_prefix_logps(
    model: nn.Module,
    prompt_ids_BP: Tensor,
    prompt_mask_BP: Tensor,
    completion_ids_BT: Tensor,
    completion_mask_BT: Tensor,
    starts_BS: Tensor | None = None,
    *,
    packs: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Log-probability of each completion token, and the entropy where it was drawn, if the model's head gives it.

    logp_bt = log softmax(z_bt / temperature)[y_bt], H_bt = -sum_v p_btv log p_btv, in nats,
    where z_bt are the logits at the position before completion token y_bt. Equal to the
    forward of prompt and completion together, for values and gradients, up to rounding.
    Both results are float32 and zero where ``completion_mask_BT`` is zero, as in TRL.

    Ids are padded on the left in prompts and on the right in completions, where masks are 0. Rows whose prompts are equal under
    the mask form a group, wherever they stand in the batch. ``starts_BS`` are completion columns at which later conversations of
    a row begin, rising; 0 for none. The first id of one is its prompt, and has no value: 0. Without ``packs``, for a model that
    has a ``packing_reason``, every conversation is forwarded by itself. ``model`` has TRL's fused head
    (``trl.trainer.utils.add_fused_lm_head``), which has the temperature.

    Departs from TRL: positions count from the first unmasked token, as in generation, where TRL's plain forward counts padding
    too. The two agree for relative positions (RoPE, ALiBi).
    Reference: DeepSeekMath (2024), equation 3, for the groups. A prompt without a token is refused (CR0722).
    """
    parts_of = _parts_of(prompt_ids_BP, prompt_mask_BP, completion_ids_BT, completion_mask_BT, starts_BS)
    of_packs: list[Pack] = []
    for prompt, parts in parts_of.items():
        longest = max(len(part.ids) for part in parts)
        step = rows_of_a_pack(len(prompt), longest) if packs else 1
        of_packs += [(prompt, parts[at : at + step]) for at in range(0, len(parts), step)]
    # One pack a forward is faster on a processor. Of several processes each forwards once: hooks of their wrappers are collective
    # calls. Where the mask of all packs together would be too large, and weights are whole, it is one a forward there, too.
    width = max(len(prompt) + sum(len(part.ids) for part in parts) for prompt, parts in of_packs)
    fits = not packs or model_modes.weights_are_sharded(model) or len(of_packs) * width**2 <= MAX_COLUMNS**2
    forwards = [of_packs] if num_processes() > 1 and fits else [[pack] for pack in of_packs]
    logp_parts, entropy_parts = list[Tensor](), list[Tensor]()
    for together in forwards:
        arguments = _laid_out(model, together, completion_ids_BT.device)
        if not packs:
            del arguments["position_ids"]  # which the model counts itself, if it knows any
        is_scored_KS = arguments["shift_labels"] != _UNSCORED
        output: Any = model(**arguments, use_cache=False, fused_lm_head=True)
        logp_parts.append(output.log_probs[is_scored_KS])
        entropy_parts += [] if output.entropy is None else [output.entropy[is_scored_KS]]
    placed = [part for _, parts in of_packs for part in parts]
    places = [(part.row, part.column + place) for part in placed for place in range(len(part.ids))]
    places_N2 = torch.tensor(places, dtype=torch.long, device=completion_ids_BT.device).reshape(-1, 2)

    def in_rows(parts: list[Tensor]) -> Tensor:
        values_N = torch.cat(parts)
        return values_N.new_zeros(completion_ids_BT.shape).index_put(places_N2.unbind(-1), values_N)

    return in_rows(logp_parts), in_rows(entropy_parts) if entropy_parts else None


def _parts_of(
    prompt_ids_BP: Tensor,
    prompt_mask_BP: Tensor,
    completion_ids_BT: Tensor,
    completion_mask_BT: Tensor,
    starts_BS: Tensor | None,
) -> dict[tuple[int, ...], list[Part]]:
    parts_of: defaultdict[tuple[int, ...], list[Part]] = defaultdict(list)
    # 0 where TRL has emptied the mask of a row that was cut
    lengths = completion_mask_BT.bool().sum(1).tolist()
    for row, length in enumerate(lengths):
        prompt = tuple(prompt_ids_BP[row][prompt_mask_BP[row].bool()].tolist())
        if not prompt:
            words, fix = "a prompt has no unmasked token.", "drop empty prompts."
            raise InputError("CR0722", words, where=f"row {row}", fix=fix)
        ids = completion_ids_BT[row, :length].tolist()
        starts = [] if starts_BS is None else starts_BS[row].tolist()
        edges = [0, *(start for start in starts if 0 < start < length), length]
        parts_of[prompt].append(Part(ids[: edges[1]], row, 0))
        for start, end in pairwise(edges[1:]):
            parts_of[(ids[start],)].append(Part(ids[start + 1 : end], row, start + 1))
    return parts_of


def rows_of_a_pack(prompt_length: int, completion_length: int) -> int:
    """How many rows to pack behind a prompt: attention between them is for nothing, and grows with the square of their length."""
    most = min(max(prompt_length, PACKED_COLUMNS), MAX_COLUMNS - prompt_length)
    return max(1, most // max(completion_length, 1))


def _laid_out(model: nn.Module, packs: Sequence[Pack], device: torch.device) -> dict[str, Any]:
    """Packs side by side, padded on the right, as arguments of a forward; positions are those of generation."""
    columns: defaultdict[str, list[Tensor]] = defaultdict(list)
    for prompt, parts in packs:
        *ids, last = prompt
        positions, segments, labels = list(range(len(ids))), [0] * len(ids), [_UNSCORED] * len(ids)
        for segment, (tokens, _, _) in enumerate(parts, start=1):
            ids += [last, *tokens][: len(tokens)]  # the last token is only predicted
            positions += range(len(prompt) - 1, len(prompt) - 1 + len(tokens))
            segments += [segment] * len(tokens)
            labels += tokens
        if not ids:  # nothing is scored, and a forward wants a column
            ids, positions, segments, labels = [last], [0], [0], [_UNSCORED]
        pack = {"input_ids": ids, "position_ids": positions, "segments": segments, "shift_labels": labels}
        for name, values in pack.items():
            columns[name].append(torch.tensor(values, dtype=torch.long, device=device))
    fillers = defaultdict(int, segments=-1, shift_labels=_UNSCORED)
    padded = {name: pad_sequence(values, True, fillers[name]) for name, values in columns.items()}
    segments_KS = padded.pop("segments")
    if int(segments_KS.max()) <= 1:
        # one row behind each prompt: causality is all, and nothing sees the padding on the right
        return padded
    of_query, of_key = segments_KS[:, :, None], segments_KS[:, None, :]
    # padding sees padding, so that no line is empty
    mask = ((of_key == 0) | (of_key == of_query)).tril()[:, None]
    inner = model_modes.inner_model(model)
    if inner.config.get_text_config()._attn_implementation == "eager":  # noqa: SLF001 - transformers' only name
        zeros = torch.zeros_like(mask, dtype=inner.dtype)
        mask = zeros.masked_fill(~mask, torch.finfo(inner.dtype).min)
    return {**padded, "attention_mask": mask}


class SharedPrompts:
    """Decides per call whether prompts are shared where TRL samples and computes log-probabilities, and does it then.

    Sharing is exact or it is not done: whatever stands against it is said once, and TRL's own path runs.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.off_reasons: tuple[str, ...] = ()  # those met so far

    def may_score(self, model: Any, against: Mapping[str, Any]) -> bool:
        """Whether rows are scored with shared prompts; the first sentence of ``against`` that holds is logged once."""
        return self._may_share("log-probabilities", against, model_modes.packing_reason, model)

    def may_sample(self, images: Any, multimodal_fields: Mapping[str, Any]) -> bool:
        """Whether TRL's model samples with shared prompts; a reason against it is logged once."""
        trainer = self._trainer
        against = {
            "another engine generates.": trainer.use_vllm or trainer.use_transformers_continuous_batching,
            "the prompts carry images.": images is not None or multimodal_fields,
            "tools are in use.": trainer.tools,
            "generation_kwargs are set, which only transformers' generate reads.": trainer.args.generation_kwargs,
        }
        return self._may_share("sampling", against, model_modes.sampling_reason, trainer.model_wrapped)

    def _may_share(
        self, what: str, against: Mapping[str, Any], judge: Callable[[Any], str | None], model: Any
    ) -> bool:
        reason = next((reason for reason, holds in against.items() if holds), None) or judge(model)
        sentence = f"{what}: {reason}"
        if reason is not None and sentence not in self.off_reasons:
            self.off_reasons = (*self.off_reasons, sentence)
            logger.warning("prefix sharing is off for %s", sentence)
        return reason is None

    def logps(
        self,
        model: Any,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        batch_size: int | None,
        compute_entropy: bool,
        starts_BS: Tensor | None,
        *,
        packs: bool,
    ) -> tuple[Tensor, Tensor | None, None]:
        """TRL's return value of ``_get_per_token_logps_and_entropies``, by ``shared_prefix_logps``.

        ``batch_size`` bounds the rows of one forward, as in TRL, and a group that it cuts shares its prompt by parts.
        """
        split, step = input_ids.size(1) - logits_to_keep, batch_size or len(input_ids)
        chains = [None] * len(input_ids) if starts_BS is None else torch.split(starts_BS, step)
        answers: list[tuple[Tensor, Tensor | None]] = []
        by_step = torch.split(input_ids, step), torch.split(attention_mask, step)
        for ids_BW, mask_BW, starts in zip(*by_step, chains, strict=False):
            parts = ids_BW[:, :split], mask_BW[:, :split], ids_BW[:, split:], mask_BW[:, split:]
            with self._trainer.accelerator.autocast():
                answers.append(shared_prefix_logps(model, *parts, starts, packs=packs))
        entropies = [values for _, values in answers if compute_entropy and values is not None]
        return torch.cat([logps for logps, _ in answers]), torch.cat(entropies) if entropies else None, None

    def completions(
        self, model: Any, prompt_ids: list[list[int]]
    ) -> tuple[list[list[int]], list[list[float]] | None]:
        """Completion ids, one row a prompt entry, and their log-probabilities.

        These are None where a filter reshapes the distribution: they would not be the model's own. Draws come from torch's
        global generator, whose state is in every checkpoint, so a resumed run samples the same rows.
        """
        trainer, args = self._trainer, self._trainer.args
        sampler = ModelSampler(model, args, trainer._tokenizer, eos_token_ids=trainer.eos_token_ids)  # noqa: SLF001 - TRL's only name
        is_sharded = model_modes.weights_are_sharded(trainer.model)
        samples = sampler.sample(
            prompt_ids,
            max_new_tokens=args.max_completion_length,
            temperature=args.temperature,
            is_finished=trainer.is_finished,
            goes_on=(lambda runs_here: any(gathered(runs_here))) if is_sharded else bool,
        )
        logps = [row.logps for (row,) in samples] if sampler.has_logps else None
        return [row.ids for (row,) in samples], logps
