"""``composer-rl report RUN``: write one self-contained HTML file for a run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping


def add_parser(subparsers: Any, common: argparse.ArgumentParser) -> None:
    parser = subparsers.add_parser(
        "report",
        parents=[common],
        help="write one self-contained HTML file for a run",
        description="Write report.html into a run folder: verdict, curves, margins, cost and time, before and after, "
        "three attempts and what they changed. Works on a run that is not finished.",
    )
    parser.add_argument(
        "run_path",
        metavar="RUN",
        type=Path,
        help="the folder that train or quickstart wrote, or that of several replicas",
    )
    parser.set_defaults(run="composer_replication.cli.report_verb:run")


def run(args: argparse.Namespace) -> tuple[dict[str, object], int]:
    """Read the run, write its report."""
    from composer_replication.report import read_run, write_report
    from composer_replication.report.page import replica_folders, write_replicas_report

    if folders := replica_folders(args.run_path):
        return write_replicas_report(args.run_path, folders), 0
    return {"report": str(write_report(read_run(args.run_path)))}, 0


def render(result: Mapping[str, Any]) -> str:
    """What a person reads."""
    return f"Report: {result['report']}"
