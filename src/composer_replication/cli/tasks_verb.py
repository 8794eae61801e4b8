"""``composer-rl tasks``: build, import, validate, search for leaks, look at, export and split tasks."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from composer_replication.cli.flags import (
    chosen_backend,
    given_up,
    isolation_lines,
    refuse_unwritable,
    refuse_without_jail,
)
from composer_replication.cli.show_command import finish_build, licence_lines, warn_unfinished
from composer_replication.cli.terminal import Report, progress_bar, visible
from composer_replication.errors import UsageError, needs_extra

if TYPE_CHECKING:
    from composer_replication.model_endpoint import Endpoint
    from composer_replication.tasks.store import TaskStore

_NOT_PASSED = 4
"""Exit code of a store with a task that does not pass a gate, or with a leak."""

Result = dict[str, object]


# --------------------------------------------------------------------------- build and import


def run_build(args: argparse.Namespace) -> tuple[Result, int]:
    """Build a store."""
    from composer_replication.tasks.build import build_tasks
    from composer_replication.tasks.workers.workers import load_ray

    endpoint = named_endpoint(args)
    backend = chosen_backend(args)  # said now, not after the packages have been fetched
    refuse_unwritable(args.out)
    if args.symbol and len(args.sources) > 1:
        fix = "build each source with its own call, or pin functions in a recipe's [tasks.symbols]."
        raise UsageError("CR0206", "--symbol works with one SOURCE.", where="--symbol", fix=fix)
    if args.ray is not None:
        refuse_without_jail(backend, "the nodes of a cluster are not this machine, on which it was accepted")
        with needs_extra("ray", "a build on a Ray cluster"):
            load_ray()
    with progress_bar(quiet=args.quiet) as report:
        summary = build_tasks(
            args.sources,
            args.out,
            symbols={args.sources[0]: args.symbol} if args.symbol else None,
            granularities=_chosen(args.granularity, "function", "class", "module", "feature"),
            removals=_chosen(args.removal, "body", "whole"),
            max_tasks=args.max_tasks,
            ray_address=args.ray,
            progress=report,
            **_build_settings(args),
        )
    more: Result = {}
    if endpoint is not None and summary.tasks:
        with progress_bar(quiet=args.quiet) as report:
            more = have_written(summary.folder, endpoint, report)
    return finish_build(summary, more, quiet=args.quiet)


def _chosen(given: list[str], *choices: str) -> tuple[Any, ...]:
    """The values of a repeated flag, in the order of its choices; the first where it is not given."""
    wanted = given or [choices[0]]
    return tuple(choice for choice in choices if choice in wanted or "all" in wanted)


def _build_settings(args: argparse.Namespace) -> dict[str, Any]:
    """What ``build_tasks`` and ``import_swebench`` both take."""
    same = {
        name: getattr(args, name) for name in ("seed", "jobs", "hidden_share", "suite_seconds", "backend")
    }
    return same | {"with_truth": not args.visible_only}


def named_endpoint(args: argparse.Namespace) -> Endpoint | None:
    """The endpoint of ``--instructions-…``; None where no text is asked for."""
    from composer_replication.model_endpoint import open_endpoint

    if args.instructions_from is None and not (args.instructions_model or args.instructions_key_env):
        return None
    return open_endpoint(args.instructions_from or "", args.instructions_model, args.instructions_key_env)


def have_written(folder: Path, endpoint: Endpoint, report: Report | None) -> dict[str, Any]:
    """Have instructions written for a finished store; the keys of ``tasks build`` that change."""
    from composer_replication.run_folder import RunFolder
    from composer_replication.tasks.instructions.written_instructions import write_instructions
    from composer_replication.tasks.store import TaskStore

    with RunFolder(folder).locked():
        store = TaskStore.open(folder)
        counts = dict(sorted(write_instructions(store, store.task_ids(), endpoint, progress=report).items()))
        return {"instructions": counts, "bytes": store.num_bytes(), "fingerprint": store.fingerprint}


def run_import(args: argparse.Namespace) -> tuple[Result, int]:
    """Import a task set; the keys are those of ``build``, and ``refused_rows`` says of each why it is no task."""
    from composer_replication.tasks.journal import read_journal
    from composer_replication.tasks.swebench.swebench_import import import_swebench

    chosen_backend(args)
    refuse_unwritable(args.out)
    with progress_bar(quiet=args.quiet) as report:
        repositories, settings = args.repositories, _build_settings(args)
        summary = import_swebench(args.file, args.out, repositories=repositories, progress=report, **settings)
    rows = read_journal(summary.folder / "journal.jsonl")
    refused = {row["pin"]: f"{row['reason']}: {row['detail']}" for row in rows if row["reason"]}
    if not args.quiet:
        sys.stderr.writelines(f"{name}: {why}\n" for name, why in refused.items())
    return finish_build(summary, {"refused_rows": refused}, quiet=args.quiet)


# --------------------------------------------------------------------------- validate and leakscan


def run_validate(args: argparse.Namespace) -> tuple[Result, int]:
    """Validate a store; exit code 4 when a task does not pass."""
    from composer_replication.tasks.validate import validate_store

    chosen_backend(args)
    warn_unfinished(args.folder, quiet=args.quiet)
    with progress_bar(quiet=args.quiet) as report:
        settings = {name: getattr(args, name) for name in ("repeat", "jobs", "resume", "backend")}
        summary = validate_store(args.folder, progress=report, **settings)
    failed = [{"task_id": row.task_id, "gate": row.gate, "detail": row.detail} for row in summary.failed]
    result: Result = {
        "tasks": summary.tasks,
        "passed": summary.passed,
        "failed": failed,
        "without_truth": list(summary.without_truth),
        "taken_over": summary.taken_over,
        "proved_by": [str(sandbox) for sandbox in summary.proved_by],
        "validated_in": str(summary.validated_in),
        **given_up(),
    }
    return result, _NOT_PASSED if failed else 0


def render_validate(result: dict[str, Any]) -> str:
    """One line for each failure, how many tasks have no truth beyond their reward, and the count."""
    lines = [f"FAIL {row['task_id']}  {row['gate']}: {row['detail']}" for row in result["failed"]]
    if without := len(result["without_truth"]):
        lines.append(
            f"{without} of {result['tasks']} tasks have neither hidden tests nor recorded behaviour: "
            "they can be trained on, not held out"
        )
    lines += [*isolation_lines(result), f"{result['passed']} of {result['tasks']} tasks pass all gates"]
    if result.get("taken_over"):
        lines.append(f"{result['taken_over']} of them passed in an earlier call and were not tried again")
    if result.get("validated_in") and result["validated_in"] not in result.get("proved_by", ()):
        proved = " and ".join(result.get("proved_by", ())) or "a sandbox that the store does not name"
        lines.append(f"tried in {result['validated_in']}; built and proven in {proved}")
    return "\n".join(lines)


def run_leakscan(args: argparse.Namespace) -> tuple[Result, int]:
    """Search a store; exit code 4 when a leak is found or a check got no answer."""
    from composer_replication.tasks.leaks.leak_scan import scan_store

    why = "what it runs sees this whole machine, the store and the sources with all deleted code among it"
    refuse_without_jail(chosen_backend(args), why)
    warn_unfinished(args.folder, quiet=args.quiet)
    with progress_bar(quiet=args.quiet) as report:
        summary = scan_store(args.folder, jobs=args.jobs, backend=args.backend, progress=report)
    leaks = [{"task_id": one.task_id, "channel": one.channel, "path": one.path} for one in summary.leaks]
    result: Result = {
        "tasks": summary.tasks,
        "leaks": leaks,
        "without_distinctive_lines": list(summary.without_distinctive_lines),
        "files_searched": summary.files_searched,
        "not_searched": list(summary.not_searched),
        "failed_checks": list(summary.failed_checks),
        **given_up(),
    }
    return result, 0 if summary.is_clean else _NOT_PASSED


def render_leakscan(result: dict[str, Any]) -> str:
    """One line for each leak and each question without answer, what could not be searched, and the counts."""
    blind = "no distinctive line, searched by code objects only"
    lines = [f"LEAK {row['task_id']}  {row['channel']}: {row['path']}" for row in result["leaks"]]
    lines += [f"CHECK FAILED {what}" for what in result["failed_checks"]]
    lines += [f"not searched: {path}" for path in result["not_searched"]]
    lines += [f"{blind}: {task_id}" for task_id in result["without_distinctive_lines"]]
    counts = (
        f"{len(result['leaks'])} leaks in {result['tasks']} tasks, {result['files_searched']} files searched"
    )
    return "\n".join([*lines, *isolation_lines(result), counts])


# --------------------------------------------------------------------------- export


def run_export(args: argparse.Namespace) -> tuple[Result, int]:
    """Write a tree, or with a set format all tasks.

    ``restricted_licences`` has the repositories of what was written whose licence is not permissive or
    unknown; their lines go to standard error, also with ``--quiet``, which is about progress.
    """
    from composer_replication.tasks.build_summary import restricted_licences
    from composer_replication.tasks.store import TaskStore

    is_set, is_file = args.format != "tree", args.format in ("swebench", "parquet")
    if is_set is (args.task_id is not None):
        problem = (
            "a tree is that of one task, and needs its ID; the other formats write all tasks, and take none."
        )
        fix = f"composer-rl tasks show {shlex.quote(str(args.folder))} lists the IDs; --format swebench writes all tasks."
        raise UsageError("CR0206", problem, where=args.task_id or "composer-rl tasks export", fix=fix)
    if args.out.exists() and (is_file or not args.out.is_dir() or any(args.out.iterdir())):
        problem = "the file exists already." if is_file else "the folder is not empty."
        raise UsageError("CR0231", problem, where=str(args.out), fix="choose another --out.")
    refuse_unwritable(args.out.absolute().parent if is_file else args.out)
    store = TaskStore.open(args.folder)
    task_ids = store.require_task_ids() if is_set else [store.get(args.task_id).task_id]
    warn_unfinished(args.folder, quiet=args.quiet)
    written = _write_set(store, args) if is_set else _write_tree(store, args)
    records = [store.repository(slug) for slug in {store.record(one).repository_record for one in task_ids}]
    restricted = restricted_licences({record.repository: record.licence for record in records})
    sys.stderr.writelines(f"{visible(line)}\n" for line in licence_lines(restricted))
    return {**written, "restricted_licences": restricted}, 0


def render_export(result: dict[str, Any]) -> str:
    """One line."""
    if "task_id" not in result:
        return f"{result['tasks']} tasks, {result['bytes']} bytes in {result['out']}"
    return f"{result['task_id']}: {result['files']} files, {result['bytes']} bytes"


def _write_tree(store: TaskStore, args: argparse.Namespace) -> Result:
    task = store.get(args.task_id)
    view: Any = "golden" if args.golden else "rollout"
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
            shape = {"with_golden": args.golden, "as_parquet": args.format == "parquet"}
            tasks = write_instances(store, args.out, progress=report, **shape)
    sizes = [path.stat().st_size for path in (args.out, *args.out.rglob("*")) if path.is_file()]
    return {"tasks": tasks, "out": str(args.out.absolute()), "bytes": sum(sizes)}


# --------------------------------------------------------------------------- split


def run_split(args: argparse.Namespace) -> tuple[Result, int]:
    """Write ``split.json`` into the store's folder."""
    from composer_replication.cli.task_division import FILE_NAME, SplitItem, split_items
    from composer_replication.run_folder import write_json
    from composer_replication.safety import HeldoutSplit
    from composer_replication.tasks.store import TaskStore

    store = TaskStore.open(args.folder)
    warn_unfinished(args.folder, quiet=args.quiet)
    tasks = store.tasks()

    def told(report: Report | None) -> Iterator[SplitItem]:
        """Each is told when it was compared, which is when the next one is asked for."""
        for done, item in enumerate(split_items(store, tasks), start=1):
            yield item
            if report is not None:
                report(done, len(tasks), "comparing tasks")

    with progress_bar(quiet=args.quiet) as report:
        split = HeldoutSplit.split(told(report), args.heldout_fraction, args.seed)
    write_json(store.root / FILE_NAME, split.state_dict())
    result: Result = {"train": list(split.train_ids), "heldout": list(split.heldout_ids)}
    return result | {"fingerprint": split.fingerprint}, 0


def render_split(result: dict[str, Any]) -> str:
    """Counts and fingerprint."""
    return f"{len(result['train'])} train, {len(result['heldout'])} held out, fingerprint {result['fingerprint']}"
