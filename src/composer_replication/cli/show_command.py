"""``composer-rl tasks show`` and ``tasks stats``, and what ``tasks build`` and ``tasks import`` say of a build."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from composer_replication.cli.flags import given_up, isolation_lines
from composer_replication.cli.terminal import visible
from composer_replication.errors import UsageError

if TYPE_CHECKING:
    from composer_replication.records import Task
    from composer_replication.tasks.build_summary import BuildSummary
    from composer_replication.tasks.store import TaskStore

_HERE = "composer_replication.cli.show_command"
_TEXTS = (
    "broken_region",
    "visible_tests",
    "paid_tests",
    "instruction",
    "written_instruction",
    "golden_patch",
)
"""What has a heading of its own on the page of a task."""

Result = dict[str, object]


def add_views(verbs: Any, common: argparse.ArgumentParser) -> None:
    """Add both to the sub-verbs of ``tasks``."""
    show = verbs.add_parser("show", parents=[common], help="list the tasks, or look at one")
    show.add_argument("folder", metavar="DIR", type=Path, help="a task store")
    show.add_argument("task_id", metavar="ID", nargs="?", help="one task: what it asks for, its tests")
    show.add_argument("--golden", action="store_true", help="the patch that puts its code back, too")
    show.set_defaults(run=f"{_HERE}:run_show", render=f"{_HERE}:render_show")
    stats = verbs.add_parser("stats", parents=[common], help="count the tasks")
    stats.add_argument("folder", metavar="DIR", type=Path, help="a task store")
    stats.set_defaults(run=f"{_HERE}:run_stats", render=f"{_HERE}:render_stats")


# --------------------------------------------------------------------------- show


def run_show(args: argparse.Namespace) -> tuple[Result, int]:
    """List tasks, without golden code and without the names of hidden tests.

    With ``--golden`` the one task has its ``golden_patch``: the unified diff that turns the broken sources into
    the original ones, as the gates had git apply it. Tests are no part of it.
    """
    from composer_replication.tasks.store import TaskStore
    from composer_replication.tasks.subject import golden_patch

    with_golden = getattr(args, "golden", False)
    if with_golden and not args.task_id:
        problem = "--golden shows the patch of one task, and no ID is given."
        fix = f"composer-rl tasks show {shlex.quote(str(args.folder))} lists the IDs."
        raise UsageError("CR0206", problem, where="--golden", fix=fix)
    store = TaskStore.open(args.folder)
    warn_unfinished(args.folder, quiet=getattr(args, "quiet", False))
    tasks = [store.get(args.task_id)] if args.task_id else list(store.tasks())
    rows = [_row(store, task) for task in tasks]
    if args.task_id:
        rows[0] |= _details(store, tasks[0])
    if with_golden:
        rows[0]["golden_patch"] = golden_patch(store, tasks[0])
    return {"tasks": rows, **_counts(store, tasks)}, 0


def _row(store: TaskStore, task: Task) -> Result:
    from composer_replication.tasks.instructions.surroundings import first_broken_line

    return {
        "task_id": task.task_id,
        "repository": task.repository,
        "symbol": task.symbol,
        "granularity": task.granularity,
        "removal": task.removal,
        "path": task.path,
        "line": first_broken_line(store, task),
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
    from composer_replication.tasks.difficulty import compare_difficulty
    from composer_replication.tasks.instructions.surroundings import broken_regions
    from composer_replication.tasks.instructions.writing import write_instruction
    from composer_replication.tasks.instructions.written_instructions import written_instruction

    measured = compare_difficulty(store.root, only=[task.task_id])
    written = written_instruction(store, task.task_id)
    records = (store.record(task.task_id), store.secret(task.task_id))
    strength = next((found for record in records if (found := getattr(record, "strength", None))), None)
    kept = ("mutants", "killed_visible", "killed_all")
    return {
        "instruction": write_instruction(store, task),
        "written_instruction": None if written is None else {"model": written.model, "text": written.text},
        "broken_region": broken_regions(store, task),
        "strength": strength and {name: int(strength[name]) for name in kept},
        "difficulty": [row.to_json() for row in measured.fitting.get(task.task_id, ())],
        "outdated_difficulty": measured.num_outdated.get(task.task_id, 0),
    }


def _counts(store: TaskStore, tasks: Sequence[Task]) -> Result:
    def by(values: list[str]) -> dict[str, int]:
        return dict(sorted(Counter(values).items()))

    return {
        "proved_by": [str(sandbox) for sandbox in store.proved_by],
        "by_repo": by([task.repository for task in tasks]),
        "by_granularity": by([task.granularity for task in tasks]),
        "by_removal": by([task.removal for task in tasks]),
        "fail_to_pass": sum(len(task.fail_to_pass) for task in tasks),
        "hidden": sum(task.has_hidden_tests for task in tasks),
        "recorded": sum(task.num_twins > 0 for task in tasks),
    }


def render_show(result: dict[str, Any]) -> str:
    """One line a task; for one that was asked for by name, the whole of what may be known."""
    rows = result["tasks"]
    if len(rows) == 1 and "instruction" in rows[0]:
        return _page(rows[0])
    lines = []
    for row in rows:
        place = row["path"] if row["line"] is None else f"{row['path']}:{row['line']}"
        tests = f"{len(row['visible_tests'])} visible and {row['num_hidden_tests']} hidden tests"
        lines.append(f"{row['task_id']}\n    {place}  {row['num_body_lines']} lines deleted, {tests}")
    return "\n".join([*lines, *_proof_lines(result)]) if lines else "The store holds no task."


def _page(row: dict[str, Any]) -> str:
    """One task; without ``golden_patch`` the row holds neither golden code nor the name of a hidden test, so the page does not."""
    lines = [row["task_id"], ""]
    for name, value in row.items():
        if value and name not in _TEXTS and name != "task_id":
            each = value if name == "difficulty" else [value]
            lines += [f"  {name.replace('_', ' '):<20} {_words(one)}" for one in each]
    for name in _TEXTS:
        if value := row.get(name):
            heading = name.replace("_", " ").capitalize()
            if isinstance(value, dict):
                heading, value = f"{heading}, by {value['model']}", value["text"]
            lines += ["", heading, "\n".join(value) if isinstance(value, list) else value.rstrip("\n")]
    return visible("\n".join(lines))


def _words(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name.replace('_', ' ')} {_words(each)}" for name, each in value.items())
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _proof_lines(result: Mapping[str, Any]) -> list[str]:
    """One line, for a store that knows it."""
    proved = result.get("proved_by", ())
    return [f"proven in {' and '.join(proved)}"] if proved else []


# --------------------------------------------------------------------------- stats


def run_stats(args: argparse.Namespace) -> tuple[Result, int]:
    """Count tasks; ``hidden`` counts those with hidden tests or recorded behaviour, ``recorded`` those with the
    latter, ``flaky`` names left-out tests.

    ``unfinished`` is a sentence where the build was cut off. ``licences`` says under which licence
    each repository comes, ``spdx`` null where that is unknown; ``unused_tests`` what became of the tests of each
    repository (``UnusedTests``). ``proved_by`` names the sandboxes in which the tasks were proven.
    """
    from composer_replication.tasks.repository import slug_of
    from composer_replication.tasks.store import TaskStore
    from composer_replication.tasks.unused_tests import read_unused

    store = TaskStore.open(args.folder)
    tasks, repositories = store.tasks(), store.repositories()
    return {
        "tasks": len(tasks),
        "unfinished": unfinished(args.folder),
        **_counts(store, tasks),
        "licences": {record.repository: record.licence.to_json() for record in repositories},
        "flaky": {r.repository: None if r.flaky is None else list(r.flaky) for r in repositories},
        "unused_tests": {
            record.repository: read_unused(store.root, slug_of(record.repository), record).to_json()
            for record in repositories
        },
    }, 0


def render_stats(result: dict[str, Any]) -> str:
    """The counts as a small table."""
    from composer_replication.tasks.intake.licences import Licence

    truth = f"{result['hidden']} with hidden tests or recorded behaviour ({result['recorded']} recorded)"
    lines = [f"{result['tasks']} tasks, {truth}, {result['fail_to_pass']} failing tests"]
    for title, counts in (("by_repo", "repository"), ("by_granularity", "size"), ("by_removal", "removed")):
        lines += [f"{count:>6}  {counts} {name}" for name, count in result[title].items()]
    lines += _proof_lines(result)
    for name, value in result["licences"].items():
        licence = Licence.from_json(value)
        lines.append(f"{name}: {licence.restriction or licence.spdx}")
    lines += [result["unfinished"]] if result.get("unfinished") else []
    return "\n".join([*lines, *unused_lines(result)])


def unused_lines(result: Mapping[str, Any]) -> list[str]:
    """Repositories of which tests are never green or files could not be collected, with the first reason, or of which tests are flaky."""
    lines = []
    for name, found in result.get("unused_tests", {}).items():
        num_red = found["never_green"]
        if num_red is None:  # of an earlier version, which did not count the skipped ones apart
            num_red = found["collected"] - found["used"] - found["flaky"]
        if num_red or found["broken_files"]:
            first = f" (first: {found['first_reason']})" if found["first_reason"] else ""
            red = f"{num_red} never green, {found['broken_files']} files not collected"
            lines.append(f"{name}: {found['used']} of {found['collected']} tests are used, {red}{first}")
    for name, tests in result.get("flaky", {}).items():
        lines += [f"{name}: flaky tests left out: {len(tests)}"] if tests else []
        lines += [f"    {test}" for test in tests or ()]
    return lines


def unfinished(folder: Path) -> str:
    """One sentence with the command that finishes a build which was cut off; empty where it came to its end, or nobody noted it."""
    from composer_replication.tasks.store_manifest import NAME, read_manifest

    mark = read_manifest(folder).build if (folder / NAME).is_file() else None
    if mark is None or mark.is_complete:
        return ""
    what = mark.command or "the same command that began it"
    return f"The build of this store was cut off, its tasks are whole but not all there; to finish it: {what}"


def warn_unfinished(folder: Path, *, quiet: bool) -> None:
    """Print the sentence, if there is one, on standard error."""
    sentence = "" if quiet else unfinished(folder)
    if sentence:
        sys.stderr.write(f"{sentence}\n")


# --------------------------------------------------------------------------- builds


def finish_build(
    summary: BuildSummary, more: Mapping[str, object] | None = None, *, quiet: bool
) -> tuple[Result, int]:
    """Keep the summary of a build with ``more`` keys, say what comes next, and give what is printed."""
    from composer_replication.run_folder import write_json

    result: Result = {
        "tasks": summary.tasks,
        "candidates": summary.candidates,
        "valid": summary.valid,
        "rejected": dict(summary.rejected),
        "seconds": round(summary.seconds, 3),
        "bytes": summary.bytes,
        "fingerprint": summary.fingerprint,
        "unused_tests": {name: found.to_json() for name, found in summary.unused_tests.items()},
        "flaky": {name: list(tests) for name, tests in summary.flaky.items()},
        "unusable": dict(summary.unusable),
        "unrecorded": {name: dict(pins) for name, pins in summary.unrecorded.items()},
        "restricted_licences": summary.restricted(),
        **(more or {}),
        **given_up(),
    }
    write_json(summary.folder / "summary.json", result)
    summary.require_tasks()
    if not quiet:
        folder = shlex.quote(str(summary.folder))
        sys.stderr.write(f"Next: composer-rl recipe new --tasks {folder} --model MODEL\n")
    return result, 0


def render_build(result: dict[str, Any]) -> str:
    """Counts, and why candidates were not taken."""
    lines = [f"{result['tasks']} tasks of {result['candidates']} candidates in {result['seconds']:.0f} s"]
    lines += [f"  rejected {count:>5}  {reason}" for reason, count in result["rejected"].items()]
    lines += [f"  instructions {count:>5}  {what}" for what, count in result.get("instructions", {}).items()]
    lines += [f"  not usable: {source}: {why}" for source, why in result["unusable"].items()]
    lines += [f"  {line}" for line in isolation_lines(result)]
    lines += [*unused_lines(result), *licence_lines(result.get("restricted_licences", {}))]
    for name, pins in result["unrecorded"].items():
        what = f"behaviour of {len(pins)} functions of {name} could not be recorded"
        lines.append(f"  {what}: {next(iter(pins.values()))}; the same command tries again")
    return "\n".join([*lines, f"fingerprint {result['fingerprint']}"])


def licence_lines(restricted: Mapping[str, str]) -> list[str]:
    """A line for each repository whose licence is not permissive or unknown; see ``BuildSummary.restricted``."""
    said = "  look at the licence before you pass these tasks on"
    return [f"{said}: {name}: {what}" for name, what in restricted.items()]
