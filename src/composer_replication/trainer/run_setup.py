"""From a recipe to what TRL wants: its arguments, its data set, its adapters; what a step costs, and what a person reads.

A step's cost is tried with one group, and is in proportion to its tokens.
"""

from __future__ import annotations

import difflib
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from datasets import Dataset
from transformers import PrinterCallback, TrainerCallback
from transformers.integrations.integration_utils import (
    get_available_reporting_integrations,
    get_reporting_integration_callbacks,
)
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.utils import add_fused_lm_head

from composer_replication.config import LoraSection, ModelSection, RunConfig
from composer_replication.errors import InputError, MissingError
from composer_replication.run_folder import RunFolder
from composer_replication.trainer.collator import num_positions
from composer_replication.trainer.episode_rollouts import EpisodeRollouts
from composer_replication.trainer.model_loading import load_model
from composer_replication.trainer.model_modes import inner_model, packing_reason
from composer_replication.trainer.packed_rows import shared_prefix_logps
from composer_replication.trainer.policy import ModelSampler, chat_prompt_ids
from composer_replication.trainer.preset_settings import refusals, refuse_bad_values, refused, resolve_method
from composer_replication.trainer.processes import process_rank

OWN_KEYS = frozenset(
    {"output_dir", "save_strategy", "save_steps", "seed", "remove_unused_columns", "model_init_kwargs"}
    | {"save_only_model", "ignore_data_skip", "resume_from_checkpoint"}  # a resumed run would be another one
    | {"push_to_hub", "log_completions_hub_repo"}  # a run sends nothing to a hub
)
"""Keys of ``GRPOConfig`` that a recipe may not set, as well as those that begin with hub_."""


def trl_arguments(config: RunConfig, folder: RunFolder) -> GRPOConfig:
    """TRL's ``GRPOConfig`` from ``[trl]`` over ``trainer.preset``, with what a run folder needs set by us.

    Defaults that differ from TRL's: one log row a step, no second progress bar, float32 arithmetic unless ``bf16`` is asked
    for, the CPU where there is no GPU, two checkpoints kept, and where vLLM samples importance weights cut by token at 2.0
    instead of dropping whole sequences.

    Raises:
        MissingError: a tracker that is not installed (CR0101).
        UsageError: an unknown key, a value that TRL refuses, or a key that we set (CR0211); a contradiction (CR0760).
    """
    known = {field.name for field in fields(GRPOConfig) if field.init}
    for key in config.trl:
        where = f"trl.{key}"
        if key in OWN_KEYS or key.startswith("hub_"):
            fix = "take the key out: seed, folder, checkpoints and model have keys of their own, and nothing goes to a hub."
            raise refused(f"{where} is set by the run itself", where=where, fix=fix)
        if key not in known:
            near = f"trl.{difflib.get_close_matches(key, known, n=1, cutoff=0.0)[0]}"
            words, fix = f"the nearest known key is {near}", f"write {near}, or take the key out."
            raise refused(f"unknown key {where}; {words}", where=where, fix=fix)
    refuse_bad_values(config.trl)
    method = resolve_method(config)
    given: dict[str, Any] = {"logging_steps": 1, "disable_tqdm": True, "bf16": False, "save_total_limit": 2}
    given["use_cpu"] = not torch.cuda.is_available()
    if config.agent is not None:  # all that follows the first prompt of an episode is its completion
        given["max_completion_length"] = config.agent.max_context_tokens
    if "vllm_importance_sampling_mode" not in method.trl:
        given["vllm_importance_sampling_mode"] = "token_truncate"
        given["vllm_importance_sampling_clip_max"] = 2.0
    given |= method.trl | {"report_to": _trackers(config.trl.get("report_to", "none"))}
    given |= {"output_dir": str(folder.checkpoints), "seed": config.seed, "remove_unused_columns": False}
    given |= {"save_strategy": "steps", "save_steps": config.trainer.checkpoint_every}
    with refusals():
        return GRPOConfig(**given)


def _trackers(named: str | Sequence[str]) -> list[str]:
    names = [name for name in ([named] if isinstance(named, str) else named) if name != "none"]
    where = "trl.report_to"
    with refusals(where):
        get_reporting_integration_callbacks(names)  # type: ignore[no-untyped-call]  # knows which there are
    installed: list[str] = get_available_reporting_integrations()  # type: ignore[no-untyped-call]
    if missing := [name for name in names if name not in installed]:
        words = f"{where} names {missing[0]}, which is not installed."
        fix = f"install {missing[0]} here, or take it out: metrics.jsonl has the same numbers."
        raise MissingError("CR0101", words, where=where, fix=fix)
    return names


def limit_cpu_threads(config: RunConfig) -> None:
    """Use ``trainer.cpu_threads`` threads for the model's arithmetic in this process."""
    if config.trainer.cpu_threads:
        torch.set_num_threads(config.trainer.cpu_threads)


def training_dataset(rows: Sequence[dict[str, Any]]) -> Dataset:
    """The rows (prompt, task_id) as the data set that TRL samples prompts from."""
    return Dataset.from_list(list(rows))


def lora_config(section: LoraSection | None) -> Any:
    """peft's configuration of the adapters, or None for full fine-tuning.
    No dropout: prefix sharing and the KL to the initial policy need the same network twice.
    """
    if section is None:
        return None
    from peft import LoraConfig

    where: dict[str, Any] = {"target_modules": section.target_modules, "task_type": "CAUSAL_LM"}
    return LoraConfig(r=section.rank, lora_alpha=section.lora_alpha, lora_dropout=0.0, **where)


def refuse_long_prompts(
    rows: Sequence[dict[str, Any]],
    model: Any,
    tokenizer: Any,
    *,
    max_new_tokens: int | None,
    engine_limit: int | None = None,
) -> None:
    """Stop before the first step when a prompt (with its template) and its answer exceed the model's positions (CR0705).
    ``engine_limit`` is what another engine holds, if one samples.
    """
    limit = min((most for most in (num_positions(model), engine_limit) if most is not None), default=None)
    for row in rows:
        prompt = row["prompt"]
        is_text = isinstance(prompt, str)
        ids = tokenizer(text=prompt)["input_ids"] if is_text else chat_prompt_ids(tokenizer, prompt)
        length = len(ids) + (max_new_tokens or 0)
        if limit is not None and length > limit:
            words = f"prompt and answer take {length} tokens; the model has {limit} positions."
            fix = "lower rollouts.context_lines or trl.max_completion_length, or leave the task out."
            raise InputError("CR0705", words, where=row["task_id"], fix=fix)


_FIGURES = {"reward": "reward", "held out": "killswitch/heldout_ema"}
_FIGURES |= {"gap": "killswitch/proxy_real_gap", "KL": "killswitch/kl_ema"}
_SECONDS_BETWEEN = 10.0


class ProgressLines(TrainerCallback):
    """Says on standard error where training stands, every ten seconds at most, and at its end.

    Time left, reward and held-out score, the guard's margins, groups without signal; within a step, how many of its episodes
    have ended. ``ceilings`` are what the guard halts above, by the key of its figure in a step's row.
    """

    def __init__(self, ceilings: Mapping[str, float]) -> None:
        self._ceilings = ceilings
        self._row: dict[str, Any] = {}
        self._said = self._began = 0.0
        self._first_step = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._began, self._first_step = time.monotonic(), state.global_step

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self._row |= logs or {}
        step, last = state.global_step, state.max_steps
        parts = [f"step {step} of {last}"]
        if num_steps := step - self._first_step:
            each = (time.monotonic() - self._began) / num_steps
            parts.append(f"left {timedelta(seconds=round(each * (last - step)))}, {each:.3g} s a step")
        for name, key in _FIGURES.items():
            if key in self._row:
                most = f" of {self._ceilings[key]:g}" if key in self._ceilings else ""
                parts.append(f"{name} {self._row[key]:.3f}{most}")
        if "frac_reward_zero_std" in self._row:
            parts.append(f"groups {self._row['frac_reward_zero_std']:.0%} without signal")
        self._say(", ".join(parts), is_last="train_runtime" in (logs or {}))

    def show_episodes(self, num_ended: int, num_all: int) -> None:
        self._say(f"{num_ended} of {num_all} episodes of the step have ended")

    def _say(self, text: str, *, is_last: bool = False) -> None:
        now = time.monotonic()
        if process_rank() == 0 and (is_last or now - self._said >= _SECONDS_BETWEEN):
            self._said = now
            with suppress(OSError):  # its reader has gone; the run goes on
                sys.stderr.write(f"train: {text}\n")
                sys.stderr.flush()


def show_own_progress(
    trainer: Any, *, quiet: bool, guard: Any = None, rollouts: EpisodeRollouts | None = None
) -> None:
    """Our lines on standard error in place of transformers' printed rows; episodes are counted in them as they end."""
    held = getattr(guard, "heldout", guard)
    names = {"killswitch/proxy_real_gap": "max_proxy_real_gap", "killswitch/kl_ema": "kl_hard_stop"}
    lines = ProgressLines({key: getattr(held, name) for key, name in names.items() if hasattr(held, name)})
    trainer.remove_callback(PrinterCallback)
    if not quiet:
        trainer.add_callback(lines)
        if rollouts is not None:
            rollouts.player.on_ended = lines.show_episodes


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
    return "bfloat16" if torch.ops.mkldnn._is_mkldnn_bf16_supported() else "float32"  # noqa: SLF001 - no public name


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
