"""``composer-rl quickstart``: the main job on the recipe that ships with the package."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from composer_replication.cli.train_verb import render as render_run
from composer_replication.errors import MissingError, needs_extra


def run(args: argparse.Namespace) -> tuple[dict[str, object], int]:
    """Run the shipped recipe in the type that this machine multiplies fast; errors as ``run_recipe``."""
    from composer_replication.cli.training_run import run_recipe

    with needs_extra("quickstart", "the quick start"):
        from composer_replication.trainer.model_trial import fast_dtype
    given = {"trl.max_steps": args.steps, "seed": args.seed, "model.dtype": fast_dtype()}
    overrides = {key: value for key, value in given.items() if value is not None}
    return run_recipe(shipped_recipe("quickstart"), overrides, args.out, resume=True, quiet=args.quiet)


def render(result: dict[str, Any]) -> str:
    took = f"{result['seconds']:.0f} s, peak memory {result['peak_memory_bytes'] / 1e9:.1f} GB"
    lines = [f"time       {took}", render_run(result)]
    before, after = result["before"], result["after"]
    if before and after:
        lines += [_before_after(side, before[side], after[side]) for side in ("train", "heldout")]
    return "\n".join(lines)


def _before_after(side: str, before: dict[str, Any], after: dict[str, Any]) -> str:
    def rate(rates: dict[str, Any], name: str) -> str:
        low, high = rates[f"{name}_ci95"]
        return f"{rates[f'{name}_pass']:.2f} [{low:.2f}, {high:.2f}]"

    name = "hidden" if side == "heldout" else "visible"
    return f"{side:<10} {name} pass rate {rate(before, name)} -> {rate(after, name)}"


def shipped_recipe(name: str) -> Path:
    """Path of ``NAME/run.toml``: package data in a wheel, ``recipes/`` in a checkout."""
    package = Path(__file__).resolve().parent.parent
    for root in (package / "recipes", package.parent.parent / "recipes"):
        recipe = root / name / "run.toml"
        if recipe.is_file():
            return recipe
    raise MissingError(
        "CR0101", f"the recipe {name} is not in this installation.", fix="reinstall composer-replication."
    )
