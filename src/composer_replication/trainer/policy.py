"""The model being trained as it samples in this process, for evaluation, episodes and TRL."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch

from composer_replication.errors import ComposerError
from composer_replication.model_endpoint import Endpoint
from composer_replication.records import Completion
from composer_replication.rollouts.episodes import policies
from composer_replication.rollouts.tokens.token_ledger import unwilling_template
from composer_replication.trainer.prefix_generation import ModelSampler

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
