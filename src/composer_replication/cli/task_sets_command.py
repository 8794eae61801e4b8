"""``composer-rl tasks export`` and ``tasks import``: trees of tasks, and task sets in the shapes of SWE-bench and Harbor."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from composer_replication.cli.flags import (
    add_isolation_flags,
    chosen_backend,
    refuse_unwritable,
    whole_number,
)
from composer_replication.cli.show_command import warn_unfinished
from composer_replication.cli.terminal import progress_bar, visible
from composer_replication.errors import UsageError

if TYPE_CHECKING:
    from composer_replication.tasks.store import TaskStore
    from composer_replication.tasks.views import View

_HERE = "composer_replication.cli.task_sets_command"
_SET_FORMATS = ("swebench", "parquet", "harbor")

Result = dict[str, object]


def add_export(verbs: Any, common: argparse.ArgumentParser) -> None:
    """The sub-verb ``export``."""
    export = verbs.add_parser(
        "export",
        parents=[common],
        help="write a task's tree, or all tasks as a task set",
        description="Write the tree of a task exactly as a rollout sees it, with a fresh .git of one commit; with "
        "--golden the restored one. With --format write all tasks: into one file of the SWE-bench shape, patch and hidden tests only with "
        "--golden, or as folders of Harbor, which always hold both, in tests/ and solution/.",
    )
    export.add_argument("folder", metavar="DIR", type=Path, help="a task store")
    export.add_argument("task_id", metavar="ID", nargs="?", help="the task; not with a set format")
    export.add_argument(
        "--format",
        choices=("tree", *_SET_FORMATS),
        default="tree",
        help="a tree, or all tasks as JSON lines (swebench), Parquet or folders of Harbor (default: tree)",
    )
    export.add_argument(
        "--out",
        metavar="PATH",
        type=Path,
        required=True,
        help="a new or empty folder; for swebench and parquet a new file",
    )
    export.add_argument("--golden", action="store_true", help="what no policy may see, too")
    export.set_defaults(run=f"{_HERE}:run_export", render=f"{_HERE}:render_export")


def add_build_flags(parser: argparse.ArgumentParser) -> None:
    """What ``build`` and ``import`` have in common."""
    parser.add_argument("--out", metavar="DIR", type=Path, required=True, help="folder of the task store")
    parser.add_argument("--seed", metavar="N", type=int, default=0, help="draws candidates and hidden tests")
    parser.add_argument(
        "--hidden-share", metavar="F", type=float, default=0.5, help="share of hidden tests (default: 0.5)"
    )
    parser.add_argument(
        "--suite-seconds",
        metavar="N",
        type=float,
        default=30.0,
        help="how long the first run of a repository's whole suite may take; tests that it does not reach are left out "
        "(default: %(default)g)",
    )
    parser.add_argument(
        "--visible-only",
        action="store_true",
        help="keep tasks without a hidden truth: do not record what the deleted functions do, measure nothing",
    )
    parser.add_argument(
        "--jobs", metavar="N", type=whole_number(), default=2, help="sandboxes at a time (default: 2)"
    )
    add_isolation_flags(parser)


def build_settings(args: argparse.Namespace) -> dict[str, Any]:
    """Those flags as ``build_tasks`` and ``import_swebench`` take them."""
    return {
        "seed": args.seed,
        "jobs": args.jobs,
        "hidden_share": args.hidden_share,
        "with_truth": not args.visible_only,
        "suite_seconds": args.suite_seconds,
        "backend": args.backend,
    }


def add_import(verbs: Any, common: argparse.ArgumentParser) -> None:
    """The sub-verb ``import``."""
    parser = verbs.add_parser(
        "import",
        parents=[common],
        help="make a task store of a foreign task set",
        description="Read a task set of the SWE-bench shape and put each row through the gates that our own tasks pass. "
        "Rows that cannot be used are counted by reason and named; the others go on. Interrupted, the same command "
        "goes on. Exit code 6 when no row is a task.",
    )
    parser.add_argument("file", metavar="FILE", type=Path, help="JSON lines, a JSON list, or a .parquet file")
    parser.add_argument("--format", choices=("swebench",), required=True, help="the shape of its rows")
    parser.add_argument(
        "--repositories",
        metavar="FOLDER",
        type=Path,
        help="holds the repositories at their base commits: OWNER__NAME or NAME, with -COMMIT after it or not; folders, "
        "archives or clones (default: fetch them by git)",
    )
    add_build_flags(parser)
    parser.set_defaults(
        run=f"{_HERE}:run_import", render="composer_replication.cli.show_command:render_build"
    )


def run_import(args: argparse.Namespace) -> tuple[Result, int]:
    """Import a task set; the keys are those of ``build``, and ``refused_rows`` says of each why it is no task."""
    from composer_replication.cli.show_command import finish_build
    from composer_replication.tasks.journal import read_journal
    from composer_replication.tasks.swebench.swebench_import import import_swebench

    chosen_backend(args)
    refuse_unwritable(args.out)
    with progress_bar(quiet=args.quiet) as report:
        summary = import_swebench(
            args.file,
            args.out,
            repositories=args.repositories,
            progress=report,
            **build_settings(args),
        )
    rows = read_journal(summary.folder / "journal.jsonl")
    refused = {row["pin"]: f"{row['reason']}: {row['detail']}" for row in rows if row["reason"]}
    if not args.quiet:
        sys.stderr.writelines(f"{name}: {why}\n" for name, why in refused.items())
    return finish_build(summary, {"refused_rows": refused}, quiet=args.quiet)


def run_export(args: argparse.Namespace) -> tuple[Result, int]:
    """Write a tree, or with a set format all tasks.

    ``restricted_licences`` has the repositories of what was written whose licence is not permissive or
    unknown; their lines go to standard error, also with ``--quiet``, which is about progress.
    """
    from composer_replication.tasks.store import TaskStore

    is_set, is_file = args.format != "tree", args.format in ("swebench", "parquet")
    _refuse_unfit(args, is_set=is_set, is_file=is_file)
    refuse_unwritable(args.out.absolute().parent if is_file else args.out)
    store = TaskStore.open(args.folder)
    task_ids = store.require_task_ids() if is_set else [store.get(args.task_id).task_id]
    warn_unfinished(args.folder, quiet=args.quiet)
    written = _write_set(store, args) if is_set else _write_tree(store, args)
    return {**written, "restricted_licences": _say_restricted(store, task_ids)}, 0


def render_export(result: dict[str, Any]) -> str:
    """One line."""
    if "task_id" not in result:
        return f"{result['tasks']} tasks, {result['bytes']} bytes in {result['out']}"
    return f"{result['task_id']}: {result['files']} files, {result['bytes']} bytes"


def _refuse_unfit(args: argparse.Namespace, *, is_set: bool, is_file: bool) -> None:
    """An ID and a format that do not go together, or a place that is taken."""
    if is_set is (args.task_id is not None):
        raise UsageError(
            "CR0206",
            "a tree is that of one task, and needs its ID; the other formats write all tasks, and take none.",
            where=args.task_id or "composer-rl tasks export",
            fix=f"composer-rl tasks show {shlex.quote(str(args.folder))} lists the IDs; --format swebench writes all tasks.",
        )
    is_empty = args.out.is_dir() and not any(args.out.iterdir())
    if args.out.exists() and (is_file or not is_empty):
        what, kind = ("the file exists already", "FILE") if is_file else ("the folder is not empty", "FOLDER")
        raise UsageError("CR0231", f"{what}.", where=str(args.out), fix=f"choose another --out {kind}.")


def _write_tree(store: TaskStore, args: argparse.Namespace) -> Result:
    task = store.get(args.task_id)
    view: View = "golden" if args.golden else "rollout"
    store.write_tree(task, args.out, view=view)
    sizes = [len(data) for data in store.files(task, view).values()]  # without the fresh .git
    return {"task_id": task.task_id, "files": len(sizes), "bytes": sum(sizes)}


def _write_set(store: TaskStore, args: argparse.Namespace) -> Result:
    from composer_replication.tasks.harbor_tasks import write_harbor_tasks
    from composer_replication.tasks.swebench.swebench_files import write_instances

    with progress_bar(quiet=args.quiet) as report:
        if args.format == "harbor":
            tasks = write_harbor_tasks(store, args.out, progress=report)
        else:
            as_parquet = args.format == "parquet"
            tasks = write_instances(
                store, args.out, with_golden=args.golden, as_parquet=as_parquet, progress=report
            )
    sizes = [path.stat().st_size for path in (args.out, *args.out.rglob("*")) if path.is_file()]
    return {"tasks": tasks, "out": str(args.out.absolute()), "bytes": sum(sizes)}


def _say_restricted(store: TaskStore, task_ids: Sequence[str]) -> dict[str, str]:
    """Print what the build says of the licences of these tasks' repositories, and return it."""
    from composer_replication.cli.show_command import licence_lines
    from composer_replication.tasks.build_summary import restricted_licences

    slugs = sorted({store.record(task_id).repository_record for task_id in task_ids})
    records = [store.repository(slug) for slug in slugs]
    restricted = restricted_licences({record.repository: record.licence for record in records})
    for line in licence_lines(restricted):
        sys.stderr.write(f"{visible(line)}\n")
    return restricted
