"""The model being trained as it samples in this process: groups of completions, every distinct prompt forwarded once.

One left-padded forward fills the key-value cache for all distinct prompts; its rows are then copied to the samples, and
decoding goes on token by token. A finished row leaves the batch at once. A model that cannot share prompts exactly is sampled
by whole forwards.

Letters: B samples (all prompts), A samples still running, P prompt columns, V vocabulary.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.generation import logits_process

from composer_replication.errors import InputError
from composer_replication.model_endpoint import Endpoint
from composer_replication.records import Completion, StopReason
from composer_replication.rollouts.episodes import policies
from composer_replication.rollouts.episodes.policies import SampleOptions
from composer_replication.rollouts.tokens.token_ledger import unwilling_template
from composer_replication.trainer.model_modes import accepts, evaluation_mode, inner_model, sampling_reason
from composer_replication.trainer.preset_settings import NO_FILTERS, filters_of

logger = logging.getLogger(__name__)
NUM_PROMPTS_AT_ONCE = 8


def _not_finite(where: str) -> InputError:
    words = f"the weights of the model gave numbers that are not finite while sampling ({where})."
    fix = "lower trl.learning_rate or trl.weight_decay and begin a new run; to go on from the newest checkpoint "
    fix += "whose weights are finite, name its folder in model.name."
    return InputError("CR0770", words, where=where, fix=fix)


@contextmanager
def sampling_for_step(step: int) -> Iterator[None]:
    """Inside, what our sampler or torch's ``multinomial`` says of numbers that are not finite names the step, from 1."""
    try:
        yield
    except (InputError, RuntimeError) as error:
        if getattr(error, "code", "") == "CR0770" or "probability tensor contains" in str(error):
            raise _not_finite(f"step {step}") from error
        raise


@dataclass(slots=True)
class SampledRow:
    """One completion: the sampled ids up to the stop, an end-of-sequence id included, and why it stopped."""

    ids: list[int] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)  # of each id, under the distribution it was drawn from
    stop_reason: StopReason = StopReason.LENGTH


Generators = torch.Generator | Sequence[torch.Generator] | None


class ModelSampler:
    """Continues token ids by a causal language model in this process, in evaluation mode and without gradient.

    Called it is a ``SampleBatch``: what a row says depends on its prompt and seed, and but for the last bits of arithmetic on
    nothing else of its batch. ``sampling`` are TRL's arguments, for the filters ``top_p``, ``top_k``, ``min_p`` and
    ``repetition_penalty``; None has none. ``tokenizer`` writes the text of an answer, for people, hints and ``is_finished``; its
    ids stay as they were sampled. ``eos_token_ids`` end a row.
    """

    def __init__(self, model: Any, sampling: Any, tokenizer: Any, *, eos_token_ids: Sequence[int]) -> None:
        self.model, self.tokenizer, self.eos_token_ids = model, tokenizer, tuple(eos_token_ids)
        self.filters = filters_of(sampling)
        # a distribution that filters reshape is not the model's own
        self.has_logps = self.filters == NO_FILTERS

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
        penalty, temperature, top-k, top-p, min-p; ``logps`` are of that very distribution, in nats. Temperature 0 takes the most
        likely token; top-k, top-p and min-p are then off, and ``logps`` those of temperature 1. Logits that are not finite are
        refused (CR0770). All rows run in one batch, whose cache takes B x (P + tokens).

        ``is_finished`` is asked of the text so far after each token but an end of sequence; the row ends where it is.
        ``generator``: None is torch's global one. Every row has its own random number at every step, running or not, so what it
        says does not depend on when its neighbours stop; with a generator for each row it depends on none of them.
        ``row_limits`` are the most tokens of each row. ``goes_on`` is told after each token whether a row still runs, and says
        whether to forward once more, as others need where weights are spread over processes.
        """
        so_far = [list(ids) for ids in prompts for _ in range(num_samples)]  # of the rows still running
        rows = [SampledRow() for _ in so_far]
        limits, numbers, is_running = row_limits or [max_new_tokens] * len(rows), list(range(len(rows))), True
        with torch.no_grad(), evaluation_mode(self.model):
            next_logits = _NextLogits(self.model, self.tokenizer.pad_token_id)
            logits_AV = next_logits(so_far)
            for step in range(max_new_tokens):
                drawn: list[tuple[int, float]] = []
                if is_running:
                    uniforms_A = None if temperature == 0 else _uniforms(generator, numbers, len(rows))
                    drawn = self._draw(logits_AV, so_far, uniforms_A, temperature)
                running = []
                for place, (token, logp) in enumerate(drawn):
                    number = numbers[place]
                    row = rows[number]
                    row.ids.append(token)
                    row.logps.append(logp)
                    so_far[place].append(token)
                    if token in self.eos_token_ids:
                        row.stop_reason = StopReason.FINISHED
                    elif is_finished is not None and is_finished(self._text(row.ids)):
                        row.stop_reason = StopReason.STOP_RULE
                    elif len(row.ids) < limits[number]:
                        running.append(place)
                is_running = bool(running)
                if step == max_new_tokens - 1 or not goes_on(is_running):
                    break
                places = running or [0]  # where nobody runs here, one row is forwarded for the others' sake
                numbers, so_far = [numbers[place] for place in places], [so_far[place] for place in places]
                logits_AV = next_logits(so_far, places)
        return [rows[start : start + num_samples] for start in range(0, len(rows), num_samples)]

    def _draw(
        self, logits_AV: Tensor, rows: list[list[int]], uniforms_A: Tensor | None, temperature: float
    ) -> list[tuple[int, float]]:
        """Token id and log-probability of each row, by its random number in [0, 1), or without any the most likely.

        With temperature 0 the penalty alone changes scores.
        """
        top_p, top_k, min_p, penalty = self.filters.values()
        context: list[list[int]] = [[]]
        if penalty != 1.0:
            # It alone reads them. Padding repeats a row's first id, so that the padding id itself (often the end) is not penalised.
            width = max(map(len, rows))
            context = [[ids[0]] * (width - len(ids)) + ids for ids in rows]
        draws = temperature != 0
        steps: list[tuple[bool, Any, Any]] = [
            (penalty != 1.0, logits_process.RepetitionPenaltyLogitsProcessor, float(penalty)),
            (temperature not in (0, 1), logits_process.TemperatureLogitsWarper, float(temperature)),
            (draws and top_k > 0, logits_process.TopKLogitsWarper, top_k),
            (draws and top_p < 1.0, logits_process.TopPLogitsWarper, top_p),
            (draws and min_p is not None, logits_process.MinPLogitsWarper, min_p),
        ]
        processors = logits_process.LogitsProcessorList(make(value) for is_on, make, value in steps if is_on)
        ids_AC: Any = torch.tensor(context, dtype=torch.long, device=logits_AV.device)
        scores_AV = processors(ids_AC, logits_AV.float())
        if uniforms_A is None:
            drawn_A = scores_AV.argmax(-1)
        else:
            # Inverse of the cumulative distribution; right=True passes over tokens of probability zero.
            cumulative_AV = scores_AV.double().softmax(-1).cumsum(-1)
            targets_A1 = (uniforms_A.to(scores_AV.device) * cumulative_AV[:, -1])[:, None]
            drawn_A = torch.searchsorted(cumulative_AV, targets_A1, right=True)[:, 0]
            drawn_A = drawn_A.clamp(max=scores_AV.size(-1) - 1)
        logps = scores_AV.log_softmax(-1).gather(-1, drawn_A[:, None])[:, 0].tolist()
        if any(map(math.isnan, logps)):  # a probability may be 0 by rounding, but is always a number
            raise _not_finite("sampling")
        return list(zip(drawn_A.tolist(), logps, strict=True))


def _uniforms(generator: Generators, numbers: list[int], num_rows: int) -> Tensor:
    """Random numbers in [0, 1) of the rows of these numbers (A,); with one generator every row's is drawn."""
    if isinstance(generator, Sequence):
        own = [torch.rand((), generator=generator[number], dtype=torch.float64).cpu() for number in numbers]
        return torch.stack(own)
    device = None if generator is None else generator.device
    return torch.rand(num_rows, generator=generator, dtype=torch.float64, device=device)[numbers]


class _NextLogits:
    """Called with the ids of the running rows: the logits (A, V) behind them, by the model's own forward.

    What a cache has is not forwarded again, and each distinct prompt once. A model that cannot share prompts exactly has no
    cache: each row is forwarded whole, and the log says so once.
    """

    def __init__(self, model: nn.Module, pad_id: int) -> None:
        self.model, self.pad_id, self.num_columns, self.num_rows = model, pad_id, 0, 0
        inner, reason = inner_model(model), sampling_reason(model)
        self.device = next(inner.parameters()).device
        self.cache = DynamicCache(config=inner.config) if reason is None else None
        if reason is not None:
            words = f"sampling for evaluation and episodes forwards each row whole for every token, which is slow: {reason}"
            logger.warning_once(words)  # type: ignore[attr-defined]  # transformers adds it to every logger

    def __call__(self, rows: list[list[int]], places: Sequence[int] = ()) -> Tensor:
        """``places`` says of each row where it stood in the call before; it has one more id since."""
        if self.cache is None:
            more: dict[str, Any] = {"use_cache": False, "logits_to_keep": 1}
            more = {name: value for name, value in more.items() if accepts(self.model, name)}
            inputs = [torch.tensor([ids], device=self.device) for ids in rows]
            return torch.stack([self.model(input_ids=ids, **more).logits[0, -1] for ids in inputs])
        if self.num_columns == 0:
            prompts = {ids: number for number, ids in enumerate(dict.fromkeys(map(tuple, rows)))}
            logits_KV = self._cached_logits(self.cache, list(prompts), max(map(len, prompts)))
            if self.cache.get_seq_length() != self.num_columns:  # its next tokens would not see the prompt
                words = f"{type(inner_model(self.model)).__name__} does not fill the key-value cache that it takes."
                fix = "take a model of transformers whose forward uses its cache."
                raise InputError("CR0757", words, where="model.name", fix=fix)
            return logits_KV[self._reorder(self.cache, [prompts[tuple(ids)] for ids in rows])]
        if len(places) < self.num_rows:
            self._reorder(self.cache, places)
        return self._cached_logits(self.cache, rows, 1)

    def _reorder(self, cache: DynamicCache, places: Sequence[int]) -> Any:
        places_A: Any = torch.tensor(places, device=self.device)
        cache.reorder_cache(places_A)
        self.num_rows = len(places)
        return places_A

    def _cached_logits(self, cache: DynamicCache, rows: Sequence[Sequence[int]], num_new: int) -> Tensor:
        """The cache grows by ``num_new`` columns, the newest of each row; it is padded on the left."""
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
        output: Any = self.model(**arguments, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return cast("Tensor", output.logits[:, -1])


def end_token_ids(model: Any, tokenizer: Any) -> list[int]:
    """What ends an answer, as TRL has it in training: the tokenizer's end token and those of the model's generation settings."""
    ends = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    more = [ends] if isinstance(ends, int) else list(ends or ())
    return [each for each in dict.fromkeys([tokenizer.eos_token_id, *more]) if each is not None]


def take_end_of_template(model: Any, tokenizer: Any) -> None:
    """Let the token with which the chat template closes an answer end one in the model's generation settings, too.

    TRL, this module and whoever loads the saved model read them. A template that takes no such conversation, or that closes
    an answer with plain text, names none.
    """
    said, text = "stand-in", ""
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": said}]
    with suppress(Exception):  # a template is foreign code; where a prompt meets its trouble, that is told
        text = tokenizer.apply_chat_template(messages, tokenize=False)
    behind = tokenizer(text.rpartition(said)[2].lstrip(), add_special_tokens=False)["input_ids"]
    ends = end_token_ids(model, tokenizer)
    if behind and behind[0] in tokenizer.added_tokens_decoder and behind[0] not in ends:
        model.generation_config.eos_token_id = [*ends, behind[0]]


def chat_prompt_ids(tokenizer: Any, messages: Sequence[Any], **options: Any) -> list[int]:
    """The messages through the chat template, with the prompt for an answer; ``options`` go to the template, too."""
    try:
        form = {"add_generation_prompt": True, "tokenize": True, "return_dict": False}
        return list(tokenizer.apply_chat_template(messages, **form, **options))
    except Exception as error:  # a template is foreign code and may raise anything
        raise unwilling_template(error) from error


class InProcessPolicy(ModelSampler):
    """Samples with one prefill a prompt, prompts tokenised as TRL does it; ``as_chat`` through the chat template.

    Draws come from a generator of its own, so that an evaluation in the middle of training leaves the training's random
    numbers where they were. Without ``sampling`` the model's own distribution is drawn from.
    """

    # told (prompts answered, prompts in all), chunk by chunk
    on_prompts: Callable[[int, int], None] | None = None

    def __init__(self, model: Any, tokenizer: Any, *, as_chat: bool = False, sampling: Any = None) -> None:
        super().__init__(model, sampling, tokenizer, eos_token_ids=end_token_ids(model, tokenizer))
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


def server_endpoint(args: Any) -> Endpoint:
    """The server that TRL's arguments name."""
    url = args.vllm_server_base_url or f"http://{args.vllm_server_host}:{args.vllm_server_port}"
    return policies.open_server(url)


def load_weights(trainer: Any) -> None:
    """Let vLLM have the trainer's weights of this step, as TRL does before it generates; nothing where it has them."""
    step = trainer.state.global_step
    if trainer._last_loaded_step == step:  # noqa: SLF001 - TRL's only name
        return
    is_served = trainer.args.vllm_mode == "server"
    if is_served:
        policies.find_server(server_endpoint(trainer.args))  # TRL would try for a minute
    try:
        trainer.vllm_generation.sync_weights()
    except Exception as error:  # what TRL's client raises, of which some is a bare Exception
        if is_served and (isinstance(error, OSError) or type(error) is Exception):
            words = f"it did not take the weights of step {step} ({str(error)[:200]})"
            raise policies.server_gone(words) from error
        raise
    trainer._last_loaded_step = step  # noqa: SLF001 - TRL's only name
