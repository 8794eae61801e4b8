"""``composer-rl report RUN``: write one self-contained HTML file for a run."""

from __future__ import annotations

import argparse


def run(args: argparse.Namespace) -> tuple[dict[str, object], int]:
    """Read the run, write its report."""
    from composer_replication.report import write_report
    from composer_replication.report.page import replica_folders, write_replicas_report

    if folders := replica_folders(args.run_path):
        return write_replicas_report(args.run_path, folders), 0
    return {"report": str(write_report(args.run_path))}, 0


def render(result: dict[str, object]) -> str:
    """Of several replicas, too: the page has their tables."""
    return f"Report: {result['report']}"
