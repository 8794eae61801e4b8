"""``composer-rl export-verl RECIPE --out DIR``: a folder with which stock verl trains on the recipe's tasks."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from composer_replication.cli.assembly import check_recipe, open_tasks
from composer_replication.cli.flags import refuse_unwritable
from composer_replication.cli.task_division import RunTasks, divide_tasks
from composer_replication.cli.terminal import progress_bar
from composer_replication.config import (
    AgentSection,
    RunConfig,
    TasksSection,
    dump_config,
    load_config,
    parse_override,
)
from composer_replication.errors import UsageError, needs_extra
from composer_replication.rollouts.environment.feature_deletion_env import first_message
from composer_replication.rollouts.episodes.agent_loop import LedgerTalk
from composer_replication.rollouts.tools.toolbox import TOOLS
from composer_replication.run_folder import write_atomic, write_json


def run(args: argparse.Namespace) -> tuple[dict[str, object], int]:
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
    check_recipe(config, recipe_folder)
    refuse_unwritable(out)
    with progress_bar(quiet=args.quiet) as report:
        store = open_tasks(config, recipe_folder, report)
    tasks = divide_tasks(config, store, recipe_folder)
    out.mkdir(parents=True, exist_ok=True)
    _write(config, config.agent or AgentSection(), store, tasks, out)
    here = config.model_copy(update={"tasks": TasksSection(store=str(store.root.resolve()))})
    write_atomic(out / "run.toml", dump_config(here))
    result = {
        "folder": str(out),
        "files": sorted(str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()),
        "tasks": len(tasks.train) + len(tasks.heldout),
        "train": len(tasks.train),
        "heldout": len(tasks.heldout),
        "not_carried": _not_carried(config),
        "start": str(out / "run.sh"),
    }
    write_json(out / "summary.json", result)
    return result, 0


def _not_carried(config: RunConfig) -> list[str]:
    """What of the recipe has no place in verl."""
    found = {
        "trainer.alpha_sdpo (hints need the teacher's logits)": config.trainer.alpha_sdpo != 0.0,
        "trainer.beta_replay": config.trainer.beta_replay != 0.0,
        "trainer.preset": bool(config.trainer.preset),
        "[curriculum]": config.curriculum is not None,
        "[ray]": config.ray is not None,
        "[evidence]": config.evidence is not None,
        "trl.beta (the KL to the initial policy)": bool(config.trl.get("beta", 0.0)),
    }
    return [name for name, is_set in found.items() if is_set]


def _write(config: RunConfig, agent: AgentSection, store: Any, tasks: RunTasks, out: Path) -> None:
    with needs_extra("train", "writing rows for verl"):
        from composer_replication.engines.verl_export import rows_of, verl_arguments, write_rows, write_start
        from composer_replication.trainer.model_loading import load_model

        model, tokenizer = load_model(config.model, seed=config.seed, needs_chat_template=True)
        name = config.model.name
        if not Path(name).is_dir():
            name = str(out / "model")
            model.save_pretrained(name)
            tokenizer.save_pretrained(name)
        talk, lengths = LedgerTalk(tokenizer), [0]
        for side, chosen in (("train", tasks.train), ("heldout", tasks.heldout)):
            messages = [first_message(store, task) for task in chosen]
            lengths += [talk.open(message, TOOLS).num_tokens for message in messages]
            write_rows(out / f"{side}.parquet", rows_of(chosen, messages, is_heldout=side == "heldout"))
    longest = max(lengths)
    limits = {"prompt": longest, "response": max(agent.max_context_tokens - longest, 1)}
    write_start(out, verl_arguments(out, config.trl, model=name, limits=limits, num_tasks=len(tasks.train)))
