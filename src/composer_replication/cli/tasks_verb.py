"""``composer-rl tasks``: build, import, validate, search for leaks, look at, export and split tasks."""

from __future__ import annotations

import argparse
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from composer_replication.cli import flags
from composer_replication.cli.task_division import FILE_NAME
from composer_replication.cli.terminal import Report, columns, counted, note, progress_bar
from composer_replication.errors import UsageError
from composer_replication.model_endpoint import Endpoint, open_endpoint
from composer_replication.records import Task
from composer_replication.run_folder import RunFolder, read_jsonl, write_json
from composer_replication.safety import HeldoutSplit
from composer_replication.tasks import instructions
from composer_replication.tasks.build import BuildSummary, build_tasks, restricted_licences
from composer_replication.tasks.difficulty import read_difficulty
from composer_replication.tasks.gates import golden_patch
from composer_replication.tasks.harbor_tasks import write_harbor_tasks
from composer_replication.tasks.leaks.leak_scan import scan_store
from composer_replication.tasks.repository import unused_tests
from composer_replication.tasks.store import TaskStore
from composer_replication.tasks.store_manifest import is_settled
from composer_replication.tasks.swebench import import_swebench, write_instances
from composer_replication.tasks.validate import validate_store

_NOT_PASSED = 4  # exit code of a store with a task that does not pass a gate, or with a leak
Result = dict[str, object]


def run_build(args: argparse.Namespace) -> tuple[Result, int]:
    written_by = (args.instructions_from or "", args.instructions_model, args.instructions_key_env)
    endpoint = open_endpoint(*written_by) if any(written_by) or args.instructions_from is not None else None
    backend = flags.chosen_backend(args)  # said now, not after the packages have been fetched
    flags.refuse_unwritable(args.out)
    if args.symbol and len(args.sources) > 1:
        fix = "build each source with its own call, or pin functions in a recipe's [tasks.symbols]."
        raise UsageError("CR0206", "--symbol works with one SOURCE.", where="--symbol", fix=fix)
    if args.ray is not None:
        flags.refuse_without_jail(
            backend, "the nodes of a cluster are not this machine, on which it was accepted"
        )
        flags.check_cluster(args.ray, "a build on a Ray cluster")
    with progress_bar(quiet=args.quiet) as report:
        summary = build_tasks(
            args.sources,
            args.out,
            symbols={args.sources[0]: args.symbol} if args.symbol else {},
            granularities=_chosen(args.granularity, "function", "class", "module", "feature"),
            removals=_chosen(args.removal, "body", "whole"),
            max_tasks=args.max_tasks,
            ray_address=args.ray,
            progress=report,
            **_build_settings(args),
        )
        more: Result = {}
        if endpoint is not None and summary.tasks:
            more = have_written(summary.folder, endpoint, report)
    return finish_build(summary, more, quiet=args.quiet)


def _chosen(given: list[str], *choices: str) -> tuple[Any, ...]:
    """The values of a repeated flag, in the order of its choices; the first where it is not given."""
    wanted = given or [choices[0]]
    return tuple(choice for choice in choices if choice in wanted or "all" in wanted)


def _build_settings(args: argparse.Namespace) -> dict[str, Any]:
    """What ``build_tasks`` and ``import_swebench`` both take."""
    names = ("seed", "jobs", "hidden_share", "suite_seconds", "backend")
    return {name: getattr(args, name) for name in names} | {"with_truth": not args.visible_only}


def have_written(folder: Path, endpoint: Endpoint, report: Report | None) -> dict[str, Any]:
    """Have instructions written for a finished store; the keys of ``tasks build`` that change."""
    with RunFolder(folder).locked():
        store = TaskStore.open(folder)
        written = instructions.write_instructions(store, store.task_ids(), endpoint, progress=report)
        counts = dict(sorted(written.items()))
        return {"instructions": counts, "bytes": store.num_bytes(), "fingerprint": store.fingerprint}


def run_import(args: argparse.Namespace) -> tuple[Result, int]:
    """Import a task set; the keys are those of ``build``, and ``refused_rows`` says of each why it is no task."""
    flags.chosen_backend(args)
    flags.refuse_unwritable(args.out)
    settings = {"repositories": args.repositories, **_build_settings(args)}
    with progress_bar(quiet=args.quiet) as report:
        summary = import_swebench(args.file, args.out, progress=report, **settings)
    rows = read_jsonl(summary.folder / "journal.jsonl")
    refused = {row["pin"]: f"{row['reason']}: {row['detail']}" for row in rows if row["reason"]}
    return finish_build(summary, {"refused_rows": refused}, quiet=args.quiet)


def finish_build(summary: BuildSummary, more: Mapping[str, object], *, quiet: bool) -> tuple[Result, int]:
    """Keep the summary of a build with ``more`` keys, say what comes next, and give what is printed."""
    not_told = {"folder", "examples", "licences"}
    result: Result = {
        **{name: value for name, value in asdict(summary).items() if name not in not_told},
        "seconds": round(summary.seconds, 3),
        "restricted_licences": restricted_licences(summary.licences),
        **more,
        **flags.given_up(),
    }
    write_json(summary.folder / "summary.json", result)
    summary.require_tasks()
    if not quiet:
        note(f"Next: composer-rl recipe new --tasks {shlex.quote(str(summary.folder))} --model MODEL")
    return result, 0


def run_validate(args: argparse.Namespace) -> tuple[Result, int]:
    flags.chosen_backend(args)
    with progress_bar(quiet=args.quiet) as report:
        settings = {name: getattr(args, name) for name in ("repeat", "jobs", "backend")}
        summary = validate_store(args.folder, progress=report, **settings)
    return {**asdict(summary), **flags.given_up()}, _NOT_PASSED if summary.failed else 0


def run_leakscan(args: argparse.Namespace) -> tuple[Result, int]:
    why = "what it runs sees this whole machine, the store and the sources with all deleted code among it"
    flags.refuse_without_jail(flags.chosen_backend(args), why)
    with progress_bar(quiet=args.quiet) as report:
        summary = scan_store(args.folder, jobs=args.jobs, backend=args.backend, progress=report)
    return {**asdict(summary), **flags.given_up()}, 0 if summary.is_clean else _NOT_PASSED


def run_show(args: argparse.Namespace) -> tuple[Result, int]:
    """List tasks, without golden code and without the names of hidden tests.

    With ``--golden`` the one task has its ``golden_patch``: the diff that turns the broken sources into the original ones.
    """
    if args.golden and not args.task_id:
        problem = "--golden shows the patch of one task, and no ID is given."
        fix = f"composer-rl tasks show {shlex.quote(str(args.folder))} lists the IDs."
        raise UsageError("CR0206", problem, where="--golden", fix=fix)
    store = TaskStore.open(args.folder)
    tasks = [store.get(args.task_id)] if args.task_id else list(store.tasks())
    rows = [_row(store, task) for task in tasks]
    if args.task_id:
        rows[0] |= _details(store, tasks[0])
    if args.golden:
        rows[0]["golden_patch"] = golden_patch(store, tasks[0])
    return {"tasks": rows, **_counts(store, tasks)}, 0


def _row(store: TaskStore, task: Task) -> Result:
    same = ("task_id", "repository", "symbol", "granularity", "removal", "path")
    return {
        **{name: getattr(task, name) for name in same},
        "line": instructions.first_broken_line(store, task),
        "files": sorted({*(hole.path for hole in task.holes), *task.removed_files}),
        "num_holes": len(task.holes),
        "num_body_lines": task.num_body_lines,
        "visible_tests": list(task.tests.visible),
        "paid_tests": list(task.tests.paid),
        "num_hidden_tests": len(task.tests.hidden),
        "num_recorded": task.num_twins,
        "num_pass_to_pass": len(task.tests.pass_to_pass),
        "environment": task.environment,
    }


def _details(store: TaskStore, task: Task) -> Result:
    """What is looked up for one task only."""
    measured = read_difficulty(store.root)
    written = instructions.written_instruction(store, task.task_id)
    records = (store.record(task.task_id), store.secret(task.task_id))
    strength = next((found for record in records if (found := getattr(record, "strength", None))), None)
    kept = ("mutants", "killed_visible", "killed_all")
    return {
        "strength": strength and {name: int(strength[name]) for name in kept},
        "difficulty": [row.to_json() for row in measured.get(task.task_id, ())],
        "instruction": instructions.write_instruction(store, task),
        "written_instruction": None if written is None else {"model": written.model, "text": written.text},
    }


def _counts(store: TaskStore, tasks: Sequence[Task]) -> Result:
    def by(name: str) -> dict[str, int]:
        return dict(sorted(Counter(str(getattr(task, name)) for task in tasks).items()))

    return {
        "proved_by": list(store.proved_by),
        "by_repo": by("repository"),
        "by_granularity": by("granularity"),
        "by_removal": by("removal"),
        "fail_to_pass": sum(len(task.fail_to_pass) for task in tasks),
        "hidden": sum(task.has_hidden_tests for task in tasks),
        "recorded": sum(task.num_twins > 0 for task in tasks),
    }


def render_show(result: dict[str, Any]) -> str:
    """One task is all that may be known of it; several are a line each."""
    rows = result["tasks"]
    if len(rows) == 1 and "instruction" in rows[0]:
        return columns(rows[0])
    lines = []
    for row in rows:
        place = row["path"] if row["line"] is None else f"{row['path']}:{row['line']}"
        tests = f"{len(row['visible_tests'])} visible and {row['num_hidden_tests']} hidden tests"
        lines.append(f"{row['task_id']}\n    {place}  {row['num_body_lines']} lines deleted, {tests}")
    lines += [f"proven in {' and '.join(result['proved_by'])}"] if lines and result["proved_by"] else []
    return "\n".join(lines) or "The store holds no task."


def run_stats(args: argparse.Namespace) -> tuple[Result, int]:
    """Count tasks; ``hidden`` counts those with hidden tests or recorded behaviour, ``recorded`` those with the latter.

    ``flaky`` names tests that were left out, ``unused_tests`` what became of the others; ``unfinished`` is a sentence where
    the build was cut off; ``proved_by`` names the sandboxes in which the tasks were proven.
    """
    store = TaskStore.open(args.folder)
    tasks, repositories = store.tasks(), {record.repository: record for record in store.repositories()}
    licences = {name: record.licence for name, record in repositories.items()}
    return {
        "tasks": len(tasks),
        "unfinished": unfinished(args.folder),
        **_counts(store, tasks),
        "licences": {name: licence.to_json() for name, licence in licences.items()},
        "restricted_licences": restricted_licences(licences),
        "flaky": {name: list(record.flaky) for name, record in repositories.items()},
        "unused_tests": {name: unused_tests(record) for name, record in repositories.items()},
    }, 0


def unfinished(folder: Path) -> str:
    """One sentence for a build that was cut off, with what finishes it; empty where it came to its end."""
    if is_settled(folder):
        return ""
    again = "to finish it: the same composer-rl tasks command that began it, once more"
    return f"The build of this store was cut off, its tasks are whole but not all there; {again}"


def run_export(args: argparse.Namespace) -> tuple[Result, int]:
    """Write a tree, or with a set format all tasks; ``restricted_licences`` are those that are not permissive."""
    is_set, is_file = args.format != "tree", args.format == "swebench"
    if is_set is (args.task_id is not None):
        problem = "a tree is that of one task and needs its ID; the other formats write all and take none."
        ids = f"composer-rl tasks show {shlex.quote(str(args.folder))} lists the IDs"
        where, fix = args.task_id or "composer-rl tasks export", f"{ids}; --format swebench writes all tasks."
        raise UsageError("CR0206", problem, where=where, fix=fix)
    if args.out.exists() and (is_file or not args.out.is_dir() or any(args.out.iterdir())):
        problem = "the file exists already." if is_file else "the folder is not empty."
        raise UsageError("CR0231", problem, where=str(args.out), fix="choose another --out.")
    flags.refuse_unwritable(args.out.absolute().parent if is_file else args.out)
    store = TaskStore.open(args.folder)
    task_ids = store.require_task_ids() if is_set else [store.get(args.task_id).task_id]
    written = _written(store, args)
    records = [store.repository(slug) for slug in {store.record(one).repository_record for one in task_ids}]
    licences = {record.repository: record.licence for record in records}
    return {**written, "restricted_licences": restricted_licences(licences)}, 0


def _written(store: TaskStore, args: argparse.Namespace) -> Result:
    if args.format == "tree":
        task = store.get(args.task_id)
        view: Any = "golden" if args.golden else "rollout"
        store.write_tree(task, args.out, view=view)
        sizes = [len(data) for data in store.files(task, view).values()]  # without the fresh .git
        return {"task_id": task.task_id, "files": len(sizes), "bytes": sum(sizes)}
    with progress_bar(quiet=args.quiet) as report:
        if args.format == "harbor":
            tasks = write_harbor_tasks(store, args.out, progress=report)
        else:
            tasks = write_instances(store, args.out, with_golden=args.golden, progress=report)
    sizes = [path.stat().st_size for path in (args.out, *args.out.rglob("*")) if path.is_file()]
    return {"tasks": tasks, "out": str(args.out.absolute()), "bytes": sum(sizes)}


def run_split(args: argparse.Namespace) -> tuple[Result, int]:
    """Write ``split.json`` into the store's folder."""
    store = TaskStore.open(args.folder)
    with progress_bar(quiet=args.quiet) as report:
        items = map(store.content, counted(store.tasks(), report, "comparing tasks"))
        split = HeldoutSplit.split(items, args.heldout_fraction, args.seed)
    write_json(store.root / FILE_NAME, split.state_dict())
    result: Result = {"train": list(split.train_ids), "heldout": list(split.heldout_ids)}
    return result | {"fingerprint": split.fingerprint}, 0
