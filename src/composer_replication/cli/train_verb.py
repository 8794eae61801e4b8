"""``composer-rl train RECIPE.toml``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from composer_replication.cli.terminal import columns


def run(args: argparse.Namespace) -> tuple[dict[str, object], int]:
    from composer_replication.cli.training_run import run_recipe
    from composer_replication.config import parse_override

    out = args.out or Path("runs") / args.recipe.resolve().parent.name
    if args.replica is not None and args.out is None:
        out /= f"replica-{args.replica}"
    flags = {"ray.address": args.ray, "replicas.num_replicas": args.num_replicas}
    overrides = dict(parse_override(text) for text in args.overrides)
    overrides |= {key: value for key, value in flags.items() if value is not None}
    return run_recipe(args.recipe, overrides, out, resume=args.resume, quiet=args.quiet, replica=args.replica)


def render(result: dict[str, Any]) -> str:
    def figure(value: float | None) -> str:
        return "not measured" if value is None else f"{value:.3f}"

    def rate(rates: dict[str, Any], name: str) -> str:
        if rates[f"{name}_pass"] is None:  # the sandbox failed for all of them
            return "not measured"
        low, high = rates[f"{name}_ci95"]
        return f"{rates[f'{name}_pass']:.2f} [{low:.2f}, {high:.2f}]"

    first, last = figure(result["reward_first"]), figure(result["reward_last"])
    lines = {
        "run": result["run"],
        "steps": result["global_step"],
        "time": f"{result['seconds']:.0f} s, peak memory {result['peak_memory_bytes'] / 1e9:.1f} GB",
        "reward": f"{first} -> {last}, means of five steps",
        "held out": f"{figure(result['heldout_first'])} -> {figure(result['heldout_last'])}",
        "guard": result["verdict"] + (f": {result['reason']}" if result["reason"] else ""),
        "report": result["report"],
    }
    if (before := result["before"]) and (after := result["after"]):
        for side, name in (("train", "visible"), ("heldout", "hidden")):
            lines[side] = f"{name} pass rate {rate(before[side], name)} -> {rate(after[side], name)}"
    return columns(lines)
