"""What one step of a model costs here: measured on a few tokens, then scaled to the recipe's sizes.

Letters: G completions of one prompt, K prompts a step, P prompt tokens, C completion tokens,
V vocabulary, R = K x G rows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from composer_replication.trainer.prefix_generation import sample_shared
from composer_replication.trainer.prefix_sharing import shared_prefix_logps
from composer_replication.trainer.prefix_support import inner_model, unsupported_reason

__all__ = ["ModelCosts", "StepSize", "measure_costs"]

_FEW_TOKENS, _SOME_TOKENS = 2, 10
_MOST_PROBED_TOKENS = 64
_FLOAT32 = 4
_GRADIENT_AND_ADAM = 3 * _FLOAT32  # one gradient and two moments a trained number


@dataclass(frozen=True, slots=True)
class StepSize:
    """The sizes of one optimiser's step: K, G, P and C."""

    num_prompts: int
    group_size: int
    prompt_tokens: int
    completion_tokens: int
    is_shared: bool = True

    @property
    def num_rows(self) -> int:
        return self.num_prompts * self.group_size

    @property
    def group_tokens(self) -> int:
        """Tokens that one group forwards: P + G C where prompts are shared, else G (P + C)."""
        copies = 1 if self.is_shared else self.group_size
        return copies * self.prompt_tokens + self.group_size * self.completion_tokens


@dataclass(frozen=True, slots=True)
class ModelCosts:
    """What was measured, and the sizes at which it was.

    Attributes:
        probed: the sizes of the probe; one group was trained on, ``num_rows`` rows were sampled.
        prefill_seconds: forward of the prompts before the first token.
        token_seconds: one more token for all ``probed.num_rows`` rows.
        backward_seconds: forward and backward of one group.
        forward_seconds: forward alone of one group (the KL to the initial policy).
        saved_bytes: what autograd kept of one group between forward and backward.
        weight_bytes: all weights, adapters included.
        trained_numbers: weights that the optimiser moves.
        cache_token_bytes: keys and values of one token of one row.
        vocabulary: V.
    """

    probed: StepSize
    prefill_seconds: float
    token_seconds: float
    backward_seconds: float
    forward_seconds: float
    saved_bytes: int
    weight_bytes: int
    trained_numbers: int
    cache_token_bytes: int
    vocabulary: int

    def memory_bytes(self, size: StepSize) -> int:
        """Memory of weights, optimiser and one step, in bytes; the interpreter's own is not in it.

        W + 12 A + max(R (P + C) c, K (S s + 8 G C V)), with W weight bytes, A trained numbers (a
        float32 gradient and Adam's two moments each), c cache bytes a token, S the bytes that
        autograd saved for the probed group, s the larger of its ratios of tokens and of completion
        tokens to the probe's, and 8 G C V the logits' gradient and softmax in float32. Sampling
        and training follow each other, so the larger counts. K groups are in one micro-batch.
        """
        rows_bytes = size.num_rows * (size.prompt_tokens + size.completion_tokens) * self.cache_token_bytes
        logits_bytes = 2 * _FLOAT32 * size.group_size * size.completion_tokens * self.vocabulary
        group_bytes = self.saved_bytes * self._ratio(size) + logits_bytes
        fixed = self.weight_bytes + _GRADIENT_AND_ADAM * self.trained_numbers
        return round(fixed + max(rows_bytes, size.num_prompts * group_bytes))

    def sampling_seconds(self, size: StepSize) -> float:
        """(prefill + C x token) x R / R_probe: rows cost in proportion, which a GPU undercuts."""
        whole = self.prefill_seconds + size.completion_tokens * self.token_seconds
        return whole * size.num_rows / self.probed.num_rows

    def training_seconds(self, size: StepSize) -> float:
        """K x (forward and backward, and the forward of the KL) x tokens of a group / tokens of the probe's."""
        group = self.backward_seconds + self.forward_seconds
        return size.num_prompts * group * size.group_tokens / self.probed.group_tokens

    def _ratio(self, size: StepSize) -> float:
        completions = size.group_size * size.completion_tokens
        probed = self.probed.group_size * self.probed.completion_tokens
        return max(size.group_tokens / self.probed.group_tokens, completions / probed)


def measure_costs(
    model: Any, tokenizer: Any, prompts: Sequence[Sequence[int]], *, group_size: int, completion_tokens: int
) -> ModelCosts:
    """Sample a few tokens and train on one group, without changing a weight.

    Sampling is timed at 2 and at 10 tokens: the difference is the cost of a token, the rest that
    of the prompts. Training is timed as forward and backward of one group with at most 64
    completion tokens, the shorter of two tries. What autograd keeps is counted by
    ``torch.autograd.graph.saved_tensors_hooks``, each storage once, weights left out.

    Args:
        model: with its adapters, on the device that trains.
        tokenizer: the model's.
        prompts: token ids of the prompts of one step; the last is the one trained on.
        group_size: G.
        completion_tokens: C of the recipe.
    """
    shared = unsupported_reason(model) is None
    probed_tokens = min(completion_tokens, _MOST_PROBED_TOKENS)
    size = StepSize(len(prompts), group_size, len(prompts[-1]), probed_tokens, shared)
    few, some = _sampling_seconds(model, tokenizer, prompts, group_size, shared=shared)
    token_seconds = max(0.0, some - few) / (_SOME_TOKENS - _FEW_TOKENS)
    logps = _group_logps(model, prompts[-1], size)
    weights = list(model.parameters())
    saved_bytes = _saved_bytes(logps, {weight.untyped_storage().data_ptr() for weight in weights})
    model.zero_grad(set_to_none=True)

    def step() -> None:
        torch.autograd.backward(logps().sum())

    backward_seconds = min(_seconds(step, model) for _ in range(2))
    model.zero_grad(set_to_none=True)
    with torch.no_grad():
        forward_seconds = _seconds(logps, model)
    return ModelCosts(
        probed=size,
        prefill_seconds=max(0.0, few - _FEW_TOKENS * token_seconds),
        token_seconds=token_seconds,
        backward_seconds=backward_seconds,
        forward_seconds=forward_seconds,
        saved_bytes=saved_bytes,
        weight_bytes=sum(weight.numel() * weight.element_size() for weight in weights),
        trained_numbers=sum(weight.numel() for weight in weights if weight.requires_grad),
        cache_token_bytes=_cache_token_bytes(model),
        vocabulary=int(inner_model(model).get_input_embeddings().weight.shape[0]),
    )


def _sampling_seconds(
    model: Any, tokenizer: Any, prompts: Sequence[Sequence[int]], group_size: int, *, shared: bool
) -> tuple[float, float]:
    """Seconds of a short and of a longer sampling, after one that warms up."""

    def draw(num_tokens: int) -> None:
        generator = torch.Generator(device=model.device).manual_seed(0)
        if shared:
            sample_shared(
                model,
                prompts,
                group_size,
                max_new_tokens=num_tokens,
                temperature=1.0,
                eos_token_ids=(),
                pad_token_id=tokenizer.pad_token_id,
                generator=generator,
            )
            return
        rows = [list(prompt) for prompt in prompts for _ in range(group_size)]
        padded = tokenizer.pad({"input_ids": rows}, return_tensors="pt").to(model.device)
        with torch.no_grad():
            model.generate(**padded, max_new_tokens=num_tokens, min_new_tokens=num_tokens, do_sample=True)

    draw(1)
    few, some = (_seconds(lambda n=n: draw(n), model) for n in (_FEW_TOKENS, _SOME_TOKENS))  # type: ignore[misc]  # n is bound on purpose
    return few, some


def _group_logps(model: Any, prompt: Sequence[int], size: StepSize) -> Callable[[], torch.Tensor]:
    """The log-probabilities of one group of random completions, as the trainer computes them."""
    generator = torch.Generator().manual_seed(0)
    vocabulary = int(inner_model(model).get_input_embeddings().weight.shape[0])
    shape = (size.group_size, size.completion_tokens)
    completions_GC = torch.randint(vocabulary, shape, generator=generator).to(model.device)
    prompts_GP = torch.tensor([list(prompt)] * size.group_size, device=model.device)

    def shared() -> torch.Tensor:
        ones = torch.ones_like
        logps, _ = shared_prefix_logps(
            model, prompts_GP, ones(prompts_GP), completions_GC, ones(completions_GC), temperature=1.0
        )
        return logps

    def plain() -> torch.Tensor:
        ids = torch.cat([prompts_GP, completions_GC], dim=1)
        logits = model(input_ids=ids).logits[:, len(prompt) - 1 : -1].float()
        return torch.log_softmax(logits, dim=-1).gather(-1, completions_GC.unsqueeze(-1))

    return shared if size.is_shared else plain


def _saved_bytes(compute: Callable[[], torch.Tensor], left_out: set[int]) -> int:
    """Bytes that autograd keeps after ``compute``, each storage once."""
    seen: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in left_out:
            seen[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        result = compute()
        total = sum(seen.values())
    del result
    return total


def _cache_token_bytes(model: Any) -> int:
    """2 x layers x key-value heads x head size x bytes of a number; 0 without attention, whose state does not grow."""
    config = inner_model(model).config.get_text_config()
    heads = getattr(config, "num_attention_heads", None)
    if not heads:
        return 0
    head_size = getattr(config, "head_dim", None) or config.hidden_size // heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    return int(2 * config.num_hidden_layers * kv_heads * head_size * model.dtype.itemsize)


def _seconds(work: Callable[[], Any], model: Any) -> float:
    def wait() -> None:
        if model.device.type == "cuda":
            torch.cuda.synchronize(model.device)

    wait()
    started = time.perf_counter()
    work()
    wait()
    return time.perf_counter() - started
