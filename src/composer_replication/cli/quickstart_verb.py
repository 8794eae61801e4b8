"""``composer-rl quickstart``: the main job on the recipe that ships with the package."""

from __future__ import annotations

import argparse
from pathlib import Path

from composer_replication.cli.train_verb import render, run_recipe
from composer_replication.errors import MissingError, needs_extra

__all__ = ["render", "run", "shipped_recipe"]


def run(args: argparse.Namespace) -> tuple[dict[str, object], int]:
    """Run the shipped recipe in the type that this machine multiplies fast; errors as ``run_recipe``."""
    with needs_extra("quickstart", "the quick start"):
        from composer_replication.trainer.run_setup import fast_dtype
    given = {"trl.max_steps": args.steps, "seed": args.seed, "model.dtype": fast_dtype()}
    overrides = {key: value for key, value in given.items() if value is not None}
    return run_recipe(shipped_recipe("quickstart"), overrides, args.out, resume=True, quiet=args.quiet)


def shipped_recipe(name: str) -> Path:
    """Path of ``NAME/run.toml``: package data in a wheel, ``recipes/`` in a checkout."""
    package = Path(__file__).resolve().parent.parent
    for root in (package / "recipes", package.parent.parent / "recipes"):
        recipe = root / name / "run.toml"
        if recipe.is_file():
            return recipe
    problem, fix = f"the recipe {name} is not in this installation.", "reinstall composer-replication."
    raise MissingError("CR0101", problem, fix=fix)
