"""What one step of a model costs here: one group is tried, and a step costs in proportion to its rows and tokens.

Letters: G completions of one prompt, K prompts a step, P prompt tokens, C completion tokens.
"""

from __future__ import annotations

import contextlib
import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from composer_replication.trainer.prefix_generation import sample_shared
from composer_replication.trainer.prefix_sharing import shared_prefix_logps
from composer_replication.trainer.prefix_support import inner_model, unsupported_reason

__all__ = ["StepCost", "StepSize", "measure_step"]

_MOST_TRIED_TOKENS = 64
_ADAM = 2 * 4  # two moments in float32 for each number that is trained
_RESET_PEAK = "5"  # what Linux takes in /proc/self/clear_refs for the peak of resident memory


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
    def num_tokens(self) -> int:
        """Tokens that training forwards: K (P + G C) where prompts are shared, else K G (P + C)."""
        copies = 1 if self.is_shared else self.group_size
        return self.num_prompts * (copies * self.prompt_tokens + self.group_size * self.completion_tokens)


@dataclass(frozen=True, slots=True)
class StepCost:
    """What one small step took.

    Attributes:
        tried: its sizes.
        sampling_seconds: its completions, prompts included.
        training_seconds: forward and backward of its group, and the forward of the KL to the initial policy.
        held_bytes: what was held before it (weights; on the processor the libraries too), and Adam's moments.
        step_bytes: how far it went above that at its peak.
    """

    tried: StepSize
    sampling_seconds: float
    training_seconds: float
    held_bytes: int
    step_bytes: int

    def memory_bytes(self, size: StepSize) -> int:
        """held + step x (tokens of the step / tokens of the try): all groups are in one micro-batch."""
        return round(self.held_bytes + self.step_bytes * size.num_tokens / self.tried.num_tokens)

    def sampling_seconds_of(self, size: StepSize) -> float:
        """In proportion to completion tokens of all rows, which a GPU undercuts."""
        asked, tried = (each.num_rows * each.completion_tokens for each in (size, self.tried))
        return self.sampling_seconds * asked / tried

    def training_seconds_of(self, size: StepSize) -> float:
        """In proportion to tokens."""
        return self.training_seconds * size.num_tokens / self.tried.num_tokens


def measure_step(
    model: Any, tokenizer: Any, prompt: Sequence[int], *, group_size: int, completion_tokens: int
) -> StepCost:
    """Sample one group and train on one, without changing a weight.

    It is done twice, first with two tokens, so that what happens once only is not measured.

    Args:
        model: with its adapters, on the device that trains.
        tokenizer: the model's.
        prompt: token ids of a prompt of usual length.
        group_size: G.
        completion_tokens: C of the recipe; 64 of them are tried at most.
    """
    is_shared = unsupported_reason(model) is None
    for num_tokens in (2, min(completion_tokens, _MOST_TRIED_TOKENS)):
        size = StepSize(1, group_size, len(prompt), num_tokens, is_shared)
        held = _memory_bytes(model)
        _forget_peak(model)
        sampling = _seconds(partial(_sample, model, tokenizer, prompt, size), model)
        training = _seconds(partial(_train, model, prompt, size), model)
        peak = _memory_bytes(model, at_peak=True)
        model.zero_grad(set_to_none=True)
    trained = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
    return StepCost(size, sampling, training, held + _ADAM * trained, max(0, peak - held))


def _sample(model: Any, tokenizer: Any, prompt: Sequence[int], size: StepSize) -> None:
    if size.is_shared:
        sample_shared(
            model,
            [prompt],
            size.group_size,
            max_new_tokens=size.completion_tokens,
            temperature=1.0,
            eos_token_ids=(),
            pad_token_id=tokenizer.pad_token_id,
            generator=torch.Generator(device=model.device).manual_seed(0),
        )
        return
    ids = torch.tensor([list(prompt)] * size.group_size, device=model.device)
    num_tokens = size.completion_tokens
    with torch.no_grad():
        model.generate(ids, max_new_tokens=num_tokens, min_new_tokens=num_tokens, do_sample=True)


def _train(model: Any, prompt: Sequence[int], size: StepSize) -> None:
    """Forward and backward of a group of random completions, as the trainer computes them, and a forward without gradient."""
    vocabulary = int(inner_model(model).get_input_embeddings().weight.shape[0])
    shape = (size.group_size, size.completion_tokens)
    completions_GC = torch.randint(vocabulary, shape, generator=torch.Generator().manual_seed(0))
    completions_GC = completions_GC.to(model.device)
    prompts_GP = torch.tensor([list(prompt)] * size.group_size, device=model.device)

    def logps() -> torch.Tensor:
        if size.is_shared:
            masks = torch.ones_like(prompts_GP), torch.ones_like(completions_GC)
            return shared_prefix_logps(
                model, prompts_GP, masks[0], completions_GC, masks[1], temperature=1.0
            )[0]
        ids = torch.cat([prompts_GP, completions_GC], dim=1)
        logits = model(input_ids=ids).logits[:, len(prompt) - 1 : -1].float()
        return torch.log_softmax(logits, dim=-1).gather(-1, completions_GC.unsqueeze(-1))

    with torch.no_grad():
        logps()
    torch.autograd.backward(logps().sum())


def _memory_bytes(model: Any, *, at_peak: bool = False) -> int:
    """What is allocated on the model's GPU; on the processor what is resident of this process."""
    if model.device.type == "cuda":
        read = torch.cuda.max_memory_allocated if at_peak else torch.cuda.memory_allocated
        return read(model.device)
    if at_peak:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return resident_bytes()


def resident_bytes() -> int:
    """Memory of this process that is in use now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def _forget_peak(model: Any) -> None:
    if model.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(model.device)
        return
    with contextlib.suppress(OSError):  # where that is not allowed, the peak is that of loading, at worst
        Path("/proc/self/clear_refs").write_text(_RESET_PEAK)


def _seconds(work: Callable[[], Any], model: Any) -> float:
    def wait() -> None:
        if model.device.type == "cuda":
            torch.cuda.synchronize(model.device)

    wait()
    started = time.perf_counter()
    work()
    wait()
    return time.perf_counter() - started
