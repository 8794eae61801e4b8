"""``composer-rl guard``: ask the guard about a run that any trainer has logged, or measure it."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from composer_replication.cli.flags import whole_number
from composer_replication.cli.terminal import progress_bar
from composer_replication.errors import UsageError, needs_extra

if TYPE_CHECKING:
    from composer_replication.safety import HeldOutGuard

_HERE = "composer_replication.cli.guard_verb"
_HALTED = 5
_TOO_LITTLE = 6
_SETTINGS = {
    "min_steps": (int, "N", "updates before anything may fire"),
    "decline_patience": (int, "N", "updates in a row with truth falling and proxy rising that fire"),
    "ema_alpha": (float, "A", "weight of the past in every average, in [0, 1)"),
    "kl_hard_stop": (float, "NATS", "largest tolerated KL average"),
    "max_proxy_real_gap": (float, "GAP", "largest tolerated rise of proxy over truth, in their unit"),
}

_RUNS, _QUICK_RUNS, _MOST_RUNS = 10_000, 400, 1_000_000
Result = dict[str, Any]


def add_parser(subparsers: Any, common: argparse.ArgumentParser) -> None:
    parser = subparsers.add_parser(
        "guard", help="ask the guard about a log of any trainer, or measure the guard", description=__doc__
    )
    verbs = parser.add_subparsers(dest="guard_verb", metavar="VERB", required=True, title="verbs")
    _add_scan(verbs, common)
    _add_bench(verbs, common)


def _add_scan(verbs: Any, common: argparse.ArgumentParser) -> None:
    scan = verbs.add_parser(
        "scan",
        parents=[common],
        help="what the guard would have said during a run, from its log",
        description="Feed a log to the guard: JSON lines, CSV, trainer_state.json of transformers and TRL, or "
        "TensorBoard event files; or the folder of one. Each value of the truth is one update, with the newest "
        "proxy and KL at or before its step. Exit code 5 when the guard fired, 6 when there were fewer updates "
        "than it needs, 4 when the log cannot be used.",
    )
    scan.add_argument("log", metavar="FILE", type=Path, help="a log, or the folder that holds one")
    scan.add_argument("--proxy", metavar="COL", default="", help="what was trained on (default: guessed)")
    scan.add_argument(
        "--truth",
        metavar="COL",
        default="",
        help="what was never trained on (default: guessed); --truth=-COL where lower is better",
    )
    scan.add_argument(
        "--kl", metavar="COL", default="", help="KL to the initial policy, or none (default: guessed)"
    )
    scan.add_argument("--step", metavar="COL", default="", help="the step (default: found)")
    scan.add_argument(
        "--resumed",
        action="store_true",
        help="steps that fall back are a resumed run: the newer values count",
    )
    scan.add_argument(
        "--recipe", metavar="RUN.toml", type=Path, help="the guard's settings, from its [guard]"
    )
    for name, (kind, metavar, text) in _SETTINGS.items():
        scan.add_argument(f"--{name.replace('_', '-')}", metavar=metavar, type=kind, help=text)
    scan.set_defaults(run=f"{_HERE}:run_scan", render=f"{_HERE}:render_scan")


def run_scan(args: argparse.Namespace) -> tuple[Result, int]:
    """Read the log, replay the guard over it.

    Returns:
        The result and the exit code: 0 nothing fired, 5 the guard fired, 6 fewer updates than
        ``min_steps``. ``fired_at`` is the step of the first update that fired; ``updates`` counts all.
    """
    from composer_replication.report.guard_scan import choose_columns, columns_sentence, readings_of, replay
    from composer_replication.report.run_logs import read_log

    guard = _make_guard(args)
    with needs_extra("tensorboard", "reading TensorBoard event files"):
        log = read_log(args.log, step=args.step, resumed=args.resumed)
    chosen = choose_columns(log, proxy=args.proxy, truth=args.truth, kl=args.kl)
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
        "kind": log.kind,
        "columns": {
            **{role: column and column.spelled for role, column in chosen.items()},
            "step": log.step_column,
        },
        "columns_sentence": columns_sentence(log, chosen),
        "settings": {name: getattr(guard, name) for name in _SETTINGS},
        "notes": [*log.notes, *notes],
    }
    if fired is not None:
        halted = {"fired_at": readings[fired].step, "reason": statuses[fired].reason, "verdict": "halted"}
        return {**result, **halted, "updates_at_fire": fired + 1}, _HALTED
    if len(readings) < guard.min_steps:
        sentence = f"{len(readings)} update(s), and the guard may fire only from update {guard.min_steps} on"
        too_little = {"reason": sentence, "verdict": "INSUFFICIENT_DATA", "code": "CR0638"}
        return {**result, **too_little}, _TOO_LITTLE
    return result, 0


def _make_guard(args: argparse.Namespace) -> HeldOutGuard:
    """The guard's defaults, then the recipe's ``[guard]``, then the flags."""
    from composer_replication.config import GuardSection, parse_config, read_table
    from composer_replication.safety import HeldOutGuard

    table = {"guard": GuardSection().model_dump()} if args.recipe is None else read_table(args.recipe)
    if "guard" not in table:
        fix = "leave out --recipe, or give the settings by flags such as --max-proxy-real-gap 0.35."
        raise UsageError("CR0204", "the recipe has no [guard] table.", where=str(args.recipe), fix=fix)
    only_guard = {"model": {"name": "-"}, "tasks": {"store": "-"}, "heldout": {}, "guard": table["guard"]}
    section = parse_config(only_guard, where=str(args.recipe)).guard or GuardSection()
    flags = {name: getattr(args, name) for name in _SETTINGS if getattr(args, name) is not None}
    try:
        return HeldOutGuard(**section.model_dump() | flags)
    except ValueError as error:
        name = next((name for name in flags if name in str(error)), "")
        where = f"--{name.replace('_', '-')}" if name else f"{args.recipe}, [guard]"
        raise UsageError("CR0204", f"guard: {error}.", where=where, fix="see docs/safety.md.") from error


def render_scan(result: Result) -> str:
    """What a person reads."""
    said = f"The guard did not fire in {result['updates']} updates."
    if result["fired"]:
        said = f"The guard fired at step {result['fired_at']}: {result['reason']}."
    elif result["verdict"] == "INSUFFICIENT_DATA":
        said = f"{result['code']}: too little evidence for a verdict: {result['reason']}."
    settings = ", ".join(f"{name} {value:g}" for name, value in result["settings"].items())
    notes = [f"Note: {note}" for note in result["notes"]]
    return "\n".join([said, result["columns_sentence"], f"Guard: {settings}.", *notes])


def _add_bench(verbs: Any, common: argparse.ArgumentParser) -> None:
    bench = verbs.add_parser(
        "bench",
        parents=[common],
        help="how often the guard halts honest runs, and how soon it sees hacked ones",
        description="Simulate honest and hacked runs with fixed seeds, and put the guard and the "
        "usual rules on them, at nominal thresholds and at ones tuned to 1% false alarms. A full benchmark takes "
        "some minutes on one core.",
    )
    bench.add_argument(
        "--runs",
        metavar="N",
        type=whole_number(1, _MOST_RUNS),
        default=_RUNS,
        help="runs of each honest family; the others have half of it (default: %(default)d)",
    )
    bench.add_argument("--quick", action="store_true", help=f"the same as --runs {_QUICK_RUNS}")
    bench.add_argument(
        "--family",
        metavar="NAME",
        dest="families",
        action="append",
        default=[],
        help="only this family; may be repeated (default: all of docs/guard-bench.md)",
    )
    bench.add_argument(
        "--tasks",
        metavar="N",
        type=whole_number(2, 200),  # a variance needs two; the simulator's products are exact up to there
        default=32,
        help="fresh tasks an evaluation (default: %(default)d)",
    )
    bench.add_argument(
        "--seed", metavar="N", type=whole_number(0, 2**32 - 1), help="of all draws (default: fixed)"
    )
    bench.set_defaults(run=f"{_HERE}:run_bench", render=f"{_HERE}:render_bench")


def run_bench(args: argparse.Namespace) -> tuple[Result, int]:
    """Simulate and measure."""
    with needs_extra("bench", "the guard's benchmark"):
        from composer_replication.report.bench_runs import FAMILIES
        from composer_replication.report.guard_bench import SEED, run_guard_bench

        known = [family.name for family in FAMILIES]
        unknown = next((name for name in args.families if name not in known), None)
        if unknown is not None:
            problem = f"there is no family {unknown!r}."
            raise UsageError("CR0206", problem, where="--family", fix=f"one of {', '.join(known)}")
        with progress_bar(quiet=args.quiet) as report:
            result = run_guard_bench(
                _QUICK_RUNS if args.quick else args.runs,
                args.tasks,
                seed=SEED if args.seed is None else args.seed,
                families=args.families,
                report=report,
            )
    return result, 0


def render_bench(result: Result) -> str:
    """What a person reads."""
    from composer_replication.report.guard_bench import plain

    return plain(result)
