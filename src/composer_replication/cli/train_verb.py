"""``composer-rl train`` and ``quickstart``: what can be refused is refused, the folder is locked, ``training_run`` trains."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from composer_replication.cli.assembly import check_recipe, check_training, identity_table, training_packages
from composer_replication.cli.flags import launched_rank, refuse_unwritable
from composer_replication.cli.replicas_verb import open_replica
from composer_replication.cli.terminal import columns, note
from composer_replication.config import RunConfig, dump_config, load_config, parse_override
from composer_replication.errors import HALTED_EXIT_CODE, MissingError, UsageError, needs_extra
from composer_replication.run_folder import RunFolder, read_json, write_atomic

_SHOWN = "run steps seconds peak_memory_bytes reward_first reward_last heldout_first heldout_last".split()
_SHOWN += ["verdict", "reason", "report"]


def run(args: argparse.Namespace) -> tuple[dict[str, object], int]:
    out = args.out or Path("runs") / args.recipe.resolve().parent.name
    if args.replica is not None and args.out is None:
        out /= f"replica-{args.replica}"
    flags = {"ray.address": args.ray, "replicas.num_replicas": args.num_replicas}
    overrides = dict(parse_override(text) for text in args.overrides)
    overrides |= {key: value for key, value in flags.items() if value is not None}
    return run_recipe(args.recipe, overrides, out, resume=args.resume, quiet=args.quiet, replica=args.replica)


def run_quickstart(args: argparse.Namespace) -> tuple[dict[str, object], int]:
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


def run_recipe(
    recipe: Path,
    overrides: dict[str, Any],
    out: Path,
    *,
    resume: bool,
    quiet: bool,
    replica: int | None = None,
) -> tuple[dict[str, object], int]:
    """Train by a recipe into a run folder; returns the summary and the exit code.

    Where several processes were launched, each calls this with the same arguments: all build, measure and train, and the
    first locks and writes the folder.
    """
    is_first = launched_rank() == 0
    config, recipe_folder, folder = load_config(recipe, overrides), recipe.resolve().parent, RunFolder(out)
    is_quiet = quiet or not is_first
    tell = (lambda _: None) if is_quiet else note
    if is_first:
        has_run = folder.recipe.is_file()
        if folder.is_occupied and not (resume and has_run):
            problem, fix = "no run is in it, and the folder is not empty.", "choose another --out."
            if has_run:
                problem = "the run folder is not empty."
                fix = f"the same command with --resume goes on; or {fix}"
            raise UsageError("CR0231", problem, where=str(folder.root), fix=fix)
        refuse_unwritable(out)
    with ExitStack() as stack:
        checked = None
        if not folder.summary.is_file():  # the cheap things first
            checked = check_recipe(config, recipe_folder)
            tell("loading torch, transformers and trl")
            stack.enter_context(training_packages("training", quiet=is_quiet))
            checked.arguments, checked.method, checked.lora = check_training(config, folder)
        own = stack.enter_context(open_replica(config, replica))
        if is_first:
            stack.enter_context(folder.locked())
            _keep_recipe(config, folder)
        if checked is None or folder.summary.is_file():  # since before, or since the lock is ours
            tell("this run is finished; here is its summary.")
            summary = read_json(folder.summary)
            del summary["schema_version"]
            return summary, HALTED_EXIT_CODE if summary.get("verdict") == "halted" else 0
        from composer_replication.cli.training_run import TrainingRun

        return TrainingRun(config, recipe_folder, folder, is_quiet, checked, own).go()


def _keep_recipe(config: RunConfig, folder: RunFolder) -> None:
    """Write the recipe; one that trains differently from what was begun is refused."""
    resolved = dump_config(config)
    begun = (folder.metrics, folder.root / "before.json", *folder.checkpoints.glob("checkpoint-*"))
    if not folder.recipe.is_file() or not any(path.exists() for path in begun):
        write_atomic(folder.recipe, resolved)
        (folder.root / "split.json").unlink(missing_ok=True)  # of a recipe by which nothing was trained
        return
    was, now = (_flat(identity_table(each)) for each in (load_config(folder.recipe), config))
    key = next((key for key in sorted(was.keys() | now.keys()) if was.get(key) != now.get(key)), None)
    if key is not None:
        before, after = (repr(table[key]) if key in table else "not set" for table in (was, now))
        problem = f"this folder was begun with another recipe: {key} is {after} now and was {before}."
        fix = "resume with the same recipe and --set values, or choose another --out."
        raise UsageError("CR0208", problem, where=str(folder.recipe), fix=fix)


def _flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in table.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def render(result: dict[str, Any]) -> str:
    """The run in a few lines; of each side the pass rates that it is judged by."""
    lines = {name: result[name] for name in _SHOWN}
    for side, kind in (("train", "visible"), ("heldout", "hidden")):
        for when in ("before", "after"):
            if rates := (result[when] or {}).get(side):
                text = "not measured"
                if interval := rates[f"{kind}_ci95"]:
                    text = "{:.2f} [{:.2f}, {:.2f}]".format(rates[f"{kind}_pass"], *interval)
                lines[f"{side} {when}"] = f"{text} {kind} tests"
    return columns(lines)


render_quickstart = render
