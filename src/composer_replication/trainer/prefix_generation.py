"""Sampling groups of completions, every distinct prompt forwarded once.

One left-padded forward fills the key-value cache for all distinct prompts; the cache rows
are then copied to the samples and decoding goes on token by token. A finished row leaves
the batch and the cache at once, so the cost of a step follows the rows still running.
A model that cannot share prompts exactly is sampled by whole forwards.

Letters: B samples (all prompts), A samples still running, P prompt columns, V vocabulary.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast
from weakref import WeakSet

import torch
from torch import nn
from transformers import DynamicCache
from transformers.generation.logits_process import (
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from composer_replication.errors import InputError
from composer_replication.records import StopReason
from composer_replication.trainer.collator import padded
from composer_replication.trainer.model_modes import evaluation_mode
from composer_replication.trainer.prefix_support import accepts, inner_model, sampling_reason

logger = logging.getLogger(__name__)

_TORCH_SAYS = "probability tensor contains"  # multinomial on a processor; on a GPU it ends the process's CUDA


class NonFiniteSamplingError(InputError, ArithmeticError):
    """The weights give logits that are not finite numbers; ``step`` of the training, from 1, or None outside of one."""

    def __init__(self, step: int | None = None) -> None:
        more = "" if step is None else f" for step {step}"
        super().__init__(
            "CR0770",
            f"the weights of the model gave numbers that are not finite while sampling{more}.",
            where="sampling" if step is None else f"step {step}",
            fix="lower trl.learning_rate or trl.weight_decay and begin a new run; to go on from the newest checkpoint "
            "whose weights are finite, name its folder in model.name.",
        )


@contextmanager
def sampling_for_step(step: int) -> Iterator[None]:
    """Inside, what our sampler or torch says of such numbers is an error that names the step."""
    try:
        yield
    except (NonFiniteSamplingError, RuntimeError) as error:
        if isinstance(error, NonFiniteSamplingError) or _TORCH_SAYS in str(error):
            raise NonFiniteSamplingError(step) from error
        raise


@dataclass(slots=True)
class SampledRow:
    """One completion: the sampled ids up to the stop, an end-of-sequence id included, and why it stopped.

    ``logps`` has for each id its log-probability under the distribution it was drawn from. ``text`` and ``decoded`` are for
    ``text_rule``: what is written for good, and the ids that were the last to be decoded for it.
    """

    ids: list[int] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)
    stop_reason: StopReason = StopReason.LENGTH
    text: str = ""
    decoded: tuple[int, int] = (0, 0)


StopRule = Callable[[SampledRow], bool]
"""Whether a row, all of whose ids are kept, ends here."""


def text_rule(tokenizer: Any, is_finished: Callable[[str], bool] | None) -> StopRule | None:
    """Ends a row once its text is finished; only what is new of a row is decoded.

    The newest ids are decoded behind those before, since a token may write nothing until the next one completes its character.
    """
    if is_finished is None:
        return None

    def decode(ids: list[int]) -> str:
        return str(tokenizer.decode(ids, skip_special_tokens=True))

    def rule(row: SampledRow) -> bool:
        start, end = row.decoded
        known, longer = decode(row.ids[start:end]), decode(row.ids[start:])
        text = row.text + longer[len(known) :] if longer.startswith(known) else decode(row.ids)
        if not longer.endswith("\ufffd"):
            row.text, row.decoded = text, (end, len(row.ids))
        return is_finished(text)

    return rule


def sample_shared(
    model: nn.Module,
    prompt_token_lists: Sequence[Sequence[int]],
    num_samples: int,
    *,
    max_new_tokens: int,
    temperature: float,
    eos_token_ids: Collection[int],
    pad_token_id: int,
    top_p: float = 1.0,
    top_k: int = 0,
    min_p: float | None = None,
    repetition_penalty: float = 1.0,
    stop: StopRule | None = None,
    generator: torch.Generator | Sequence[torch.Generator] | None = None,
    row_limits: Sequence[int] | None = None,
    goes_on: Callable[[bool], bool] = bool,
) -> list[list[SampledRow]]:
    """Draw ``num_samples`` completions for each prompt; ``result[i][j]`` is sample j of prompt i.

    Tokens are drawn from softmax(w(z)), w being transformers' own processors in the order of ``generate``: repetition
    penalty, temperature, top-k, top-p, min-p; ``logps`` are of that very distribution, in nats. All rows run in one batch:
    memory for the cache is B x (P + tokens), so pass many prompts in several calls. Where the model cannot share prompts
    (``sampling_reason``) the draws are the same and every token takes a forward of its whole row; the log says so once.
    Every row has its own random number at every step, drawn whether or not the row is still running: what a row says
    does not depend on when its neighbours stop. Logits that are not finite are ``NonFiniteSamplingError`` (CR0770).

    Args:
        model: causal language model; run in evaluation mode without gradient, then left as it was.
        prompt_token_lists: prompt ids; prompts may repeat and are forwarded once each.
        num_samples: samples for each entry of ``prompt_token_lists``.
        max_new_tokens: most tokens a row may have; ``row_limits`` where some may have fewer.
        temperature: 0 takes the most likely token; top-k, top-p and min-p are then off, and ``logps`` those of temperature 1.
        eos_token_ids: ids that end a row.
        pad_token_id: fills the left of shorter prompts; masked, so any valid id serves.
        top_p: as in ``generate``; 1 is off.
        top_k: likewise; 0 is off.
        min_p: likewise; None is off.
        repetition_penalty: likewise; 1 is off.
        stop: asked after each token but an end of sequence whether the row ends.
        generator: source of randomness, on any device; None is torch's global one. With one for each row, what that
            row says does not depend on the rows beside it.
        row_limits: most tokens of each row.
        goes_on: told after each token whether a row still runs, says whether to forward once more; asks the others
            where weights are spread over processes, whose forwards are collective calls.
    """
    given = [tuple(ids) for ids in prompt_token_lists for _ in range(num_samples)]
    rows = [SampledRow() for _ in given]
    sampling = _Sampling(
        processors=_processors(temperature, top_p, top_k, min_p, repetition_penalty),
        is_greedy=temperature == 0,
        needs_context=repetition_penalty != 1.0,
        eos_token_ids=frozenset(eos_token_ids),
        stop=stop,
        generator=generator,
        row_limits=row_limits or [max_new_tokens] * len(rows),
    )
    with torch.no_grad(), evaluation_mode(model):
        batch = _Batch(model, given)
        logits_AV = batch.first_logits(pad_token_id)
        running = list(range(len(rows)))
        for step in range(max_new_tokens):
            running = sampling.extend(rows, batch, logits_AV) if running else []
            if step == max_new_tokens - 1 or not goes_on(bool(running)):
                break
            batch.keep(running or [0])  # nobody runs here: one row is forwarded for the others' sake
            logits_AV = batch.next_logits([rows[number].ids[-1] for number in batch.row_numbers])
    return [rows[start : start + num_samples] for start in range(0, len(rows), num_samples)]


@dataclass(frozen=True)
class _Sampling:
    """How a token is drawn and when a row ends."""

    processors: LogitsProcessorList
    is_greedy: bool
    needs_context: bool
    eos_token_ids: frozenset[int]
    stop: StopRule | None
    generator: torch.Generator | Sequence[torch.Generator] | None
    row_limits: Sequence[int]

    def extend(self, rows: list[SampledRow], batch: _Batch, logits_AV: torch.Tensor) -> list[int]:
        """Draw one token for each running row; the places of the rows that go on."""
        context_AC = batch.context() if self.needs_context else logits_AV.new_zeros(0, dtype=torch.long)
        scores_AV = self.processors(cast("torch.LongTensor", context_AC), logits_AV.float())
        drawn_A = self._draw(scores_AV, batch.row_numbers, len(rows))
        logps = scores_AV.log_softmax(-1).gather(-1, drawn_A[:, None])[:, 0].tolist()
        if any(map(math.isnan, logps)):  # a probability may be 0 by rounding, but is always a number
            raise NonFiniteSamplingError
        running: list[int] = []
        newest = zip(batch.row_numbers, drawn_A.tolist(), logps, strict=True)
        for place, (number, token, logp) in enumerate(newest):
            row = rows[number]
            row.ids.append(token)
            row.logps.append(logp)
            if token in self.eos_token_ids:
                row.stop_reason = StopReason.FINISHED
            elif self.stop is not None and self.stop(row):
                row.stop_reason = StopReason.STOP_RULE
            elif len(row.ids) < self.row_limits[number]:
                running.append(place)
        return running

    def _draw(self, scores_AV: torch.Tensor, row_numbers: list[int], num_rows: int) -> torch.Tensor:
        """One token id for each running row, by a number of its own in [0, 1)."""
        if self.is_greedy:
            return scores_AV.argmax(-1)
        if isinstance(self.generator, Sequence):
            own = [self.generator[number] for number in row_numbers]
            drawn = [torch.rand((), generator=each, dtype=torch.float64).cpu() for each in own]
            uniforms_A = torch.stack(drawn)
        else:
            device = None if self.generator is None else self.generator.device
            uniforms_B = torch.rand(num_rows, generator=self.generator, dtype=torch.float64, device=device)
            uniforms_A = uniforms_B[torch.tensor(row_numbers, device=device)]
        # Inverse of the cumulative distribution; right=True passes over tokens of probability zero.
        cumulative_AV = scores_AV.double().softmax(-1).cumsum(-1)
        targets_A1 = (uniforms_A.to(scores_AV.device) * cumulative_AV[:, -1])[:, None]
        drawn_A = torch.searchsorted(cumulative_AV, targets_A1, right=True)[:, 0]
        return drawn_A.clamp(max=scores_AV.size(-1) - 1)


def _processors(
    temperature: float, top_p: float, top_k: int, min_p: float | None, repetition_penalty: float
) -> LogitsProcessorList:
    """transformers' own processors, in the order of ``generate``; of a filter, or with temperature 0, only what is on."""
    found: list[LogitsProcessor] = []
    if repetition_penalty != 1.0:
        found.append(RepetitionPenaltyLogitsProcessor(float(repetition_penalty)))
    if temperature not in (0, 1):
        found.append(TemperatureLogitsWarper(float(temperature)))
    if temperature != 0:
        found += [TopKLogitsWarper(top_k)] if top_k else []
        found += [TopPLogitsWarper(top_p)] if top_p < 1.0 else []
        found += [MinPLogitsWarper(min_p)] if min_p is not None else []
    return LogitsProcessorList(found)


_TOLD: WeakSet[nn.Module] = WeakSet()


class _Batch:
    """The rows still running; place a of everything is sample ``row_numbers[a]``.

    Their past is in a cache, and a step forwards one id of each. A model that cannot share prompts exactly has none: a step
    forwards each row by itself from its first id on, and the log says so once.
    """

    cache: DynamicCache | None = None
    mask_AC: torch.Tensor
    positions_A: torch.Tensor

    def __init__(self, model: nn.Module, rows: Sequence[tuple[int, ...]]) -> None:
        self.model, self.row_numbers, self.ids = model, list(range(len(rows))), [list(row) for row in rows]
        self.device = next(inner_model(model).parameters()).device

    def first_logits(self, pad_id: int) -> torch.Tensor:
        """Logits after the prompts (A, V), each distinct one forwarded once; left-padded together where lengths differ."""
        reason = sampling_reason(self.model)
        if reason is not None:
            if self.model not in _TOLD:
                _TOLD.add(self.model)
                slow = "sampling for evaluation and episodes forwards each row whole for every token, which is slow"
                logger.warning("%s: %s", slow, reason)
            return self._whole_logits()
        rows = [tuple(ids) for ids in self.ids]
        prompts = {ids: number for number, ids in enumerate(dict.fromkeys(rows))}
        ids_KP, mask_KP = (
            each.to(self.device) for each in padded(list(prompts), pad_id=pad_id, on_left=True)
        )
        self.cache = DynamicCache(config=inner_model(self.model).config)
        positions_KP = (mask_KP.cumsum(-1) - 1).clamp(min=0)
        logits_KV = self._cached_logits(self.cache, ids_KP, positions_KP, mask_KP)
        width = ids_KP.size(1)
        if self.cache.get_seq_length() != width:  # further tokens would be sampled without what stands before
            name = type(inner_model(self.model)).__name__
            words = f"{name} left the key-value cache at {self.cache.get_seq_length()} of {width} positions."
            fix = "switch prefix sharing off for this model."
            raise InputError("CR0757", words, where="prefix sharing", fix=fix)
        index_A = torch.tensor([prompts[ids] for ids in rows], device=self.device)
        self.cache.reorder_cache(cast("torch.LongTensor", index_A))
        self.mask_AC, self.positions_A = mask_KP[index_A], mask_KP.sum(-1)[index_A]
        return logits_KV[index_A]

    def keep(self, places: list[int]) -> None:
        if len(places) == len(self.row_numbers):
            return
        self.row_numbers = [self.row_numbers[place] for place in places]
        self.ids = [self.ids[place] for place in places]
        if self.cache is not None:
            places_A = torch.tensor(places, device=self.device)
            self.cache.reorder_cache(cast("torch.LongTensor", places_A))
            self.mask_AC, self.positions_A = self.mask_AC[places_A], self.positions_A[places_A]

    def next_logits(self, newest_ids: Sequence[int]) -> torch.Tensor:
        """Logits (A, V) after one more id of each row."""
        for ids, newest in zip(self.ids, newest_ids, strict=True):
            ids.append(newest)
        if self.cache is None:
            return self._whole_logits()
        newest_A1 = torch.tensor(newest_ids, device=self.device)[:, None]
        self.mask_AC = nn.functional.pad(self.mask_AC, (0, 1), value=1)
        logits_AV = self._cached_logits(self.cache, newest_A1, self.positions_A[:, None], self.mask_AC)
        self.positions_A = self.positions_A + 1
        return logits_AV

    def context(self) -> torch.Tensor:
        """All ids so far (A, C), for the repetition penalty.

        Padding repeats a row's first id, so that the padding id itself (often the end) is not penalised.
        """
        width = max(map(len, self.ids))
        return torch.tensor([[ids[0]] * (width - len(ids)) + ids for ids in self.ids], device=self.device)

    def _cached_logits(
        self, cache: DynamicCache, ids_BT: torch.Tensor, positions_BT: torch.Tensor, mask_BC: torch.Tensor
    ) -> torch.Tensor:
        """Logits after the last id, by the model's own forward (scaling and soft caps are its affair); the cache grows by T."""
        arguments: dict[str, Any] = {"input_ids": ids_BT, "past_key_values": cache, "use_cache": True}
        if accepts(self.model, "position_ids"):
            arguments["position_ids"] = positions_BT
        if not bool(mask_BC.all()):
            arguments["attention_mask"] = mask_BC
        logits_B1V: torch.Tensor = self.model(**arguments, logits_to_keep=1).logits
        return logits_B1V[:, -1]

    def _whole_logits(self) -> torch.Tensor:
        """Logits (A, V) of equal rows are forwarded once."""
        more = {"use_cache": False, "logits_to_keep": 1}
        taken = {name: value for name, value in more.items() if accepts(self.model, name)}
        found = {
            ids: self.model(input_ids=torch.tensor([ids], device=self.device), **taken).logits[0, -1]
            for ids in dict.fromkeys(map(tuple, self.ids))
        }
        return torch.stack([found[tuple(ids)] for ids in self.ids])
