"""``composer-rl guard bench``: false alarms and detection delay of the guard and of other rules."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from composer_replication.report.guard_bench import BenchResult

_HERE = "composer_replication.cli.guard_bench_command"
_DEFAULT_RUNS = 10_000
_QUICK_RUNS = 400
_MOST_RUNS = 1_000_000
_FEWEST_TASKS, _MOST_TASKS = 2, 200  # a variance needs two; the simulator's products are exact up to there
_FAMILIES = (
    "clean",
    "at-g0",
    "boundary",
    "largest-variance",
    "noisy-rewards",
    "autocorrelated",
    "adversary",
    "guard-watching",
    "jump",
    "small-jump",
    "ramp",
    "drift",
    "sparse",
    "noisy-jump",
    "jump-in-waves",
    "collapse",
    "leak",
    "same-tasks",
    "common-shock",
    "dropped",
    "repeated",
)
"""The families of ``report.bench_families``, whose module is too heavy for ``--help``."""


def add_bench(verbs: Any, common: argparse.ArgumentParser) -> None:
    """Add ``bench`` to the sub-verbs of ``guard``; ``common`` brings ``--json`` and ``--quiet``."""
    bench = verbs.add_parser(
        "bench",
        parents=[common],
        help="how often the guard halts honest runs, and how soon it sees hacked ones",
        description="Simulate honest, hacked and wrongly measured runs with fixed seeds; put the guard and the usual "
        "rules on them, at nominal thresholds and at ones tuned to 1% false alarms; add recorded real "
        "runs. A full benchmark takes some minutes on one core.",
        epilog="Families: " + ", ".join(_FAMILIES) + ".",
    )
    bench.add_argument(
        "--runs",
        metavar="N",
        type=_count(1, _MOST_RUNS),
        default=_DEFAULT_RUNS,
        help="runs of each honest family; the others have half of it (default: %(default)d)",
    )
    bench.add_argument("--quick", action="store_true", help=f"the same as --runs {_QUICK_RUNS}")
    bench.add_argument(
        "--family",
        metavar="NAME",
        dest="families",
        action="append",
        choices=_FAMILIES,
        default=[],
        help="only this family; may be repeated (default: all, listed below)",
    )
    bench.add_argument(
        "--tasks",
        metavar="N",
        type=_count(_FEWEST_TASKS, _MOST_TASKS),
        default=32,
        help="fresh tasks an evaluation (default: %(default)d)",
    )
    bench.add_argument(
        "--seed", metavar="N", type=_count(0, 2**32 - 1), default=None, help="of all draws (default: fixed)"
    )
    bench.add_argument(
        "--recorded",
        metavar="FOLDER",
        type=Path,
        help="a recorded run, or a folder of them (default: those of a source checkout)",
    )
    bench.add_argument(
        "--out",
        metavar="FOLDER",
        type=Path,
        help="write summary.json, guard-bench.md, operating_curve.svg and calibration.svg there",
    )
    bench.set_defaults(run=f"{_HERE}:run_bench", render=f"{_HERE}:render_bench")


def run_bench(args: argparse.Namespace) -> tuple[BenchResult, int]:
    """Simulate and measure.

    Raises:
        UsageError: the output folder cannot be written (CR0209).
        InputError: the recorded runs cannot be read (CR0650 to CR0652, CR0483).
        MissingError: numpy is not installed (CR0101).
    """
    from composer_replication.cli.needed_packages import needs_extra
    from composer_replication.cli.output_folder import refuse_unwritable
    from composer_replication.cli.progress_bar import progress_bar

    if args.out is not None:
        refuse_unwritable(args.out)
    with needs_extra("bench", "the guard's benchmark"):
        from composer_replication.report.bench_recorded import shipped_recordings
        from composer_replication.report.guard_bench import SEED, BenchSettings, run_guard_bench

        settings = BenchSettings(
            num_runs=_QUICK_RUNS if args.quick else args.runs,
            num_tasks=args.tasks,
            seed=SEED if args.seed is None else args.seed,
            families=tuple(args.families),
            recorded=shipped_recordings() if args.recorded is None else args.recorded,
        )
        with progress_bar(quiet=args.quiet) as report:
            result = run_guard_bench(settings, report)
    if args.out is not None:
        _write(args.out, result)
    return result, 0


def _write(folder: Path, result: BenchResult) -> None:
    from composer_replication.report.bench_charts import calibration, operating_curve
    from composer_replication.report.bench_tables import markdown
    from composer_replication.run_folder import write_atomic, write_json

    folder.mkdir(parents=True, exist_ok=True)
    result["out"] = str(folder.resolve())
    write_atomic(folder / "guard-bench.md", markdown(result))
    write_atomic(folder / "operating_curve.svg", operating_curve(result))
    write_atomic(folder / "calibration.svg", calibration(result))
    write_json(folder / "summary.json", result)


def render_bench(result: BenchResult) -> str:
    """What a person reads."""
    from composer_replication.report.bench_tables import plain

    return plain(result) + (f"\n\nWritten: {result['out']}" if "out" in result else "")


def _count(least: int, most: int) -> Callable[[str], int]:
    def count(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number in {least} … {most}")
        return value

    return count
