"""``composer-rl tasks leakscan``: can a rollout read the deleted code anywhere?"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from composer_replication.cli.argument_types import whole_number
from composer_replication.cli.isolation_flags import (
    add_isolation_flags,
    chosen_backend,
    given_up,
    isolation_lines,
    refuse_without_jail,
)
from composer_replication.cli.progress_bar import progress_bar
from composer_replication.cli.unfinished_build import warn_unfinished

_HERE = "composer_replication.cli.leakscan_command"
_NOT_CLEAN = 4


def add_leakscan(verbs: Any, common: argparse.ArgumentParser) -> None:
    """Add ``leakscan`` to the sub-verbs of ``tasks``; ``common`` brings ``--json`` and ``--quiet``."""
    scan = verbs.add_parser(
        "leakscan",
        parents=[common],
        help="search everything that a rollout can see for the deleted code",
        description="Search the tree, the environment and the whole file system that a sandbox shows for the deleted "
        "code, by a program inside a real sandbox. Exit code 4 when some is found or "
        "a question got no answer.",
    )
    scan.add_argument("folder", metavar="DIR", type=Path, help="a task store")
    scan.add_argument(
        "--jobs", metavar="N", type=whole_number(), default=2, help="sandboxes at a time (default: 2)"
    )
    add_isolation_flags(scan)
    scan.set_defaults(run=f"{_HERE}:run_leakscan", render=f"{_HERE}:render_leakscan")


def run_leakscan(args: argparse.Namespace) -> tuple[dict[str, object], int]:
    """Search a store; exit code 4 when a leak is found or a check got no answer.

    Raises:
        UsageError: an unknown backend (CR0305), or one that isolates nothing, accepted or not (CR0340).
        InputError: not a task store, or a damaged one (CR0410, CR0411).
        SandboxFailure: the sandbox broke, or the search inside it did not end (CR0426).
    """
    from composer_replication.tasks.leaks.leak_scan import scan_store

    why = "what it runs sees this whole machine, the store and the sources with all deleted code among it"
    refuse_without_jail(chosen_backend(args), why)
    with progress_bar(quiet=args.quiet) as report:
        warn_unfinished(args.folder, quiet=args.quiet)
        summary = scan_store(args.folder, jobs=args.jobs, backend=args.backend, progress=report)
    leaks = [{"task_id": leak.task_id, "channel": leak.channel, "path": leak.path} for leak in summary.leaks]
    result: dict[str, object] = {
        "tasks": summary.tasks,
        "leaks": leaks,
        "without_distinctive_lines": list(summary.without_distinctive_lines),
        "files_searched": summary.files_searched,
        "not_searched": list(summary.not_searched),
        "failed_checks": list(summary.failed_checks),
        **given_up(),
    }
    return result, 0 if summary.is_clean else _NOT_CLEAN


def render_leakscan(result: dict[str, Any]) -> str:
    """One line for each leak and each question without answer, what could not be searched, and the counts."""
    lines = [f"LEAK {row['task_id']}  {row['channel']}: {row['path']}" for row in result["leaks"]]
    lines += [f"CHECK FAILED {what}" for what in result["failed_checks"]]
    lines += [f"not searched: {path}" for path in result["not_searched"]]
    lines += [
        f"no distinctive line, searched by code objects only: {task_id}"
        for task_id in result["without_distinctive_lines"]
    ]
    total = (
        f"{len(result['leaks'])} leaks in {result['tasks']} tasks, {result['files_searched']} files searched"
    )
    return "\n".join([*lines, *isolation_lines(result), total])
