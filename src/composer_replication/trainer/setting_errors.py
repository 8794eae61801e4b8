"""What the trainer refuses of its settings, before a model loads or in the words of the library that does; their notices stay out."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from importlib import import_module
from traceback import walk_tb
from typing import Annotated, Any, Literal, get_type_hints

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from composer_replication.errors import ComposerError, UsageError

_ABOVE_0 = ["gradient_accumulation_steps", "max_completion_length", "num_iterations", "num_train_epochs"]
_ABOVE_0 += ["per_device_train_batch_size", "steps_per_generation", "temperature"]
_FROM_0 = ("beta", "entropy_coef", "epsilon", "epsilon_high", "max_grad_norm", "top_k")
_RANGES: dict[str, Any] = {**dict.fromkeys(_ABOVE_0, Field(gt=0)), **dict.fromkeys(_FROM_0, Field(ge=0))}
_RANGES |= {"top_p": Field(gt=0, le=1), "min_p": Field(ge=0, le=1)}
"""The libraries take others for these, and then divide by them, or train something else without a word."""
_KINDS: dict[str, Any] = {
    # TRL looks at these two in the first loss
    "importance_sampling_level": Literal["token", "sequence"],
    "loss_type": Literal["grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo", "vespo"],
    # with 0 transformers would count epochs, as with -1
    "max_steps": Annotated[int, Field(ge=1)] | Literal[-1],
    "scale_rewards": str | bool,  # TRL takes more than it declares
}


class TrainerSettingError(UsageError, ValueError):
    """A trainer argument that cannot work; a ``ValueError`` too, as Python code expects."""


def spread_weights(where: str) -> UsageError:
    """Episodes ask for answers at times of their own, and each forward of spread weights needs every process."""
    words = "the agent loop cannot sample weights that are spread over processes."
    fix = "sample by vLLM (trl.use_vllm), or launch with whole weights on each process (accelerate's MULTI_GPU)."
    return UsageError("CR0757", words, where=where, fix=fix)


def refuse_bad_values(table: Mapping[str, Any]) -> None:
    """Compare the value of each key of TRL's with the type that TRL declares, and with a range where TRL checks none."""
    from trl.trainer.grpo_config import GRPOConfig

    kinds = get_type_hints(GRPOConfig) | _KINDS
    settings = ConfigDict(strict=True, arbitrary_types_allowed=True, allow_inf_nan=False)
    for key, value in table.items():
        bounds = None if value is None else _RANGES.get(key)
        kind: Any = kinds[key] if bounds is None else Annotated[kinds[key], bounds]
        try:
            TypeAdapter(kind, config=settings).validate_python(value)
        except ValidationError as error:
            problem = error.errors(include_url=False)[0]["msg"].removeprefix("Input should be ")
            raise refused(f"trl.{key} is {value!r}: it must be {problem}", where=f"trl.{key}") from error


@contextmanager
def refusals(where: str = "[trl]") -> Iterator[None]:
    """Inside, what TRL, transformers or peft raise about settings is an error of the recipe, whose tables ``where`` names."""
    try:
        yield
    except ComposerError:
        raise
    except Exception as error:
        modules = (str(frame.f_globals.get("__name__")) for frame, _ in walk_tb(error.__traceback__))
        if any(name.partition(".")[0] == "vllm" for name in modules):  # a function of its was running
            cause = (str(error).strip() or type(error).__name__).splitlines()[0]
            fix = "composer-rl doctor says whether it fits and what GPU is free; trl.vllm_gpu_memory_utilization is its share."
            raise refused(f"vLLM did not start: {cause[:300]}", where="trl.use_vllm", fix=fix) from error
        if not isinstance(error, (ArithmeticError, ImportError, TypeError, ValueError)):
            raise
        raise refused(f"the training libraries refuse {where}: {error}", where=where) from error


def refused(sentence: str, *, where: str, fix: str = "") -> UsageError:
    """The error for a table, or a key of it, that TRL or we refuse."""
    key = where if where.startswith("trl.") else "trl.KEY"
    fix = fix or f"correct it in the recipe, or type --set {key}=VALUE."
    return UsageError("CR0211", f"{sentence.strip().rstrip('.')[:400]}.", where=where, fix=fix)


def contradiction(sentence: str, *, where: str, fix: str) -> TrainerSettingError:
    """The error for keys of which each is fine, and that do not go together."""
    return TrainerSettingError("CR0760", f"{sentence}.", where=where, fix=fix)


def nothing_to_learn(weight: Literal["alpha_sdpo", "beta_replay"]) -> TrainerSettingError:
    """The error for a loss channel whose weight is not 0, and that has no hint source, or no pair that weighs something."""
    sources = {"alpha_sdpo": "hint_source", "beta_replay": "replay_pairs, or replay.sibling_pairs = true"}
    words = f"{weight} is not 0, but there is nothing to learn from."
    fix = f"give it {sources[weight]}, or set {weight} to 0."
    return TrainerSettingError("CR0755", words, where=f"trainer.{weight}", fix=fix)


def refuse_masked_stops(arguments: Any, *, stops_rows: bool) -> None:
    """A rule that ends single rows leaves them without an end-of-sequence token, so all would be masked."""
    if stops_rows and arguments.mask_truncated_completions:
        words = "mask_truncated_completions takes the rows that is_finished (the end of the function) stopped for truncated ones"
        fix = "set trl.mask_truncated_completions = false, or trainer.prefix_sharing = false."
        where = "trl.mask_truncated_completions, trainer.prefix_sharing"
        raise contradiction(words, where=where, fix=fix)


def refuse_few_prompts(arguments: Any, num_generations: int, num_prompts: int) -> None:
    """A data set that does not fill one generation trains not one step."""
    per_generation = arguments.generation_batch_size // num_generations
    if num_prompts < per_generation:
        words = f"one generation takes {per_generation} prompts, but there are only {num_prompts}: not one step could be trained"
        where = "trl.per_device_train_batch_size, trl.steps_per_generation, trl.num_generations"
        fix = "lower the batch size or steps_per_generation, raise num_generations, or add tasks."
        raise contradiction(words, where=where, fix=fix)


def refuse_split_groups(arguments: Any, num_generations: int, *, num_processes: int) -> None:
    """Dynamic sampling replaces groups, each within one process."""
    num_rows = arguments.per_device_train_batch_size * arguments.steps_per_generation
    if num_processes > 1 and num_rows % num_generations:
        words = "dynamic sampling needs whole groups on each process, and "
        words += f"{num_rows} rows are not a multiple of {num_generations} generations"
        fix = "make their product with steps_per_generation a multiple of num_generations."
        where = "trl.per_device_train_batch_size, trl.num_generations"
        raise contradiction(words, where=where, fix=fix)


@contextmanager
def calm_libraries(*, quiet: bool = False) -> Iterator[None]:
    """Inside, only errors of the libraries are shown; their bars stay off afterwards.

    Warnings stay when the user asked for them (``-W`` or ``PYTHONWARNINGS``). The bar of a
    download stays unless ``quiet``: it can take minutes. With ``quiet`` our own notices below errors are off too.
    """
    # Sandboxes are started from this process, and tokenizers prints a page about each fork.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    with warnings.catch_warnings(), ExitStack() as afterwards:
        if not sys.warnoptions:
            for category in (FutureWarning, DeprecationWarning, PendingDeprecationWarning, UserWarning):
                warnings.simplefilter("ignore", category)
        import torch  # noqa: F401  # first: the others print a notice where it is missing
        from datasets.utils import disable_progress_bars

        transformers: Any = import_module("transformers.utils.logging")  # untyped, as the next one
        hub: Any = import_module("huggingface_hub.utils")
        libraries = ("transformers", "trl", "accelerate", "peft", "datasets", "huggingface_hub", "torch")
        for name in (*libraries, *(["composer_replication"] if quiet else [])):
            afterwards.callback(logging.getLogger(name).setLevel, logging.getLogger(name).level)
            logging.getLogger(name).setLevel(logging.ERROR)
        has_hub_bars = not hub.are_progress_bars_disabled()
        disable_progress_bars()
        transformers.disable_progress_bar()  # of the hub, too
        if has_hub_bars and not quiet:
            hub.enable_progress_bars()
        yield
