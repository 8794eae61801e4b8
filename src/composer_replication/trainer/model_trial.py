"""A model made ready for a short try on the device that would train it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch

from composer_replication.config import ModelSection, RunConfig
from composer_replication.errors import MissingError
from composer_replication.trainer.cost_probe import resident_bytes
from composer_replication.trainer.model_loading import load_model
from composer_replication.trainer.run_setup import lora_config

_FEW_CORES = 4


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
