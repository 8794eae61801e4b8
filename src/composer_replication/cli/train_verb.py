"""``composer-rl train RECIPE.toml``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from composer_replication.cli.flags import add_ray_flag, add_set_flag
from composer_replication.cli.replicas_verb import add_replica_flags


def add_parser(subparsers: Any, common: argparse.ArgumentParser) -> None:
    parser = subparsers.add_parser(
        "train",
        parents=[common],
        help="train by a recipe, guarded",
        description="Train by a recipe. Exit code 5: the guard halted the run. Ctrl-C leaves a resumable folder.",
    )
    parser.add_argument("recipe", metavar="RECIPE.toml", type=Path)
    add_set_flag(parser)
    parser.add_argument(
        "--out", metavar="RUN", type=Path, help="run folder (default: runs/NAME-OF-THE-RECIPE)"
    )
    parser.add_argument("--resume", action="store_true", help="go on at the last whole checkpoint")
    add_ray_flag(
        parser,
        "attempt and grade tasks",
        "the policy stays here, and rewards are the same; it is the recipe's key ray.address",
    )
    add_replica_flags(parser)
    parser.set_defaults(run="composer_replication.cli.train_verb:run")


def run(args: argparse.Namespace) -> tuple[dict[str, object], int]:
    from composer_replication.cli.training_run import run_recipe
    from composer_replication.config import parse_override

    out = args.out or Path("runs") / args.recipe.resolve().parent.name
    if args.replica is not None and args.out is None:
        out /= f"replica-{args.replica}"
    overrides = dict(parse_override(text) for text in args.overrides)
    if args.ray is not None:
        overrides["ray.address"] = args.ray
    if args.num_replicas is not None:
        overrides["replicas.num_replicas"] = args.num_replicas
    return run_recipe(args.recipe, overrides, out, resume=args.resume, quiet=args.quiet, replica=args.replica)


def render(result: dict[str, Any]) -> str:
    lines = [
        f"run        {result['run']}",
        f"steps      {result['global_step']}",
        f"reward     {_figure(result['reward_first'])} -> {_figure(result['reward_last'])}, means of five steps",
        f"held out   {_figure(result['heldout_first'])} -> {_figure(result['heldout_last'])}",
        f"guard      {result['verdict']}" + (f": {result['reason']}" if result["reason"] else ""),
        f"report     {result['report']}",
    ]
    return "\n".join(lines)


def _figure(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.3f}"
