"""A recipe for a task store and a model: settings, and an estimate by a short try on this machine."""

from __future__ import annotations

import os
import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from composer_replication.cli import run_parts
from composer_replication.cli.machine_checks import available_memory_bytes
from composer_replication.cli.output_folder import refuse_unwritable
from composer_replication.cli.preflight import check_recipe
from composer_replication.cli.recipe_settings import (
    STEP_SHAPES,
    completion_tokens,
    first_table,
    recipe_text,
    whole_table,
)
from composer_replication.cli.stored_split import FILE_NAME
from composer_replication.cli.task_division import RunTasks, divide_tasks, other_sizes_note
from composer_replication.config import RunConfig, parse_config
from composer_replication.errors import UsageError, needs_extra
from composer_replication.records import Task
from composer_replication.tasks.store import TaskStore

if TYPE_CHECKING:
    from composer_replication.trainer.cost_probe import StepCost, StepSize
    from composer_replication.trainer.model_trial import TrainingDevice

MEMORY_SHARE = 0.7
"""Of the free memory that the estimate may fill before a smaller step is taken: evaluations, checkpoints and
the allocator are not in the formula, and a run's peak can be a third above it."""
_TRIED_GRADINGS = 2


@dataclass(frozen=True, slots=True)
class _Lengths:
    """Lengths in tokens: of each training prompt, and the room for an answer."""

    prompts: list[list[int]]
    completion: int

    @property
    def longest(self) -> int:
        return max(map(len, self.prompts))

    @property
    def typical(self) -> list[int]:
        """A prompt of median length."""
        return sorted(self.prompts, key=len)[len(self.prompts) // 2]


def new_recipe(
    *, store: Path, model: str, sha256: str, prompt_style: str, seed: int, out: Path, quiet: bool
) -> dict[str, object]:
    """Write ``out`` and return the verb's JSON object.

    ``memory_bytes`` is ``StepCost.memory_bytes`` for the longest prompts. ``seconds_per_step`` is

        sampling + training + R g / j + (E sampling / R + 2 E g / j) / every

    with R completions a step, g the measured seconds of one test run, j test runs at a time, E
    completions of a held-out evaluation, each judged by visible and by hidden tests. Every
    completion is taken for as long as allowed and for different from all others, which is more
    than a run does; the machine is taken for as busy as it was during the try.

    Raises:
        UsageError: the file exists (CR0231) or cannot be written (CR0209).
        MissingError: packages (CR0101), sandbox (CR0301) or graphics memory (CR0232) are missing.
        ComposerError: whatever ``train`` would say of store, split, model and prompts.
    """
    if os.path.lexists(out):
        raise _exists(out)
    refuse_unwritable(out.parent)
    first = first_table(
        store=_written_path(store, out),
        model={"name": str(Path(model).resolve()) if Path(model).is_dir() else model}
        | ({"sha256": sha256} if sha256 else {}),
        prompt_style=prompt_style,
        seed=seed,
        has_split=(store / FILE_NAME).is_file(),
    )
    config = parse_config(first, where="composer-rl recipe new")
    check_recipe(config, out.resolve().parent)
    opened = TaskStore.open(store)
    tasks = divide_tasks(config, opened, out.resolve().parent)
    progress = (lambda _: None) if quiet else run_parts.note
    if tasks.num_other_sizes:
        progress(other_sizes_note(tasks.num_other_sizes))
    with ExitStack() as stack:
        progress("loading torch, transformers and trl")
        with needs_extra("train", "trying the model"):
            from composer_replication.trainer.library_notices import calm_libraries

            stack.enter_context(calm_libraries(quiet=quiet))
            import composer_replication.trainer.composer_trainer  # noqa: F401  # what a run would hold in memory too
        progress(f"model: trying {model}")
        estimate = _estimate_model(config, first, opened, tasks)
        progress("sandbox: trying the tests")
        grading = _grading_seconds(config, opened, tasks.train)
    table, result = _finish(first, tasks, estimate, grading)
    parse_config(table, where=str(out))
    _write_new(out, recipe_text(table))
    return {"recipe": str(out.resolve()), **result}


@dataclass(frozen=True, slots=True)
class _Estimate:
    cost: StepCost
    size: StepSize
    num_parameters: int
    device: TrainingDevice
    memory_bytes: int

    @property
    def fits(self) -> bool:
        free = self.device.free_bytes
        return free is None or self.memory_bytes <= MEMORY_SHARE * free


def _estimate_model(config: RunConfig, first: dict[str, Any], store: TaskStore, tasks: RunTasks) -> _Estimate:
    """Load, try, and take the largest step that fits."""
    from composer_replication.trainer.cost_probe import StepSize, measure_step
    from composer_replication.trainer.model_trial import load_for_trial, training_device, within_memory

    device = training_device(available_memory_bytes())
    model, tokenizer, num_parameters = load_for_trial(config, device)
    first["model"]["dtype"] = str(model.dtype).removeprefix("torch.")
    lengths = _lengths(config, store, tasks, model, tokenizer)
    shapes = [shape for shape in STEP_SHAPES if shape[0] <= len(tasks.train)]
    with within_memory(config.model.name):
        cost = measure_step(
            model,
            tokenizer,
            lengths.typical,
            group_size=shapes[0][1],
            completion_tokens=lengths.completion,
        )
    for num_prompts, group_size in shapes:
        size = StepSize(
            num_prompts, group_size, cost.tried.prompt_tokens, lengths.completion, cost.tried.is_shared
        )
        longest = replace(size, prompt_tokens=lengths.longest)
        estimate = _Estimate(cost, size, num_parameters, device, cost.memory_bytes(longest))
        if estimate.fits:
            break
    return estimate


def _lengths(config: RunConfig, store: TaskStore, tasks: RunTasks, model: Any, tokenizer: Any) -> _Lengths:
    """Token counts; prompts that leave no room for an answer are refused as ``train`` does (CR0705)."""
    from composer_replication.trainer.policy import InProcessPolicy
    from composer_replication.trainer.run_setup import refuse_long_prompts

    as_chat = config.rollouts.prompt_style == "chat"
    policy = InProcessPolicy(model, tokenizer, as_chat=as_chat)
    rows = run_parts.training_rows(config, store, tasks.train)
    texts = [
        row["prompt"] if isinstance(row["prompt"], str) else row["prompt"][-1]["content"] for row in rows
    ]
    golden = [len(tokenizer(text=store.golden_body(task))["input_ids"]) for task in tasks.train]
    room = completion_tokens(golden, as_chat=as_chat)
    refuse_long_prompts(rows, model, tokenizer, max_new_tokens=room)
    return _Lengths([policy.prompt_ids(text) for text in texts], room)


def _grading_seconds(config: RunConfig, store: TaskStore, tasks: tuple[Task, ...]) -> float:
    """Wall seconds of one test run: the mean over the golden bodies of two tasks, one after the other."""
    grader = run_parts.open_grader(config, store)
    try:
        tried = tasks[:_TRIED_GRADINGS]
        store.environment(tried[0])  # made now, if ever
        started = time.monotonic()
        for task in tried:
            grader.grade(task, store.golden_body(task))
        return (time.monotonic() - started) / len(tried)
    finally:
        grader.close()


def _finish(
    first: dict[str, Any], tasks: RunTasks, estimate: _Estimate, grading: float
) -> tuple[dict[str, Any], dict[str, object]]:
    """The whole table and the JSON object without the path."""
    size, cost = estimate.size, estimate.cost
    table = whole_table(
        first,
        num_train=len(tasks.train),
        num_heldout=len(tasks.heldout),
        num_prompts=size.num_prompts,
        group_size=size.group_size,
        num_tokens=size.completion_tokens,
        num_parameters=estimate.num_parameters,
        is_shared=size.is_shared,
        cpu_threads=estimate.device.cpu_threads,
    )
    config = parse_config(table, where="the recipe")
    heldout, jobs = config.heldout, config.rollouts.grading_jobs
    assert heldout is not None
    num_drawn = min(heldout.sample_size or len(tasks.heldout), len(tasks.heldout)) * heldout.samples_per_task
    sampling = cost.sampling_seconds_of(size)
    evaluation = num_drawn * (sampling / size.num_rows + 2 * grading / jobs)
    seconds = {
        "sampling": round(sampling, 3),
        "training": round(cost.training_seconds_of(size), 3),
        "grading": round(size.num_rows * grading / jobs, 3),
        "heldout": round(evaluation / heldout.every, 3),
    }
    return table, {
        "memory_bytes": estimate.memory_bytes,
        "free_memory_bytes": estimate.device.free_bytes,
        "fits": estimate.fits,
        "device": estimate.device.name,
        "seconds_per_step": round(sum(seconds.values()), 3),
        "seconds": seconds,
        "steps": config.trl["max_steps"],
        "train_tasks": len(tasks.train),
        "heldout_tasks": len(tasks.heldout),
        "parameters": estimate.num_parameters,
    }


def _written_path(store: Path, out: Path) -> str:
    """Relative where the store lies beside or below the recipe, so that both can be moved; else absolute."""
    folder, target = out.resolve().parent, store.resolve()
    return str(target.relative_to(folder)) if target.is_relative_to(folder) else str(target)


def _write_new(out: Path, text: str) -> None:
    """Write a file that was not there a moment ago."""
    out.parent.mkdir(parents=True, exist_ok=True)
    try:
        with out.open("x") as handle:
            handle.write(text)
    except FileExistsError as error:
        raise _exists(out) from error


def _exists(out: Path) -> UsageError:
    return UsageError(
        "CR0231",
        "the file exists already.",
        where=str(out),
        fix="choose another --out FILE, or move it away.",
    )
