"""The model being trained, as a ``Policy``: evaluation runs on the trainer's own weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch

from composer_replication.records import Completion
from composer_replication.rollouts.episodes.policies import SampleOptions
from composer_replication.rollouts.tokens.token_ledger import unwilling_template
from composer_replication.trainer.prefix_generation import SampledRow, sample_shared, text_rule

_NO_FILTERS = {"top_p": 1.0, "top_k": 0, "min_p": None, "repetition_penalty": 1.0}


def filters_of(sampling: Any) -> dict[str, Any]:
    """The filters of TRL's arguments, as ``sample_shared`` takes them; None has none."""
    given = _NO_FILTERS if sampling is None else {name: getattr(sampling, name) for name in _NO_FILTERS}
    return {**given, "top_k": given["top_k"] or 0}


def reshapes(sampling: Any) -> bool:
    """Whether filters reshape the distribution: its log-probabilities would not be the model's own."""
    return filters_of(sampling) != _NO_FILTERS


class ModelSampler:
    """Continues token ids by a causal language model in this process; each row by a generator of its own.

    What a row says depends on its prompt and seed, and but for the last bits of arithmetic on nothing else of its batch.
    ``sampling`` are TRL's arguments, for the filters (None: none); the tokenizer writes the text of an answer, for people and
    hints, and its ids stay as they were sampled.
    """

    def __init__(self, model: Any, sampling: Any, tokenizer: Any, *, eos_token_ids: Sequence[int]) -> None:
        self.model, self.sampling, self.tokenizer = model, sampling, tokenizer
        self.eos_token_ids = tuple(eos_token_ids)

    def __call__(self, prompts: list[tuple[int, ...]], options: list[SampleOptions]) -> Sequence[Completion]:
        (temperature,) = {each.temperature for each in options}
        rows = sample_shared(
            self.model,
            prompts,
            1,
            max_new_tokens=max(each.max_new_tokens for each in options),
            temperature=temperature,
            **filters_of(self.sampling),
            eos_token_ids=self.eos_token_ids,
            pad_token_id=self.tokenizer.pad_token_id,
            generator=[torch.Generator().manual_seed(each.seed) for each in options],
            row_limits=[each.max_new_tokens for each in options],
        )
        has_logps = not reshapes(self.sampling)
        return [_completion(self.tokenizer, row, has_logps=has_logps) for (row,) in rows]


def _completion(tokenizer: Any, row: SampledRow, *, has_logps: bool) -> Completion:
    text = str(tokenizer.decode(row.ids, skip_special_tokens=True))
    return Completion(tuple(row.ids), text, row.stop_reason, tuple(row.logps) if has_logps else ())


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


class InProcessPolicy:
    """Samples from a model in this process with one prefill a prompt, prompts tokenised as TRL does it.

    Draws come from a generator of its own, so that an evaluation in the middle of training leaves the training's random
    numbers where they were. ``as_chat`` wraps each prompt as a user message through the chat template; ``sampling`` are TRL's
    arguments, for the filters of training (None draws from the model's own distribution).
    """

    def __init__(self, model: Any, tokenizer: Any, *, as_chat: bool = False, sampling: Any = None) -> None:
        self.model, self.tokenizer, self.as_chat = model, tokenizer, as_chat
        self.filters = filters_of(sampling)
        self.on_prompts: Callable[[int, int], None] | None = None
        """Told (prompts answered, prompts in all) after each chunk of prompts."""

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
        ends = end_token_ids(self.model, self.tokenizer)
        answers: list[list[Completion]] = []
        for start in range(0, len(prompts), NUM_PROMPTS_AT_ONCE):
            chunk = [self.prompt_ids(prompt) for prompt in prompts[start : start + NUM_PROMPTS_AT_ONCE]]
            rows = sample_shared(
                self.model,
                chunk,
                num_samples,
                max_new_tokens=max_new_tokens,
                temperature=temperature,
                **self.filters,
                eos_token_ids=ends,
                pad_token_id=self.tokenizer.pad_token_id,
                stop=text_rule(self.tokenizer, is_finished),
                generator=generator,
            )
            answers += [
                [_completion(self.tokenizer, row, has_logps=False) for row in of_prompt] for of_prompt in rows
            ]
            if self.on_prompts is not None:
                self.on_prompts(len(answers), len(prompts))
        return answers

    def prompt_ids(self, prompt: str) -> list[int]:
        if not self.as_chat:
            return list(self.tokenizer(text=prompt)["input_ids"])
        return chat_prompt_ids(self.tokenizer, [{"role": "user", "content": prompt}])
