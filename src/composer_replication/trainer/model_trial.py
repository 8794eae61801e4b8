"""What one step of a model costs here: one group is tried, and a step costs in proportion to its rows and tokens.

Letters: G completions of one prompt, K prompts a step, P prompt tokens, C completion tokens.
"""

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
    """Inside, graphics memory that runs out is an error that a user can read.

    Raises:
        MissingError: CR0232.
    """
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
        sampling_seconds: its completions, prompts included, by our own sampler.
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
    is_shared = packing_reason(model) is None
    if is_shared:
        add_fused_lm_head(inner_model(model))
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
            return shared_prefix_logps(model, prompts_GP, masks[0], completions_GC, masks[1])[0]
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
