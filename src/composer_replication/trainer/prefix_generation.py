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
from composer_replication.trainer.model_modes import evaluation_mode
from composer_replication.trainer.prefix_support import accepts, inner_model, sampling_reason

logger = logging.getLogger(__name__)


_TORCH_SAYS = "probability tensor contains"  # multinomial on a processor; on a GPU it ends the process's CUDA


class NonFiniteSamplingError(InputError, ArithmeticError):
    """The weights give logits that are not finite numbers.

    Args:
        step: in which they were sampled, from 1; None outside of training steps.
    """

    def __init__(self, step: int | None = None) -> None:
        where = "sampling" if step is None else f"step {step}"
        super().__init__(
            "CR0771",
            f"the weights of the model gave numbers that are not finite while sampling"
            f"{'' if step is None else f' for step {step}'}.",
            where=where,
            fix="lower trl.learning_rate or trl.weight_decay and begin a new run; to go on from the newest checkpoint "
            "whose weights are finite, name its folder in model.name.",
        )


@contextmanager
def sampling_for_step(step: int) -> Iterator[None]:
    """Inside, what our sampler or torch says of such numbers is an error that names the step."""
    try:
        yield
    except NonFiniteSamplingError as error:
        raise NonFiniteSamplingError(step) from error
    except RuntimeError as error:
        if _TORCH_SAYS not in str(error):
            raise
        raise NonFiniteSamplingError(step) from error


StopRule = Callable[[list[int]], bool]
"""Whether a row of these ids, all of which are kept, ends here."""


def text_rule(tokenizer: Any, is_finished: Callable[[str], bool] | None) -> StopRule | None:
    """Ends a row, whose ids are all kept, once its text is finished; only what is new of a row is decoded.

    For one call of ``sample_shared``, whose rows grow together. A row's text is found again by its ids; the newest ids are
    decoded behind those before, since a token may write nothing until the next one completes its character.
    """
    if is_finished is None:
        return None

    def decode(ids: list[int]) -> str:
        return str(tokenizer.decode(ids, skip_special_tokens=True))

    shorter: dict[tuple[int, ...], tuple[str, int, int]] = {}
    of_length: dict[tuple[int, ...], tuple[str, int, int]] = {}

    def rule(ids: list[int]) -> bool:
        nonlocal shorter, of_length
        if tuple(ids[:-1]) in of_length:  # the first row that is one longer
            shorter, of_length = of_length, {}
        text, start, end = shorter.get(tuple(ids[:-1]), ("", 0, 0))
        known, longer = decode(ids[start:end]), decode(ids[start:])
        whole = text + longer[len(known) :] if longer.startswith(known) else decode(ids)
        is_open = longer.endswith("\ufffd")
        of_length[tuple(ids)] = (text, start, end) if is_open else (whole, end, len(ids))
        return is_finished(whole)

    return rule


@dataclass(slots=True)
class SampledRow:
    """One completion.

    Attributes:
        ids: the sampled ids, up to the stop; never re-tokenised. An end-of-sequence id is kept.
        logps: for each id its log-probability under the distribution it was drawn from.
        stop_reason: FINISHED (end of sequence), STOP_RULE or LENGTH.
    """

    ids: list[int] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)
    stop_reason: StopReason = StopReason.LENGTH


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

    Tokens are drawn from softmax(w(z)), w being transformers' own processors in the order of
    ``generate``: repetition penalty, temperature, top-k, top-p, min-p; ``logps`` are of that very
    distribution, in nats. With temperature 1 and the filters off they are the model's own
    log-probabilities. All rows run in one batch: memory for the cache is B x (P + tokens), so pass
    many prompts in several calls. Where the model cannot share prompts (``sampling_reason``) the
    draws are the same and every token takes a forward of its whole row; the log says so once.

    Every row has its own random number at every step, drawn whether or not the row is still running:
    what a row says does not depend on when its neighbours stop.

    Args:
        model: causal language model; run in evaluation mode without gradient, then left as it was.
        prompt_token_lists: prompt ids; prompts may repeat and are forwarded once each.
        num_samples: samples for each entry of ``prompt_token_lists``.
        max_new_tokens: most tokens a row may have.
        temperature: 0 takes the most likely token (top-k, top-p and min-p are then off, and ``logps``
            are those of temperature 1).
        eos_token_ids: ids that end a row.
        pad_token_id: fills the left of shorter prompts; masked, so any valid id serves.
        top_p: keep the smallest set of tokens with this probability; 1 is off.
        top_k: keep this many tokens; 0 is off.
        min_p: drop tokens below this share of the most likely one; None is off.
        repetition_penalty: divides the logits of tokens already in prompt or completion; 1 is off.
        stop: asked after each token with the row's ids so far (a copy) whether the row ends. Not asked after an end of
            sequence.
        generator: source of randomness, on any device; None is torch's global one. With one for each row, what that
            row says does not depend on the rows beside it.
        row_limits: most tokens of each row, where some may have fewer than ``max_new_tokens``.
        goes_on: told after each token whether a row still runs, says whether to forward once more; asks the others
            where weights are spread over processes, whose forwards are collective calls.

    Raises:
        NonFiniteSamplingError: logits that are not finite numbers (CR0771).
    """
    index: dict[tuple[int, ...], int] = {}
    given = [tuple(ids) for ids in prompt_token_lists for _ in range(num_samples)]
    prompt_of_row = [index.setdefault(ids, len(index)) for ids in given]
    rows = [SampledRow() for _ in prompt_of_row]
    rule = _Rule(
        processors=_processors(temperature, top_p, top_k, min_p, repetition_penalty),
        is_greedy=temperature == 0,
        needs_context=repetition_penalty != 1.0,
        eos_token_ids=frozenset(eos_token_ids),
        stop=stop,
        generator=generator,
        row_limits=row_limits or [max_new_tokens] * len(prompt_of_row),
    )
    with torch.no_grad(), evaluation_mode(model):
        batch, logits_AV = start_batch(model, list(index), prompt_of_row, pad_token_id)
        running = list(range(len(rows)))
        for step in range(max_new_tokens):
            running = _extend(rows, batch, logits_AV, rule) if running else []
            if step == max_new_tokens - 1 or not goes_on(bool(running)):
                break
            batch.keep(running or [0])  # nobody runs here: one row is forwarded for the others' sake
            logits_AV = batch.next_logits([rows[number].ids[-1] for number in batch.row_numbers])
    return [rows[start : start + num_samples] for start in range(0, len(rows), num_samples)]


@dataclass(frozen=True)
class _Rule:
    """How a token is drawn and when a row ends."""

    processors: LogitsProcessorList
    is_greedy: bool
    needs_context: bool
    eos_token_ids: frozenset[int]
    stop: StopRule | None
    generator: torch.Generator | Sequence[torch.Generator] | None
    row_limits: Sequence[int]

    def uniforms(self, row_numbers: list[int], num_rows: int) -> torch.Tensor:
        """A number of each running row, in [0, 1)."""
        if isinstance(self.generator, Sequence):
            own = [self.generator[number] for number in row_numbers]
            return torch.stack([torch.rand((), generator=each, dtype=torch.float64).cpu() for each in own])
        device = None if self.generator is None else self.generator.device
        uniforms_B = torch.rand(num_rows, generator=self.generator, dtype=torch.float64, device=device)
        return uniforms_B[torch.tensor(row_numbers, device=device)]

    def draw(self, scores_AV: torch.Tensor, row_numbers: list[int], num_rows: int) -> torch.Tensor:
        """One token id for each running row."""
        if self.is_greedy:
            return scores_AV.argmax(-1)
        uniforms_A = self.uniforms(row_numbers, num_rows).to(scores_AV.device)
        # Inverse of the cumulative distribution; right=True passes over tokens of probability zero.
        cumulative_AV = scores_AV.double().softmax(-1).cumsum(-1)
        targets_A1 = (uniforms_A * cumulative_AV[:, -1])[:, None]
        drawn_A = torch.searchsorted(cumulative_AV, targets_A1, right=True)[:, 0]
        return drawn_A.clamp(max=scores_AV.size(-1) - 1)

    def ends(self, row: SampledRow) -> bool:
        """Ask the stopping rules about the row's newest token and note the answer in the row."""
        if row.ids[-1] in self.eos_token_ids:
            row.stop_reason = StopReason.FINISHED
            return True
        if self.stop is None or not self.stop(list(row.ids)):
            return False
        row.stop_reason = StopReason.STOP_RULE
        return True


def _extend(rows: list[SampledRow], batch: SamplingBatch, logits_AV: torch.Tensor, rule: _Rule) -> list[int]:
    """Draw one token for each running row; the places of the rows that go on."""
    scores_AV = logits_AV.float()
    if rule.needs_context:
        newest_ids = [rows[number].ids[-1:] for number in batch.row_numbers]
        newest_A1 = torch.tensor(newest_ids, dtype=torch.long, device=logits_AV.device)
        batch.context_AC = torch.cat([batch.context_AC, newest_A1], dim=1)
    scores_AV = rule.processors(cast("torch.LongTensor", batch.context_AC), scores_AV)
    drawn_A = rule.draw(scores_AV, batch.row_numbers, len(rows))
    logps_A = scores_AV.log_softmax(-1).gather(-1, drawn_A[:, None])[:, 0]
    running: list[int] = []
    logps = logps_A.tolist()
    if any(map(math.isnan, logps)):  # a drawn token may have probability 0 by rounding, but never no number
        raise NonFiniteSamplingError
    newest = zip(batch.row_numbers, drawn_A.tolist(), logps, strict=True)
    for place, (number, token, logp) in enumerate(newest):
        rows[number].ids.append(token)
        rows[number].logps.append(logp)
        if not rule.ends(rows[number]) and len(rows[number].ids) < rule.row_limits[number]:
            running.append(place)
    return running


def _processors(
    temperature: float, top_p: float, top_k: int, min_p: float | None, repetition_penalty: float
) -> LogitsProcessorList:
    """Build transformers' own processors, in the order of ``generate``."""
    processors: list[LogitsProcessor] = []
    if repetition_penalty != 1.0:
        processors.append(RepetitionPenaltyLogitsProcessor(float(repetition_penalty)))
    if temperature != 0:
        processors += [TemperatureLogitsWarper(float(temperature))] if temperature != 1.0 else []
        processors += [TopKLogitsWarper(top_k)] if top_k else []
        processors += [TopPLogitsWarper(top_p)] if top_p < 1.0 else []
        processors += [MinPLogitsWarper(min_p)] if min_p is not None else []
    return LogitsProcessorList(processors)


_TOLD: WeakSet[nn.Module] = WeakSet()


def start_batch(
    model: nn.Module,
    prompts: Sequence[tuple[int, ...]],
    prompt_of_row: Sequence[int],
    pad_token_id: int,
) -> tuple[SamplingBatch, torch.Tensor]:
    """A row for each entry of ``prompt_of_row``, and the first logits (B, V).

    A model that cannot share prompts exactly gets whole forwards, and the log says so once.
    """
    device = next(inner_model(model).parameters()).device
    index_B = torch.tensor(prompt_of_row, device=device)
    context_BC = _context(prompts, device)[index_B]
    reason = sampling_reason(model)
    row_numbers = list(range(len(prompt_of_row)))
    if reason is None:
        logits_KV, cache, mask_KP, lengths_K = _prefill(model, prompts, pad_token_id, device)
        cache.reorder_cache(cast("torch.LongTensor", index_B))
        batch = CachedBatch(model, row_numbers, cache, mask_KP[index_B], lengths_K[index_B], context_BC)
        return batch, logits_KV[index_B]
    if model not in _TOLD:
        _TOLD.add(model)
        logger.warning(
            "sampling for evaluation and episodes forwards each row whole for every token, which is slow: %s",
            reason,
        )
    plain = PlainBatch(model, row_numbers, [prompts[index] for index in prompt_of_row], context_BC)
    return plain, plain.logits()


@dataclass
class CachedBatch:
    """Rows whose past is in a cache; a step forwards one id of each."""

    model: nn.Module
    row_numbers: list[int]
    cache: DynamicCache
    mask_AC: torch.Tensor
    positions_A: torch.Tensor
    context_AC: torch.Tensor

    def keep(self, places: list[int]) -> None:
        if len(places) == len(self.row_numbers):
            return
        places_A = torch.tensor(places, device=self.mask_AC.device)
        self.row_numbers = [self.row_numbers[place] for place in places]
        self.cache.reorder_cache(cast("torch.LongTensor", places_A))
        self.mask_AC = self.mask_AC[places_A]
        self.positions_A = self.positions_A[places_A]
        self.context_AC = self.context_AC[places_A]

    def next_logits(self, newest_ids: Sequence[int]) -> torch.Tensor:
        newest_A1 = torch.tensor(newest_ids, device=self.mask_AC.device)[:, None]
        self.mask_AC = nn.functional.pad(self.mask_AC, (0, 1), value=1)
        mask = None if bool(self.mask_AC.all()) else self.mask_AC
        logits_A1V = _forward_with_cache(self.model, newest_A1, self.cache, self.positions_A[:, None], mask)
        self.positions_A = self.positions_A + 1
        return logits_A1V[:, -1]


@dataclass
class PlainBatch:
    """Rows of any causal language model; a step forwards each row by itself from its first id on, without a cache."""

    model: nn.Module
    row_numbers: list[int]
    ids: list[tuple[int, ...]]
    context_AC: torch.Tensor

    def keep(self, places: list[int]) -> None:
        self.row_numbers = [self.row_numbers[place] for place in places]
        self.ids = [self.ids[place] for place in places]
        self.context_AC = self.context_AC[torch.tensor(places, device=self.context_AC.device)]

    def next_logits(self, newest_ids: Sequence[int]) -> torch.Tensor:
        self.ids = [(*ids, newest) for ids, newest in zip(self.ids, newest_ids, strict=True)]
        return self.logits()

    def logits(self) -> torch.Tensor:
        found = {ids: self._forward(ids) for ids in dict.fromkeys(self.ids)}
        return torch.stack([found[ids] for ids in self.ids])

    def _forward(self, ids: tuple[int, ...]) -> torch.Tensor:
        more = {"use_cache": False, "logits_to_keep": 1}
        taken = {name: value for name, value in more.items() if accepts(self.model, name)}
        input_ids = torch.tensor([ids], device=self.context_AC.device)
        logits_1TV: torch.Tensor = self.model(input_ids=input_ids, **taken).logits
        return logits_1TV[0, -1]


SamplingBatch = CachedBatch | PlainBatch
"""The rows still running; row a of everything is sample ``row_numbers[a]``. ``context_AC`` are their ids so far, for the
repetition penalty; its left is filled by ids that the row has anyway."""


def _context(prompts: Sequence[tuple[int, ...]], device: torch.device) -> torch.Tensor:
    """The prompts' ids (K, P); padding repeats the first one, so that the padding id itself (often the end) is not penalised."""
    width = max(map(len, prompts))
    rows = [(ids[0],) * (width - len(ids)) + ids for ids in prompts]
    return torch.tensor(rows, device=device)


def _prefill(
    model: nn.Module, prompts: Sequence[tuple[int, ...]], pad_id: int, device: torch.device
) -> tuple[torch.Tensor, DynamicCache, torch.Tensor, torch.Tensor]:
    """Forward each prompt once; left-padded together when their lengths differ.

    Returns:
        The logits after the last prompt position (K, V), the filled cache (K rows), the mask (K, P)
        and the position that each prompt's next token has (K,).
    """
    width = max(map(len, prompts))
    ids_KP = torch.full((len(prompts), width), pad_id, dtype=torch.long, device=device)
    mask_KP = torch.zeros_like(ids_KP)
    for row, ids in enumerate(prompts):
        ids_KP[row, width - len(ids) :] = torch.tensor(ids, device=device)
        mask_KP[row, width - len(ids) :] = 1
    lengths_K = mask_KP.sum(-1)
    positions_KP = (mask_KP.cumsum(-1) - 1).clamp(min=0)
    cache = DynamicCache(config=inner_model(model).config)
    mask = None if bool(mask_KP.all()) else mask_KP
    logits_K1V = _forward_with_cache(model, ids_KP, cache, positions_KP, mask, logits_to_keep=1)
    if cache.get_seq_length() != width:  # each further token would be sampled without what stands before it
        raise InputError(
            "CR0757",
            f"{type(inner_model(model)).__name__} left the key-value cache at {cache.get_seq_length()} of {width} positions.",
            where="prefix sharing",
            fix="switch prefix sharing off for this model.",
        )
    return logits_K1V[:, -1], cache, mask_KP, lengths_K


def _forward_with_cache(
    model: nn.Module,
    ids_BT: torch.Tensor,
    cache: DynamicCache,
    positions_BT: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    logits_to_keep: int = 0,
) -> torch.Tensor:
    """Logits of the model's own forward (scaling and soft caps are its affair); ``cache`` grows by T."""
    arguments: dict[str, Any] = {"input_ids": ids_BT, "past_key_values": cache, "use_cache": True}
    if accepts(model, "position_ids"):
        arguments["position_ids"] = positions_BT
    if mask is not None:
        arguments["attention_mask"] = mask
    logits: torch.Tensor = model(**arguments, logits_to_keep=logits_to_keep).logits
    return logits
