"""What one step of a model costs here: one group is tried, and a step costs in proportion to its tokens."""

from __future__ import annotations

import contextlib
import os
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from trl.trainer.utils import add_fused_lm_head

from composer_replication.config import ModelSection, RunConfig
from composer_replication.errors import MissingError
from composer_replication.trainer.model_loading import load_model
from composer_replication.trainer.packed_rows import shared_prefix_logps
from composer_replication.trainer.prefix_generation import sample_shared
from composer_replication.trainer.prefix_support import inner_model, packing_reason
from composer_replication.trainer.run_setup import lora_config

_FEW_CORES = 4
_MOST_TRIED_TOKENS = 64
_ADAM = 2 * 4  # two moments in float32 for each number that is trained
_RESET_PEAK = "5"  # what Linux takes in /proc/self/clear_refs for the peak of resident memory


@dataclass(frozen=True, slots=True)
class TrainingDevice:
    """Where a run would train, and what is free there before a model is loaded.

    Attributes:
        name: what a person calls it.
        is_gpu: as ``trl_arguments`` chooses: a GPU where there is one.
        free_bytes: what a run could use, or None when unknown; on the processor with what this
            process holds already, since a run would hold the same libraries.
        cpu_threads: for ``trainer.cpu_threads``: 1 on up to four cores, since threads that wait
            for each other burn the time that grading needs; otherwise 0, torch's own choice.
    """

    name: str
    is_gpu: bool
    free_bytes: int | None
    cpu_threads: int


def training_device(available_bytes: int | None) -> TrainingDevice:
    """The device of a run; ``available_bytes`` is the machine's free memory, if known."""
    if torch.cuda.is_available():
        return TrainingDevice(torch.cuda.get_device_name(), True, int(torch.cuda.mem_get_info()[0]), 0)
    free = None if available_bytes is None else available_bytes + resident_bytes()
    few_cores = len(os.sched_getaffinity(0)) <= _FEW_CORES
    return TrainingDevice("the processor", False, free, 1 if few_cores else 0)


def fast_dtype() -> Literal["float32", "bfloat16"]:
    """What this machine multiplies fast; without instructions for bfloat16 a processor multiplies it number by number."""
    if torch.cuda.is_available():
        return "bfloat16" if torch.cuda.is_bf16_supported() else "float32"
    return "bfloat16" if torch.ops.mkldnn._is_mkldnn_bf16_supported() else "float32"  # noqa: SLF001 - no public name


def loading_note(section: ModelSection) -> str:
    """What is loaded, and whether its numbers are slow here."""
    is_slow = section.dtype == "bfloat16" and fast_dtype() == "float32"
    more = "; this machine has no instructions for bfloat16: --set model.dtype=float32 is far faster"
    return f"model: loading {section.name}{more if is_slow else ''}"


def load_for_trial(config: RunConfig, device: TrainingDevice) -> tuple[Any, Any, int]:
    """Model of ``fast_dtype`` with fresh adapters on ``device``, its tokenizer, and the number of its own weights.

    Raises:
        ComposerError: as ``load_model``.
        MissingError: it does not fit (CR0232).
    """
    from peft import get_peft_model

    if device.cpu_threads:
        torch.set_num_threads(device.cpu_threads)
    as_chat = config.rollouts.prompt_style == "chat"
    section = config.model.model_copy(update={"dtype": fast_dtype()})
    model, tokenizer = load_model(section, seed=config.seed, needs_chat_template=as_chat)
    num_parameters = sum(weight.numel() for weight in model.parameters())
    with within_memory(config.model.name):
        moved = model.to("cuda") if device.is_gpu else model
        return get_peft_model(moved, lora_config(config.model.lora)).eval(), tokenizer, num_parameters


@contextmanager
def within_memory(name: str) -> Iterator[None]:
    """Inside, graphics memory that runs out is an error that a user can read."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise MissingError(
            "CR0232",
            "the graphics memory does not hold this model and a step of training.",
            where=f"model.name = {name}",
            fix="take a smaller model or a larger GPU, or stop what else uses this one.",
        ) from error


@dataclass(frozen=True, slots=True)
class StepCost:
    """What a step takes.

    Attributes:
        seconds: sampling by our own sampler, forward and backward, and the forward of the KL to the initial policy.
        memory_bytes: what is held anyway (weights; on the processor the libraries too), Adam's moments, and the step.
        is_shared: prompts are forwarded once for their group.
    """

    seconds: float
    memory_bytes: int
    is_shared: bool


def measure_step(
    model: Any,
    tokenizer: Any,
    prompt: Sequence[int],
    *,
    longest: int,
    num_prompts: int,
    group_size: int,
    completion_tokens: int,
) -> StepCost:
    """Sample one group and train on one, without changing a weight; the rest is in proportion.

    Sampling goes by completion tokens, training and memory by all tokens that training forwards. It is done twice, first with
    two tokens, so that what happens once only is not measured.

    Args:
        model: with its adapters, on the device that trains.
        tokenizer: the model's.
        prompt: token ids of a prompt of usual length.
        longest: tokens of the longest prompt, which decides the memory.
        num_prompts: of a step.
        group_size: completions of a prompt.
        completion_tokens: of the recipe; 64 of them are tried at most.
    """
    is_shared = packing_reason(model) is None
    add_fused_lm_head(inner_model(model))

    def forwarded(of_prompt: int, of_completion: int) -> int:
        return (1 if is_shared else group_size) * of_prompt + group_size * of_completion

    for num_tried in (2, min(completion_tokens, _MOST_TRIED_TOKENS)):
        held = _memory_bytes(model)
        _forget_peak(model)
        sample = partial(
            sample_shared,
            model,
            [prompt],
            group_size,
            max_new_tokens=num_tried,
            temperature=1.0,
            eos_token_ids=(),
            pad_token_id=tokenizer.pad_token_id,
            generator=torch.Generator(device=model.device).manual_seed(0),
        )
        sampling = _seconds(sample, model)
        num_words = int(inner_model(model).get_input_embeddings().weight.shape[0])
        ids = torch.arange(group_size * num_tried, device=model.device) % num_words
        completions_GC = ids.view(group_size, num_tried)
        training = _seconds(partial(_train, model, prompt, completions_GC, is_shared=is_shared), model)
        above = max(0, _memory_bytes(model, at_peak=True) - held)
        model.zero_grad(set_to_none=True)
    tried = forwarded(len(prompt), num_tried)
    trained = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
    of_sampling = sampling * completion_tokens / num_tried
    of_training = training * forwarded(len(prompt), completion_tokens) / tried
    of_memory = above * forwarded(longest, completion_tokens) / tried
    return StepCost(
        seconds=num_prompts * (of_sampling + of_training),
        memory_bytes=round(held + _ADAM * trained + num_prompts * of_memory),
        is_shared=is_shared,
    )


def _train(model: Any, prompt: Sequence[int], completions_GC: torch.Tensor, *, is_shared: bool) -> None:
    """Forward and backward of a group, as the trainer computes them, and a forward without gradient."""
    prompts_GP = torch.tensor([list(prompt)] * len(completions_GC), device=model.device)

    def logps() -> torch.Tensor:
        if is_shared:
            masks = torch.ones_like(prompts_GP), torch.ones_like(completions_GC)
            return shared_prefix_logps(model, prompts_GP, masks[0], completions_GC, masks[1])[0]
        ids = torch.cat([prompts_GP, completions_GC], dim=1)
        logps: torch.Tensor = model(input_ids=ids, labels=ids, fused_lm_head=True).log_probs
        return logps

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
    wait: Callable[[], Any] = torch.cuda.synchronize if model.device.type == "cuda" else (lambda: None)
    wait()
    started = time.perf_counter()
    work()
    wait()
    return time.perf_counter() - started
