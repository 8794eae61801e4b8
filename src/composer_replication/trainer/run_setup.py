"""From a recipe to what TRL wants: its arguments, its data set, its adapters; what a person reads, and what this machine has."""

from __future__ import annotations

import difflib
import os
import resource
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields
from datetime import timedelta
from typing import Any, Literal

import torch
from datasets import Dataset
from transformers import PrinterCallback, TrainerCallback
from transformers.integrations.integration_utils import (
    get_available_reporting_integrations,
    get_reporting_integration_callbacks,
)
from trl.trainer.grpo_config import GRPOConfig

from composer_replication.config import LoraSection, RunConfig
from composer_replication.errors import InputError, MissingError
from composer_replication.run_folder import RunFolder
from composer_replication.trainer.collator import num_positions
from composer_replication.trainer.episode_rollouts import EpisodeRollouts
from composer_replication.trainer.policy import chat_prompt_ids
from composer_replication.trainer.preset_settings import (
    ResolvedMethod,
    refusals,
    refuse_bad_values,
    refused,
    resolve_method,
)
from composer_replication.trainer.processes import process_rank

OWN_KEYS = frozenset(
    {"output_dir", "save_strategy", "save_steps", "seed", "remove_unused_columns", "model_init_kwargs"}
    | {"save_only_model", "ignore_data_skip", "resume_from_checkpoint"}  # a resumed run would be another one
    | {"push_to_hub", "log_completions_hub_repo"}  # a run sends nothing to a hub
)
"""Keys of ``GRPOConfig`` that a recipe may not set, as well as those that begin with hub_."""


def trl_arguments(config: RunConfig, folder: RunFolder) -> tuple[GRPOConfig, ResolvedMethod]:
    """TRL's ``GRPOConfig`` of the recipe's method, with what a run folder needs set by us, and that method.

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
    if "vllm_importance_sampling_mode" not in method.trl:
        given |= {"vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_clip_max": 2.0}
    given |= method.trl | {"report_to": _trackers(config.trl.get("report_to", "none"))}
    given |= {"output_dir": str(folder.checkpoints), "seed": config.seed, "remove_unused_columns": False}
    given |= {"save_strategy": "steps", "save_steps": config.trainer.checkpoint_every}
    with refusals():
        return GRPOConfig(**given), method


def _trackers(named: str | Sequence[str]) -> list[str]:
    names = [name for name in ([named] if isinstance(named, str) else named) if name != "none"]
    with refusals(where := "trl.report_to"):
        get_reporting_integration_callbacks(names)  # type: ignore[no-untyped-call]  # knows which there are
    installed: list[str] = get_available_reporting_integrations()  # type: ignore[no-untyped-call]
    if missing := [name for name in names if name not in installed]:
        words = f"{where} names {missing[0]}, which is not installed."
        fix = f"install {missing[0]} here, or take it out: metrics.jsonl has the same numbers."
        raise MissingError("CR0101", words, where=where, fix=fix)
    return names


def training_dataset(rows: Sequence[dict[str, Any]]) -> Dataset:
    """The rows (prompt, task_id) as the data set that TRL samples prompts from."""
    return Dataset.from_list(list(rows))


def limit_cpu_threads(config: RunConfig) -> None:
    """Use ``trainer.cpu_threads`` threads for the model's arithmetic in this process."""
    if config.trainer.cpu_threads:
        torch.set_num_threads(config.trainer.cpu_threads)


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
    rows: Sequence[Any], model: Any, tokenizer: Any, *, max_new_tokens: int, engine_limit: int | None
) -> None:
    """Stop before the first step when a prompt (with its template) and its answer exceed the model's positions (CR0705).
    ``engine_limit`` is what another engine holds, if one samples.
    """
    limit = min((most for most in (num_positions(model), engine_limit) if most is not None), default=None)
    for row in rows:
        prompt = row["prompt"]
        is_text = isinstance(prompt, str)
        ids = tokenizer(text=prompt)["input_ids"] if is_text else chat_prompt_ids(tokenizer, prompt)
        length = len(ids) + max_new_tokens
        if limit is not None and length > limit:
            words = f"prompt and answer take {length} tokens; the model has {limit} positions."
            fix = "lower rollouts.context_lines or trl.max_completion_length, or leave the task out."
            raise InputError("CR0705", words, where=row["task_id"], fix=fix)


_FIGURES = {
    "reward": "reward",
    "held out": "killswitch/heldout_ema",
    "gap": "killswitch/proxy_real_gap",
    "KL": "killswitch/kl_ema",
    "groups without signal": "frac_reward_zero_std",
}
_SECONDS_BETWEEN = 10.0


class ProgressLines(TrainerCallback):
    """Says on standard error where training stands, every ten seconds at most, and at its end.

    Time left and the newest figures; within a step, how many of its episodes have ended.
    """

    def __init__(self) -> None:
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
        parts += [f"{name} {self._row[key]:.3f}" for name, key in _FIGURES.items() if key in self._row]
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


def show_own_progress(trainer: Any, *, quiet: bool, rollouts: EpisodeRollouts | None = None) -> None:
    """Our lines on standard error in place of transformers' printed rows."""
    trainer.remove_callback(PrinterCallback)
    if not quiet:
        lines = ProgressLines()
        trainer.add_callback(lines)
        if rollouts is not None:
            rollouts.player.on_ended = lines.show_episodes


def cpu_threads() -> int:
    """For ``trainer.cpu_threads``: 1 where a processor with few cores trains, since threads that wait burn what grading needs."""
    return 1 if not torch.cuda.is_available() and len(os.sched_getaffinity(0)) <= 4 else 0


def fast_dtype() -> Literal["float32", "bfloat16"]:
    """What this machine multiplies fast; without instructions for bfloat16 a processor multiplies it number by number."""
    if torch.cuda.is_available():
        return "bfloat16" if torch.cuda.is_bf16_supported() else "float32"
    return "bfloat16" if torch.ops.mkldnn._is_mkldnn_bf16_supported() else "float32"  # noqa: SLF001 - no public name


def device_and_free_bytes(of_processor: int | None) -> tuple[str, int | None]:
    """What a person calls the device that would train, and the memory that is free there."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name(), int(torch.cuda.mem_get_info()[0])
    return "the processor", of_processor


def peak_bytes() -> int:
    """The most memory that this process has held so far, on the device that trains."""
    if torch.cuda.is_available():
        return int(torch.cuda.max_memory_allocated())
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@contextmanager
def within_memory(name: str) -> Iterator[None]:
    """Inside, graphics memory that runs out is an error that a user can read."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        words = "the graphics memory does not hold this model and a step of training."
        fix = "take a smaller model or a larger GPU, or stop what else uses this one."
        raise MissingError("CR0232", words, where=f"model.name = {name}", fix=fix) from error
