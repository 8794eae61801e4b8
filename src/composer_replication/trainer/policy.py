"""The model being trained as it samples in this process: groups of completions, every distinct prompt forwarded once.

One left-padded forward fills the key-value cache for all distinct prompts; the cache rows
are then copied to the samples and decoding goes on token by token. A finished row leaves
the batch and the cache at once, so the cost of a step follows the rows still running.
A model that cannot share prompts exactly is sampled by whole forwards.

Letters: B samples (all prompts), A samples still running, P prompt columns, V vocabulary.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
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

from composer_replication.errors import ComposerError, InputError
from composer_replication.model_endpoint import Endpoint
from composer_replication.records import Completion, StopReason
from composer_replication.rollouts.episodes import policies
from composer_replication.rollouts.episodes.policies import SampleOptions
from composer_replication.rollouts.tokens.token_ledger import unwilling_template
from composer_replication.trainer.model_modes import evaluation_mode
from composer_replication.trainer.prefix_support import accepts, inner_model, sampling_reason

logger = logging.getLogger(__name__)

_TORCH_SAYS = "probability tensor contains"  # multinomial on a processor; on a GPU it ends the process's CUDA


def _not_finite(where: str) -> InputError:
    """The weights give logits that are not finite numbers."""
    return InputError(
        "CR0770",
        f"the weights of the model gave numbers that are not finite while sampling ({where}).",
        where=where,
        fix="lower trl.learning_rate or trl.weight_decay and begin a new run; to go on from the newest checkpoint "
        "whose weights are finite, name its folder in model.name.",
    )


@contextmanager
def sampling_for_step(step: int) -> Iterator[None]:
    """Inside, what our sampler or torch says of such numbers is an error that names the step of the training, from 1."""
    try:
        yield
    except (InputError, RuntimeError) as error:
        if getattr(error, "code", "") == "CR0770" or _TORCH_SAYS in str(error):
            raise _not_finite(f"step {step}") from error
        raise


@dataclass(slots=True)
class SampledRow:
    """One completion: the sampled ids up to the stop, an end-of-sequence id included, and why it stopped.

    ``logps`` has for each id its log-probability under the distribution it was drawn from.
    """

    ids: list[int] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)
    stop_reason: StopReason = StopReason.LENGTH


class GrowingText:
    """The text of a row, asked for after each of its ids; only what is new is decoded.

    The newest ids are decoded behind those before, since a token may write nothing until the next one completes its character.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._written = ""  # for good, of all ids before the end
        self._start = self._end = 0  # of the ids that were the last to be decoded for it

    def of(self, ids: Sequence[int]) -> str:
        known, longer = self._decode(ids[self._start : self._end]), self._decode(ids[self._start :])
        text = self._written + longer[len(known) :] if longer.startswith(known) else self._decode(ids)
        if not longer.endswith("\ufffd"):
            self._written, self._start, self._end = text, self._end, len(ids)
        return text


Generators = torch.Generator | Sequence[torch.Generator] | None
_NO_FILTERS = {"top_p": 1.0, "top_k": 0, "min_p": None, "repetition_penalty": 1.0}


def filters_of(sampling: Any) -> dict[str, Any]:
    """The filters of TRL's arguments, all four; None has none."""
    given = _NO_FILTERS if sampling is None else {name: getattr(sampling, name) for name in _NO_FILTERS}
    return {**given, "top_k": given["top_k"] or 0}


class ModelSampler:
    """Continues token ids by a causal language model in this process.

    Called it is a ``SampleBatch``, each of its rows by a generator of its own: what a row says depends on its prompt and seed,
    and but for the last bits of arithmetic on nothing else of its batch.

    Args:
        model: run in evaluation mode without gradient, then left as it was.
        sampling: TRL's arguments, for the filters ``top_p``, ``top_k``, ``min_p`` and ``repetition_penalty``; None: none.
        tokenizer: writes the text of an answer, for people, hints and ``is_finished``; its ids stay as they were sampled.
        eos_token_ids: ids that end a row.
    """

    def __init__(self, model: Any, sampling: Any, tokenizer: Any, *, eos_token_ids: Sequence[int]) -> None:
        self.model, self.tokenizer, self.eos_token_ids = model, tokenizer, tuple(eos_token_ids)
        self.filters = filters_of(sampling)
        self.has_logps = self.filters == _NO_FILTERS
        """Those of a distribution that filters reshape are not the model's own."""

    def __call__(self, prompts: list[tuple[int, ...]], options: list[SampleOptions]) -> Sequence[Completion]:
        (temperature,) = {each.temperature for each in options}
        rows = self.sample(
            prompts,
            max_new_tokens=max(each.max_new_tokens for each in options),
            temperature=temperature,
            generator=[torch.Generator().manual_seed(each.seed) for each in options],
            row_limits=[each.max_new_tokens for each in options],
        )
        return [self._completion(row) for (row,) in rows]

    def _completion(self, row: SampledRow) -> Completion:
        logps = tuple(row.logps) if self.has_logps else ()
        return Completion(tuple(row.ids), self._text(row.ids), row.stop_reason, logps)

    def _text(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))

    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        num_samples: int = 1,
        *,
        max_new_tokens: int,
        temperature: float,
        is_finished: Callable[[str], bool] | None = None,
        generator: Generators = None,
        row_limits: Sequence[int] | None = None,
        goes_on: Callable[[bool], bool] = bool,
    ) -> list[list[SampledRow]]:
        """Draw ``num_samples`` completions for each prompt; ``result[i][j]`` is sample j of prompt i.

        Tokens are drawn from softmax(w(z)), w being transformers' own processors in the order of ``generate``: repetition
        penalty, temperature, top-k, top-p, min-p; ``logps`` are of that very distribution, in nats. All rows run in one
        batch: memory for the cache is B x (P + tokens), so pass many prompts in several calls. Where the model cannot share
        prompts (``sampling_reason``) the draws are the same and every token takes a forward of its whole row; the log says so
        once. Every row has its own random number at every step, drawn whether or not the row is still running: what a row says
        does not depend on when its neighbours stop. Logits that are not finite are refused (CR0770).

        Args:
            prompts: token ids; equal ones are forwarded once.
            num_samples: of each prompt.
            max_new_tokens: most tokens a row may have.
            temperature: 0 takes the most likely token; top-k, top-p and min-p are then off, and ``logps`` those of temperature 1.
            is_finished: of the text so far, asked after each token but an end of sequence; the row ends where it is.
            generator: source of randomness, on any device; None is torch's global one. With one for each row, what that
                row says does not depend on the rows beside it.
            row_limits: most tokens of each row, where some may have fewer.
            goes_on: told after each token whether a row still runs, says whether to forward once more; asks the others
                where weights are spread over processes, whose forwards are collective calls.
        """
        given = [tuple(ids) for ids in prompts for _ in range(num_samples)]
        rows, texts = [SampledRow() for _ in given], [GrowingText(self._text) for _ in given]
        limits, processors = row_limits or [max_new_tokens] * len(rows), self._processors(temperature)
        with torch.no_grad(), evaluation_mode(self.model):
            batch = _Batch(self.model, given, self.tokenizer.pad_token_id)
            logits_AV = batch.first_logits()
            running = list(range(len(rows)))
            for step in range(max_new_tokens):
                is_greedy = temperature == 0
                drawn = batch.draw(logits_AV, processors, generator, is_greedy=is_greedy) if running else []
                running = []
                for place, (number, token, logp) in enumerate(drawn):
                    row = rows[number]
                    row.ids.append(token)
                    row.logps.append(logp)
                    if token in self.eos_token_ids:
                        row.stop_reason = StopReason.FINISHED
                    elif is_finished is not None and is_finished(texts[number].of(row.ids)):
                        row.stop_reason = StopReason.STOP_RULE
                    elif len(row.ids) < limits[number]:
                        running.append(place)
                if step == max_new_tokens - 1 or not goes_on(bool(running)):
                    break
                batch.keep(running or [0])  # nobody runs here: one row is forwarded for the others' sake
                logits_AV = batch.next_logits([rows[number].ids[-1] for number in batch.row_numbers])
        return [rows[start : start + num_samples] for start in range(0, len(rows), num_samples)]

    def _processors(self, temperature: float) -> LogitsProcessorList:
        """transformers' own, in the order of ``generate``; of a filter, or with temperature 0, only what is on."""
        top_p, top_k, min_p, penalty = (self.filters[name] for name in _NO_FILTERS)
        found: list[LogitsProcessor] = []
        if penalty != 1.0:
            found.append(RepetitionPenaltyLogitsProcessor(float(penalty)))
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
    num_columns = 0
    """Of the cache, whose rows are padded on the left."""

    def __init__(self, model: nn.Module, rows: Sequence[tuple[int, ...]], pad_id: int) -> None:
        self.model, self.num_rows, self.ids = model, len(rows), [list(row) for row in rows]
        self.row_numbers, self.pad_id = list(range(self.num_rows)), pad_id
        self.device = next(inner_model(model).parameters()).device

    def first_logits(self) -> torch.Tensor:
        """Logits after the prompts (A, V), each distinct one forwarded once."""
        reason = sampling_reason(self.model)
        if reason is not None:
            if self.model not in _TOLD:
                _TOLD.add(self.model)
                slow = "sampling for evaluation and episodes forwards each row whole for every token, which is slow"
                logger.warning("%s: %s", slow, reason)
            return self._whole_logits()
        rows = [tuple(ids) for ids in self.ids]
        prompts = {ids: number for number, ids in enumerate(dict.fromkeys(rows))}
        self.cache = DynamicCache(config=inner_model(self.model).config)
        logits_KV = self._cached_logits(self.cache, list(prompts), max(map(len, prompts)))
        num_cached = self.cache.get_seq_length()
        if num_cached != self.num_columns:  # further tokens would be sampled without what stands before
            name = type(inner_model(self.model)).__name__
            words = f"{name} left the key-value cache at {num_cached} of {self.num_columns} positions."
            fix = "switch prefix sharing off for this model."
            raise InputError("CR0757", words, where="prefix sharing", fix=fix)
        index_A = torch.tensor([prompts[ids] for ids in rows], device=self.device)
        self.cache.reorder_cache(cast("torch.LongTensor", index_A))
        return logits_KV[index_A]

    def keep(self, places: list[int]) -> None:
        if len(places) == len(self.row_numbers):
            return
        self.row_numbers = [self.row_numbers[place] for place in places]
        self.ids = [self.ids[place] for place in places]
        if self.cache is not None:
            places_A = torch.tensor(places, device=self.device)
            self.cache.reorder_cache(cast("torch.LongTensor", places_A))

    def next_logits(self, newest_ids: Sequence[int]) -> torch.Tensor:
        """Logits (A, V) after one more id of each row."""
        for ids, newest in zip(self.ids, newest_ids, strict=True):
            ids.append(newest)
        return self._whole_logits() if self.cache is None else self._cached_logits(self.cache, self.ids, 1)

    def draw(
        self,
        logits_AV: torch.Tensor,
        processors: LogitsProcessorList,
        generator: Generators,
        *,
        is_greedy: bool,
    ) -> list[tuple[int, int, float]]:
        """Number, token id and log-probability of each running row, drawn by a random number of its own in [0, 1)."""
        context: list[list[int]] = [[]]
        if any(isinstance(each, RepetitionPenaltyLogitsProcessor) for each in processors):
            # It alone reads them. Padding repeats a row's first id, so that the padding id itself (often the end) is not penalised.
            width = max(map(len, self.ids))
            context = [[ids[0]] * (width - len(ids)) + ids for ids in self.ids]
        ids_AC = torch.tensor(context, dtype=torch.long, device=self.device)
        scores_AV = processors(cast("Any", ids_AC), logits_AV.float())
        if is_greedy:
            drawn_A = scores_AV.argmax(-1)
        else:
            if isinstance(generator, Sequence):
                own = [generator[number] for number in self.row_numbers]
                drawn = [torch.rand((), generator=each, dtype=torch.float64).cpu() for each in own]
                uniforms_A = torch.stack(drawn)
            else:
                device = None if generator is None else generator.device
                options: dict[str, Any] = {"generator": generator, "dtype": torch.float64, "device": device}
                uniforms_A = torch.rand(self.num_rows, **options)[
                    torch.tensor(self.row_numbers, device=device)
                ]
            # Inverse of the cumulative distribution; right=True passes over tokens of probability zero.
            cumulative_AV = scores_AV.double().softmax(-1).cumsum(-1)
            targets_A1 = (uniforms_A.to(scores_AV.device) * cumulative_AV[:, -1])[:, None]
            drawn_A = torch.searchsorted(cumulative_AV, targets_A1, right=True)[:, 0]
            drawn_A = drawn_A.clamp(max=scores_AV.size(-1) - 1)
        logps = scores_AV.log_softmax(-1).gather(-1, drawn_A[:, None])[:, 0].tolist()
        if any(map(math.isnan, logps)):  # a probability may be 0 by rounding, but is always a number
            raise _not_finite("sampling")
        return list(zip(self.row_numbers, drawn_A.tolist(), logps, strict=True))

    def _cached_logits(
        self, cache: DynamicCache, rows: Sequence[Sequence[int]], num_new: int
    ) -> torch.Tensor:
        """Logits after the last id, by the model's own forward (scaling and soft caps are its affair).

        The cache grows by ``num_new`` columns, the newest of each row.
        """
        self.num_columns += num_new
        columns_C = torch.arange(self.num_columns, device=self.device)
        lefts = [self.num_columns - len(ids) for ids in rows]
        left_B1 = torch.tensor(lefts, device=self.device)[:, None]
        newest = [[self.pad_id] * (num_new - len(ids)) + [*ids[-num_new:]] for ids in rows]
        arguments: dict[str, Any] = {"input_ids": torch.tensor(newest, device=self.device)}
        if accepts(self.model, "position_ids"):
            arguments["position_ids"] = (columns_C[-num_new:] - left_B1).clamp(min=0)
        if any(lefts):
            arguments["attention_mask"] = (columns_C >= left_B1).long()
        output = self.model(**arguments, past_key_values=cache, use_cache=True, logits_to_keep=1)
        logits_B1V: torch.Tensor = output.logits
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


NUM_PROMPTS_AT_ONCE = 8


def end_token_ids(model: Any, tokenizer: Any) -> list[int]:
    """What ends an answer, as TRL has it in training: the tokenizer's end token and those of the model's generation settings."""
    ends = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    more = [ends] if isinstance(ends, int) else list(ends or ())
    return [each for each in dict.fromkeys([tokenizer.eos_token_id, *more]) if each is not None]


def take_end_of_template(model: Any, tokenizer: Any) -> None:
    """Let the token with which the chat template closes an answer end one in the model's generation settings, too.

    All that samples reads them: TRL, this module, and whoever loads the saved model. A template that takes no such
    conversation, or that closes an answer with plain text, names none.
    """
    said = "stand-in"
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": said}]
    text = ""
    with suppress(Exception):  # a template is foreign code; where a prompt meets its trouble, that is told
        text = tokenizer.apply_chat_template(messages, tokenize=False)
    behind = tokenizer(text.rpartition(said)[2].lstrip(), add_special_tokens=False)["input_ids"]
    ends = end_token_ids(model, tokenizer)
    if behind and behind[0] in tokenizer.added_tokens_decoder and behind[0] not in ends:
        model.generation_config.eos_token_id = [*ends, behind[0]]


def chat_prompt_ids(tokenizer: Any, messages: Sequence[Any], **options: Any) -> list[int]:
    """The messages through the chat template, with the prompt for an answer; ``options`` go to the template, too."""
    try:
        ids = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=True, return_dict=False, **options
        )
    except Exception as error:  # a template is foreign code and may raise anything
        raise unwilling_template(error) from error
    return list(ids)


class InProcessPolicy(ModelSampler):
    """Samples with one prefill a prompt, prompts tokenised as TRL does it.

    Draws come from a generator of its own, so that an evaluation in the middle of training leaves the training's random
    numbers where they were. ``as_chat`` wraps each prompt as a user message through the chat template; without ``sampling`` the
    model's own distribution is drawn from.
    """

    on_prompts: Callable[[int, int], None] | None = None
    """Told (prompts answered, prompts in all) after each chunk of prompts."""

    def __init__(self, model: Any, tokenizer: Any, *, as_chat: bool = False, sampling: Any = None) -> None:
        super().__init__(model, sampling, tokenizer, eos_token_ids=())
        self.as_chat = as_chat

    def generate(
        self,
        prompts: Sequence[str],
        *,
        num_samples: int,
        max_new_tokens: int,
        temperature: float,
        seed: int,
        is_finished: Callable[[str], bool] | None = None,
    ) -> list[list[Completion]]:
        # a trainer may have changed them
        self.eos_token_ids = tuple(end_token_ids(self.model, self.tokenizer))
        generator = torch.Generator(device=self.model.device).manual_seed(seed)
        options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "temperature": temperature}
        options |= {"is_finished": is_finished, "generator": generator}
        answers: list[list[Completion]] = []
        for start in range(0, len(prompts), NUM_PROMPTS_AT_ONCE):
            chunk = [self.prompt_ids(prompt) for prompt in prompts[start : start + NUM_PROMPTS_AT_ONCE]]
            sampled = self.sample(chunk, num_samples, **options)
            answers += [[self._completion(row) for row in rows] for rows in sampled]
            if self.on_prompts is not None:
                self.on_prompts(len(answers), len(prompts))
        return answers

    def prompt_ids(self, prompt: str) -> list[int]:
        if not self.as_chat:
            return list(self.tokenizer(text=prompt)["input_ids"])
        return chat_prompt_ids(self.tokenizer, [{"role": "user", "content": prompt}])


# ---- weights of vLLM, which episode_rollouts asks --------------------------------------------------------


def server_endpoint(args: Any) -> Endpoint:
    """The server that TRL's arguments name."""
    url = args.vllm_server_base_url or f"http://{args.vllm_server_host}:{args.vllm_server_port}"
    return policies.open_server(url)


def load_weights(trainer: Any) -> None:
    """Let vLLM have the trainer's weights of this step, as TRL does before it generates; nothing where it has them."""
    step = trainer.state.global_step
    if trainer._last_loaded_step == step:  # noqa: SLF001  TRL's mark, which its own generation reads
        return
    is_served = trainer.args.vllm_mode == "server"
    if is_served:
        policies.find_server(server_endpoint(trainer.args))  # TRL would try for a minute
    try:
        trainer.vllm_generation.sync_weights()
    except ComposerError:
        raise
    except Exception as error:  # what TRL's client raises, of which some is a bare Exception
        if not is_served or not (isinstance(error, OSError) or type(error) is Exception):
            raise
        raise policies.server_gone(
            f"it did not take the weights of step {step} ({str(error)[:200]})"
        ) from error
    trainer._last_loaded_step = step  # noqa: SLF001
