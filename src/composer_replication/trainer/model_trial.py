"""What one step of a model costs here: one group is tried, and a step costs in proportion to its tokens."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from trl.trainer.utils import add_fused_lm_head

from composer_replication.config import ModelSection, RunConfig
from composer_replication.errors import MissingError
from composer_replication.trainer.model_loading import load_model
from composer_replication.trainer.model_modes import inner_model, packing_reason
from composer_replication.trainer.packed_rows import shared_prefix_logps
from composer_replication.trainer.policy import ModelSampler
from composer_replication.trainer.run_setup import lora_config

T = TypeVar("T")
_ADAM = 2 * 4  # two moments in float32 for each number that is trained
_MOST_TRIED_TOKENS, _MOST_TRIED_PROMPT = 64, 2048


def cpu_threads() -> int:
    """For ``trainer.cpu_threads``: 1 where a processor with few cores trains, since threads that wait burn what grading needs."""
    return 1 if not torch.cuda.is_available() and len(os.sched_getaffinity(0)) <= 4 else 0


def device_and_free_bytes(available_bytes: int | None) -> tuple[str, int | None]:
    """What a person calls the device that would train, and what a run could use there before a model is loaded.

    On the processor that counts what this process holds: a run holds the same libraries.
    """
    if torch.cuda.is_available():
        return torch.cuda.get_device_name(), int(torch.cuda.mem_get_info()[0])
    return "the processor", None if available_bytes is None else available_bytes + resident_bytes()


def fast_dtype() -> Literal["float32", "bfloat16"]:
    """What this machine multiplies fast; without instructions for bfloat16 a processor multiplies it number by number."""
    if torch.cuda.is_available():
        return "bfloat16" if torch.cuda.is_bf16_supported() else "float32"
    return "bfloat16" if torch.ops.mkldnn._is_mkldnn_bf16_supported() else "float32"


def loading_note(section: ModelSection) -> str:
    """What is loaded, and whether its numbers are slow here."""
    is_slow = section.dtype == "bfloat16" and fast_dtype() == "float32"
    more = "; this machine has no instructions for bfloat16: --set model.dtype=float32 is far faster"
    return f"model: loading {section.name}{more if is_slow else ''}"


def load_for_trial(config: RunConfig) -> tuple[Any, Any, int]:
    """Model of ``fast_dtype`` with fresh adapters where it would train, its tokenizer, and the number of its own weights."""
    from peft import get_peft_model

    if threads := cpu_threads():
        torch.set_num_threads(threads)
    as_chat = config.rollouts.prompt_style == "chat"
    section = config.model.model_copy(update={"dtype": fast_dtype()})
    model, tokenizer = load_model(section, seed=config.seed, needs_chat_template=as_chat)
    num_parameters = sum(weight.numel() for weight in model.parameters())
    with within_memory(config.model.name):
        model = model.to("cuda" if torch.cuda.is_available() else "cpu")
        return get_peft_model(model, lora_config(config.model.lora)).eval(), tokenizer, num_parameters


@contextmanager
def within_memory(name: str) -> Iterator[None]:
    """Inside, graphics memory that runs out is an error that a user can read."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        words = "the graphics memory does not hold this model and a step of training."
        fix = "take a smaller model or a larger GPU, or stop what else uses this one."
        raise MissingError("CR0232", words, where=f"model.name = {name}", fix=fix) from error


class StepCost(NamedTuple):
    """What a step takes.

    ``seconds`` are those of sampling by our own sampler, forward and backward, and the forward of the KL to the initial policy;
    ``memory_bytes`` what is held anyway (weights; on the processor the libraries too), Adam's moments, and the step.
    ``is_shared``: prompts are forwarded once for their group.
    """

    seconds: float
    memory_bytes: int
    is_shared: bool


def measure_step(
    model: Any,
    tokenizer: Any,
    prompt: Sequence[int],
    *,
    num_prompts: int,
    group_size: int,
    completion_tokens: int,
) -> StepCost:
    """Sample one group of short answers and train on it, without changing a weight; a step is in proportion to its tokens.

    Not a whole step, nor a very long prompt or answer: what does not fit into the memory of a processor ends the process.
    A first try of two tokens a row has what happens once only.
    """
    is_shared, of_prompt = packing_reason(model) is None, list(prompt[:_MOST_TRIED_PROMPT])
    add_fused_lm_head(inner_model(model))
    sampler = ModelSampler(model, None, tokenizer, eos_token_ids=())
    for num_tried in (2, min(completion_tokens, _MOST_TRIED_TOKENS)):
        held = torch.cuda.memory_allocated() if model.device.type == "cuda" else resident_bytes()
        options: dict[str, Any] = {"max_new_tokens": num_tried, "temperature": 1.0}
        options["generator"] = torch.Generator(device=model.device).manual_seed(0)
        sample = partial(sampler.sample, [of_prompt], group_size, **options)
        [sampled], sampling_seconds, sampling_bytes = _taken(model, sample)
        answers = [row.ids for row in sampled]
        train = partial(_train, model, [of_prompt] * group_size, answers, packs=is_shared)
        _, training_seconds, training_bytes = _taken(model, train)
    above = max(0, sampling_bytes - held, training_bytes - held)
    num_forwarded = 1 if is_shared else group_size
    tried = num_forwarded * len(of_prompt) + group_size * num_tried
    whole = num_forwarded * len(prompt) + group_size * completion_tokens
    num_trained = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
    seconds = sampling_seconds * completion_tokens / num_tried + training_seconds * whole / tried
    memory = held + _ADAM * num_trained + num_prompts * above * whole / tried
    return StepCost(num_prompts * seconds, round(memory), is_shared)


def _train(model: Any, prompts: list[list[int]], completions: list[list[int]], *, packs: bool) -> None:
    """A forward without gradient, and forward and backward, of a group as the trainer computes them."""
    ids = [torch.tensor(rows, device=model.device) for rows in (prompts, completions)]
    parts = ids[0], torch.ones_like(ids[0]), ids[1], torch.ones_like(ids[1])
    with torch.no_grad():
        shared_prefix_logps(model, *parts, packs=packs)
    logps_GC, _ = shared_prefix_logps(model, *parts, packs=packs)
    torch.autograd.backward(logps_GC.sum())
    model.zero_grad(set_to_none=True)


def resident_bytes() -> int:
    """Memory of this process that is in use now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def _taken(model: Any, work: Callable[[], T]) -> tuple[T, float, int]:
    """What ``work`` gives, its seconds, and the peak of bytes: allocated on the model's GPU, or resident of this process."""
    is_gpu = model.device.type == "cuda"
    if is_gpu:
        torch.cuda.reset_peak_memory_stats()
    else:
        with suppress(OSError):  # where that is not allowed, the peak is that of loading, at worst
            Path("/proc/self/clear_refs").write_text("5")  # begins the peak of resident memory anew
    started = time.perf_counter()
    result = work()
    if is_gpu:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - started
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return result, seconds, torch.cuda.max_memory_allocated() if is_gpu else resident
