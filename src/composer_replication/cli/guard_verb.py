"""``composer-rl guard`` and ``report``: what a run of this or any trainer has to say for itself, on any machine."""

from __future__ import annotations

import argparse
from typing import Any

from composer_replication.cli.terminal import progress_bar
from composer_replication.config import GuardSection, parse_config, read_table
from composer_replication.errors import HALTED_EXIT_CODE, UsageError, needs_extra
from composer_replication.report.guard_scan import choose_columns, columns_sentence, readings_of, replay
from composer_replication.report.run_logs import read_log
from composer_replication.safety import HeldOutGuard

_TOO_LITTLE = 6
_QUICK_RUNS = 400
_SETTINGS = tuple(GuardSection.model_fields)
_RECIPE: dict[str, Any] = {"model": {"name": "-"}, "tasks": {"store": "-"}, "heldout": {}}

Result = dict[str, Any]


def run_scan(args: argparse.Namespace) -> tuple[Result, int]:
    """Replay the guard over a log: 0 nothing fired, 5 the guard fired, 6 fewer updates than ``min_steps``.

    ``fired_at`` is the step of the first update that fired; ``updates`` counts all.
    """
    guard = _make_guard(args)
    with needs_extra("tensorboard", "reading TensorBoard event files"):
        log = read_log(args.log, step=args.step, resumed=args.resumed)
    named = {role: getattr(args, role) for role in ("proxy", "truth", "kl")}
    chosen = choose_columns(log, **named)
    readings, notes = readings_of(log, chosen)
    statuses = replay(guard, readings)
    fired = next((index for index, status in enumerate(statuses) if status.fire), None)
    result: Result = {
        "fired": fired is not None,
        "fired_at": None,
        "reason": "",
        "updates": len(readings),
        "verdict": "clean",
        "log": str(log.path.resolve()),
        "columns": {role: name or None for role, name in chosen.items()} | {"step": log.step_column},
        "columns_sentence": columns_sentence(log, chosen, named),
        "settings": {name: getattr(guard, name) for name in _SETTINGS},
        "notes": [*log.notes, *notes],
    }
    if fired is not None:
        halted = {"fired_at": readings[fired][0], "reason": statuses[fired].reason, "verdict": "halted"}
        return {**result, **halted, "updates_at_fire": fired + 1}, HALTED_EXIT_CODE
    if len(readings) < guard.min_steps:
        sentence = f"{len(readings)} update(s), and the guard may fire only from update {guard.min_steps} on"
        too_little = {"reason": sentence, "verdict": "INSUFFICIENT_DATA", "code": "CR0638"}
        return {**result, **too_little}, _TOO_LITTLE
    return result, 0


def _make_guard(args: argparse.Namespace) -> HeldOutGuard:
    """The guard's defaults, then the recipe's ``[guard]``, then the flags, each by the rules of a recipe."""
    table: Any = {} if args.recipe is None else read_table(args.recipe).get("guard")
    if table is None:
        fix = "leave out --recipe, or give the settings by flags such as --max-proxy-real-gap 0.35."
        raise UsageError("CR0204", "the recipe has no [guard] table.", where=str(args.recipe), fix=fix)
    flags = {name: getattr(args, name) for name in _SETTINGS if getattr(args, name) is not None}
    given = {f"--{name.replace('_', '-')}": {name: value} for name, value in flags.items()}
    for where, part in {str(args.recipe): table, **given}.items():
        parse_config({**_RECIPE, "guard": part}, where=where)
    return HeldOutGuard(**table | flags)


def render_scan(result: Result) -> str:
    said = f"The guard did not fire in {result['updates']} updates."
    if result["fired"]:
        said = f"The guard fired at step {result['fired_at']}: {result['reason']}."
    elif result["verdict"] == "INSUFFICIENT_DATA":
        said = f"{result['code']}: too little evidence for a verdict: {result['reason']}."
    settings = ", ".join(f"{name} {value:g}" for name, value in result["settings"].items())
    notes = [f"Note: {note}" for note in result["notes"]]
    return "\n".join([said, result["columns_sentence"], f"Guard: {settings}.", *notes])


def run_report(args: argparse.Namespace) -> tuple[Result, int]:
    """Write the report of a run, or of the folder of several replicas, whose page has their tables."""
    from composer_replication.report import page, write_report

    if folders := page.replica_folders(args.run_path):
        return page.write_replicas_report(args.run_path, folders), 0
    return {"report": str(write_report(args.run_path))}, 0


def run_bench(args: argparse.Namespace) -> tuple[Result, int]:
    with needs_extra("bench", "the guard's benchmark"):
        from composer_replication.report.guard_bench import SEED, run_guard_bench

        num_runs, seed = _QUICK_RUNS if args.quick else args.runs, SEED if args.seed is None else args.seed
        with progress_bar(quiet=args.quiet) as report:
            return run_guard_bench(num_runs, args.tasks, seed=seed, families=args.family, report=report), 0


def render_bench(result: Result) -> str:
    from composer_replication.report.guard_bench import plain

    return plain(result)
