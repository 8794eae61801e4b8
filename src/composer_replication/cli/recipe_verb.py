"""``composer-rl recipe new`` and ``export-verl``: a recipe that is made, and one that is handed to another trainer.

The first writes a run.toml for tasks and a model of one's own, and says what a step of it needs on this machine.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from shlex import quote
from typing import Any

import tomli_w

from composer_replication.cli import assembly
from composer_replication.cli.doctor_verb import available_memory_bytes
from composer_replication.cli.flags import refuse_unwritable
from composer_replication.cli.task_division import FILE_NAME, RunTasks, divide_tasks
from composer_replication.cli.terminal import note, progress_bar
from composer_replication.config import (
    AgentSection,
    RunConfig,
    TasksSection,
    dump_config,
    load_config,
    parse_config,
    parse_override,
)
from composer_replication.errors import UsageError, needs_extra
from composer_replication.rollouts.environment.feature_deletion_env import first_message
from composer_replication.rollouts.episodes.agent_loop import LedgerTalk
from composer_replication.rollouts.tools.toolbox import TOOLS
from composer_replication.run_folder import write_atomic, write_json
from composer_replication.tasks.store import TaskStore

GROUP_SIZE, PROMPTS_PER_STEP = 8, 2  # as in the quick start
MEMORY_SHARE = 0.7  # of the free memory: a run's peak can be a third above the estimate
_MANY_HELDOUT, _FEW_TASKS = 16, 40
_UNTRIED: dict[str, Any] = {"num_train": 1, "num_heldout": 1, "num_prompts": 1, "num_tokens": 16}
_UNTRIED |= {"prefix_sharing": "false", "cpu_threads": 0, "dtype": "float32"}
"""Sizes of a recipe that is good enough to divide the tasks by."""


def run_new(args: argparse.Namespace) -> tuple[dict[str, object], int]:
    """Write the recipe. Both figures are of a step with the longest prompts (``run_setup.measure_step``).

    ``seconds_per_step`` is sampling + training + R g / j, with R completions a step, all different and as long as allowed, g
    the measured seconds of one test run, j test runs at a time; held-out evaluations come on top.
    """
    if os.path.lexists(args.out):
        fix = "choose another --out FILE, or move it away."
        raise UsageError("CR0231", "the file exists already.", where=str(args.out), fix=fix)
    refuse_unwritable(args.out.parent)
    folder, tell = args.out.resolve().parent, (lambda _: None) if args.quiet else note
    config = parse_config(tomllib.loads(recipe_text(args, folder, _UNTRIED)), where="composer-rl recipe new")
    assembly.check_recipe(config, folder)
    store = TaskStore.open(args.tasks)
    tasks = divide_tasks(config, store, folder, tell)
    tell("loading torch, transformers and trl")
    with assembly.training_packages("trying the model", quiet=args.quiet):
        tell(f"model: trying {args.model}")
        sizes, estimate = _try_model(config, store, tasks)
        tell("sandbox: trying the tests")
        with closing(assembly.open_grader(config, store)) as grader:
            task = tasks.train[0]
            store.environment(task)  # made now, if ever
            started = time.monotonic()
            grader.grade(task, store.golden_body(task))
            grading = time.monotonic() - started
    text = recipe_text(args, folder, sizes)
    trl = parse_config(tomllib.loads(text), where=str(args.out)).trl
    graded = trl["per_device_train_batch_size"] * grading / config.rollouts.grading_jobs
    estimate["seconds_per_step"] = round(estimate["seconds_per_step"] + graded, 3)
    folder.mkdir(parents=True, exist_ok=True)
    with args.out.open("x") as handle:
        handle.write(text)
    if not estimate["fits"]:
        tell("It does not fit: take a smaller model, or a machine with more memory.")
    tell(f"Next: composer-rl train {quote(str(args.out))} --out {quote(f'runs/{folder.name}')}")
    counts = {"train_tasks": len(tasks.train), "heldout_tasks": len(tasks.heldout)}
    return {"recipe": str(args.out.resolve()), **estimate, "steps": trl["max_steps"], **counts}, 0


def _try_model(config: RunConfig, store: TaskStore, tasks: RunTasks) -> tuple[dict[str, Any], dict[str, Any]]:
    """The sizes of the recipe, and what a step of it costs: load, sample one group and train on it."""
    from composer_replication.trainer import run_setup
    from composer_replication.trainer.policy import InProcessPolicy

    device, free = run_setup.device_and_free_bytes(available_memory_bytes())
    model, tokenizer, _ = run_setup.load_for_trial(config)
    as_chat, rows = config.rollouts.prompt_style == "chat", assembly.training_rows(config, store, tasks.train)
    golden = [len(tokenizer(text=store.golden_body(task))["input_ids"]) for task in tasks.train]
    num_tokens = completion_tokens(golden, as_chat=as_chat)
    run_setup.refuse_long_prompts(rows, model, tokenizer, max_new_tokens=num_tokens)
    policy = InProcessPolicy(model, tokenizer, as_chat=as_chat)
    texts = [row["prompt"][-1]["content"] if as_chat else row["prompt"] for row in rows]
    num_prompts = min(PROMPTS_PER_STEP, len(rows))
    longest = max(map(policy.prompt_ids, texts), key=len)
    step = {"num_prompts": num_prompts, "group_size": GROUP_SIZE, "completion_tokens": num_tokens}
    with run_setup.within_memory(config.model.name):
        cost = run_setup.measure_step(model, tokenizer, longest, **step)
    sizes: dict[str, Any] = {"num_prompts": num_prompts, "num_tokens": num_tokens}
    sizes |= {"num_train": len(rows), "num_heldout": len(tasks.heldout)}
    sizes |= {"cpu_threads": run_setup.cpu_threads(), "dtype": str(model.dtype).removeprefix("torch.")}
    sizes["prefix_sharing"] = json.dumps(cost.is_shared)
    fits = free is None or cost.memory_bytes <= MEMORY_SHARE * free
    memory = {"memory_bytes": cost.memory_bytes, "free_memory_bytes": free, "fits": fits, "device": device}
    return sizes, {**memory, "seconds_per_step": cost.seconds}


def completion_tokens(golden_lengths: Sequence[int], *, as_chat: bool) -> int:
    """Room for an answer, in tokens; for the longest it would cost every step.

    1.25 times the 90th percentile (nearest rank) of the golden bodies' lengths plus 8, rounded up to a multiple of 8, in
    [16, 1024]. In chat style twice that plus 64, for the fence and for words around it.
    """
    ranked = sorted(golden_lengths)
    percentile = ranked[math.ceil(0.9 * len(ranked)) - 1]
    room = 8 * math.ceil((1.25 * percentile + 8) / 8)
    return min(1024, max(16, 2 * room + 64 if as_chat else room))


def recipe_text(args: argparse.Namespace, folder: Path, sizes: Mapping[str, Any]) -> str:
    """The whole recipe: 30 to 300 steps, which show each task eight times.

    The store's path is relative where it lies beside or below the recipe, so that both can be moved.
    """
    store, model = args.tasks.resolve(), Path(args.model)
    name = {"name": str(model.resolve()) if model.is_dir() else args.model}
    where = str(store.relative_to(folder) if store.is_relative_to(folder) else store)
    num_train, num_heldout, num_prompts = (sizes[f"num_{what}"] for what in ("train", "heldout", "prompts"))
    template = Path(__file__).with_name("new_recipe.template").read_text()
    return template.format(
        **sizes,
        seed=args.seed,
        model=tomli_w.dumps(name | ({"sha256": args.sha256} if args.sha256 else {})),
        store=tomli_w.dumps({"store": where}).strip(),
        division="" if (store / FILE_NAME).is_file() else "fraction = 0.3\n",
        sample_size=_MANY_HELDOUT if num_heldout > _MANY_HELDOUT else 0,
        before_and_after_samples=4 if num_train + num_heldout <= _FEW_TASKS else 0,
        prompt_style=args.prompt_style,
        max_steps=min(300, max(30, math.ceil(8 * num_train / num_prompts))),
        num_rows=num_prompts * GROUP_SIZE,
        group_size=GROUP_SIZE,
    )


def run_export_verl(args: argparse.Namespace) -> tuple[dict[str, object], int]:
    config = load_config(args.recipe, dict(parse_override(text) for text in args.overrides))
    recipe_folder, out = args.recipe.resolve().parent, args.out.resolve()
    if out.exists() and any(out.iterdir()):
        raise UsageError("CR0231", "the folder is not empty.", where=str(out), fix="choose another --out.")
    problem = ""
    if config.agent is None:
        problem = "the recipe has no [agent] table, and verl is given episodes"
    elif config.agent.summary_tokens:
        problem = "agent.summary_tokens goes on in new conversations, and a row of verl is one"
    if problem:
        fix = "docs/verl.md says what verl carries."
        raise UsageError("CR0951", f"{problem}.", where=str(args.recipe), fix=fix)
    assembly.check_recipe(config, recipe_folder)
    refuse_unwritable(out)
    with progress_bar(quiet=args.quiet) as report:
        store = assembly.open_tasks(config, recipe_folder, report)
    tasks = divide_tasks(config, store, recipe_folder)
    out.mkdir(parents=True, exist_ok=True)
    not_carried = _write_for_verl(config, config.agent or AgentSection(), store, tasks, out)
    here = config.model_copy(update={"tasks": TasksSection(store=str(store.root.resolve()))})
    write_atomic(out / "run.toml", dump_config(here))
    result = {
        "folder": str(out),
        "files": sorted(str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()),
        "tasks": len(tasks.train) + len(tasks.heldout),
        "train": len(tasks.train),
        "heldout": len(tasks.heldout),
        "not_carried": not_carried,
        "start": str(out / "run.sh"),
    }
    write_json(out / "summary.json", result)
    return result, 0


def _write_for_verl(
    config: RunConfig, agent: AgentSection, store: Any, tasks: RunTasks, out: Path
) -> list[str]:
    """Rows, model and start; what of the recipe has no place in verl."""
    with needs_extra("train", "writing rows for verl"):
        from composer_replication.engines import verl_export
        from composer_replication.trainer.model_loading import load_model

        model, tokenizer = load_model(config.model, seed=config.seed, needs_chat_template=True)
        name = config.model.name
        if not Path(name).is_dir():
            name = str(out / "model")
            model.save_pretrained(name)
            tokenizer.save_pretrained(name)
        talk, lengths = LedgerTalk(tokenizer, agent), [0]
        for side, chosen in (("train", tasks.train), ("heldout", tasks.heldout)):
            messages = [first_message(store, task) for task in chosen]
            lengths += [talk.open(message, TOOLS).num_tokens for message in messages]
            rows = verl_export.rows_of(chosen, messages, is_heldout=side == "heldout")
            verl_export.write_rows(out / f"{side}.parquet", rows)
    longest = max(lengths)
    limits = {"prompt": longest, "response": max(agent.max_context_tokens - longest, 1)}
    settings: Any = {"model": name, "limits": limits, "num_tasks": len(tasks.train)}
    verl_export.write_start(out, verl_export.verl_arguments(out, config.trl, **settings))
    return verl_export.not_carried(config)
