"""``composer-rl recipe new`` and ``export-verl``: a recipe that is made, and one that is handed to another trainer.

The first writes a run.toml for tasks and a model of one's own, and says what a step of it needs on this machine.
"""

from __future__ import annotations

import argparse
import math
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from shlex import quote
from tempfile import TemporaryDirectory
from typing import Any

import tomli_w

from composer_replication.cli import assembly
from composer_replication.cli.doctor_verb import available_memory_bytes
from composer_replication.cli.flags import refuse_unwritable
from composer_replication.cli.task_division import FILE_NAME, RunTasks, divide_tasks
from composer_replication.cli.terminal import note, progress_bar
from composer_replication.cli.train_verb import run_recipe
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
from composer_replication.run_folder import RunFolder, read_jsonl, write_atomic, write_json
from composer_replication.tasks.store import TaskStore

GROUP_SIZE, PROMPTS_PER_STEP = 8, 2  # as in the quick start
MEMORY_SHARE = 0.7  # of the free memory: a later step may have longer prompts and answers
_MANY_HELDOUT, _FEW_TASKS = 16, 40
_UNTRIED: dict[str, Any] = {"num_train": 1, "num_heldout": 1, "num_prompts": 1, "num_tokens": 16}
_UNTRIED |= {"prefix_sharing": "false", "cpu_threads": 0, "dtype": "float32"}
"""Sizes of a recipe that is good enough to divide the tasks by."""


def run_new(args: argparse.Namespace) -> tuple[dict[str, object], int]:
    """Write the recipe. Both figures are of a step that is trained by it, without guard and held-out evaluations."""
    if args.out.is_symlink() or args.out.exists():
        fix = "choose another --out FILE, or move it away."
        raise UsageError("CR0231", "the file exists already.", where=str(args.out), fix=fix)
    refuse_unwritable(args.out.parent)
    folder, tell = args.out.resolve().parent, (lambda _: None) if args.quiet else note
    config = parse_config(tomllib.loads(recipe_text(args, folder, _UNTRIED)), where="composer-rl recipe new")
    assembly.check_recipe(config, folder)
    store, free = TaskStore.open(args.tasks), available_memory_bytes()
    tasks = divide_tasks(config, store, folder, tell)
    tell("loading torch, transformers and trl")
    with assembly.training_packages("trying the model", quiet=args.quiet):
        text = recipe_text(args, folder, _sizes(config, store, tasks))
        tell(f"model: training {args.model} for one step")
        store.environment(tasks.train[0])  # made now, if ever
        estimate = _tried(tomllib.loads(text), store, free)
    folder.mkdir(parents=True, exist_ok=True)
    with args.out.open("x") as handle:
        handle.write(text)
    if not estimate["fits"]:
        tell("It does not fit: take a smaller model, or a machine with more memory.")
    tell(f"Next: composer-rl train {quote(str(args.out))} --out {quote(f'runs/{folder.name}')}")
    counts = {"train_tasks": len(tasks.train), "heldout_tasks": len(tasks.heldout)}
    steps = tomllib.loads(text)["trl"]["max_steps"]
    return {"recipe": str(args.out.resolve()), **estimate, "steps": steps, **counts}, 0


def _sizes(config: RunConfig, store: TaskStore, tasks: RunTasks) -> dict[str, Any]:
    """What the recipe says by its model and tasks; the model's weights are not read."""
    from composer_replication.trainer import model_loading, model_modes, run_setup

    as_chat = config.rollouts.prompt_style == "chat"
    how: dict[str, Any] = {"seed": config.seed, "needs_chat_template": as_chat, "has_weights": False}
    model, tokenizer = model_loading.load_model(config.model, **how)
    golden = [len(tokenizer(text=store.golden_body(task))["input_ids"]) for task in tasks.train]
    return {
        "num_train": len(tasks.train),
        "num_heldout": len(tasks.heldout),
        "num_prompts": min(PROMPTS_PER_STEP, len(tasks.train)),
        "num_tokens": completion_tokens(golden, as_chat=as_chat),
        "prefix_sharing": str(model_modes.packing_reason(model.eval()) is None).lower(),
        "cpu_threads": run_setup.cpu_threads(),
        "dtype": run_setup.fast_dtype(),
    }


def _tried(recipe: dict[str, Any], store: TaskStore, free: int | None) -> dict[str, Any]:
    """What one step by the recipe takes: its seconds, and the peak of memory, which also holds the libraries."""
    from composer_replication.trainer import run_setup

    del recipe["guard"]  # its reading of held-out tasks would be in the step
    recipe["tasks"]["store"] = str(store.root.resolve())
    recipe["heldout"]["before_and_after_samples"] = 0
    recipe["trl"]["max_steps"], recipe["trainer"]["save_model"] = 1, False
    device, free = run_setup.device_and_free_bytes(free)
    with TemporaryDirectory(prefix="composer-rl-trial-") as trial:
        path, folder = Path(trial) / "run.toml", RunFolder(Path(trial) / "run")
        path.write_text(tomli_w.dumps(recipe))
        with run_setup.within_memory(recipe["model"]["name"]):
            run_recipe(path, {}, folder.root, resume=False, quiet=True)
        seconds = round(read_jsonl(folder.metrics)[-1]["step_seconds"], 3)
    memory = run_setup.peak_bytes()
    fits = free is None or memory <= MEMORY_SHARE * free
    figures = {"memory_bytes": memory, "free_memory_bytes": free, "fits": fits, "device": device}
    return {**figures, "seconds_per_step": seconds}


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
    not_carried = _verl_files(config, config.agent or AgentSection(), store, tasks, out)
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


def _verl_files(config: RunConfig, agent: AgentSection, store: Any, tasks: RunTasks, out: Path) -> list[str]:
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
